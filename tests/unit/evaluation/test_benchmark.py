"""evaluate() over fake rollouts."""

from __future__ import annotations

import json
import math

import pytest

from swe_rl.errors import EngineError, SweRlError
from swe_rl.evaluation import evaluate
from swe_rl.testing import make_task
from tests.unit.rollout.fakes import FIX, SUBMIT, World, make_collector


def script(session: str, turn: int) -> str | Exception:
    """Task a passes always, b every second time, c never; one rollout of d is lost."""
    _, task, index = session.rsplit("/", 2)
    if task == "d" and index == "0":
        return EngineError("down")
    passes = task in "ad" or (task == "b" and int(index) % 2 == 0)
    return ([FIX, SUBMIT] if passes else [SUBMIT])[turn]


async def test_result_counts_and_errors() -> None:
    collector, policy = make_collector(World(), script, infra_retries=0)
    tasks = [make_task(name, split="heldout") for name in "abcd"]
    got = await evaluate(collector, tasks, split="heldout", name="eval-x", samples_per_task=4, temperature=0.5)
    assert got.num_tasks == 4
    assert got.success == pytest.approx((4 + 2 + 0 + 4) / 16)
    assert got.by_task == {"a": [1.0] * 4, "b": [1.0, 0.0, 1.0, 0.0], "c": [0.0] * 4, "d": [1.0] * 4}
    assert got.num_lost == 0
    assert got.pass_at(1)[0] == pytest.approx(got.success)
    assert got.pass_at(4)[0] == pytest.approx(0.75)
    assert got.by_kind() == {"bugfix": (got.success, got.stderr)}
    row = json.loads(json.dumps(got.as_row()))
    assert row["stop_reasons"] == {"submitted": 16}
    assert row["mean_turns"] == pytest.approx((2 * 10 + 6) / 16)
    assert row["num_samples"] == 16
    assert {session.split("/")[0] for session, _ in policy.seeds} == {"eval-x"}


async def test_ranks_are_gathered() -> None:
    parts = []
    for names in ("ab", "cd"):
        collector, _ = make_collector(World(), script, infra_retries=0)
        part: list[object] = []

        def keep(items: list[object], part: list[object] = part) -> list[object]:
            part.extend(items)
            return items

        await evaluate(collector, [make_task(n) for n in names], split="s", name="e", samples_per_task=2, gather=keep)
        parts += part
    collector, _ = make_collector(World(), script, infra_retries=0)
    got = await evaluate(collector, [], split="s", name="e", samples_per_task=2, gather=lambda _: parts)
    assert got.num_tasks == 4
    assert got.success == pytest.approx((2 + 1 + 0 + 2) / 8)


async def test_nothing_but_losses_is_an_error_and_no_number() -> None:
    collector, _ = make_collector(World(), lambda session, turn: EngineError("down"), infra_retries=0)
    with pytest.raises(SweRlError, match=r"all 2 attempts were lost.*down"):
        await evaluate(collector, [make_task("a")], split="s", name="e", samples_per_task=2)


async def test_no_attempt_at_all_is_nan_not_zero() -> None:
    collector, _ = make_collector(World(), script)
    collector.drain()
    got = await evaluate(collector, [make_task("a")], split="s", name="e", samples_per_task=2)
    assert math.isnan(got.success)
    assert (got.num_lost, got.as_row()["num_samples"]) == (0, 0)
