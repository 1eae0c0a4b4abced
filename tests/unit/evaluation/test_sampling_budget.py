"""Stopping when confident, and rollouts against tokens: against all orders, and by hand."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from swe_rl.errors import EngineError, SweRlError
from swe_rl.evaluation import pass_at_k
from swe_rl.evaluation.budget import sequential, tokens_against_rollouts, until_confident
from swe_rl.evaluation.candidates import Candidate
from swe_rl.evaluation.sequential_eval import evaluate_sequentially
from swe_rl.testing import make_task
from swe_rl.types import Task, Trajectory
from tests.unit.rollout.fakes import FIX, SUBMIT, World, make_collector


def drawn(draw: random.Random, count: int) -> list[Candidate]:
    return [
        Candidate(
            trajectory_id=f"e/0/t/{i}",
            task_id="t",
            repository="r",
            passed=draw.random() < 0.5,
            ef_score=draw.choice([0.1, 0.4, 0.4, 0.8, 0.9]),
            num_tokens=draw.randrange(10, 99),
            num_context_tokens=draw.randrange(100, 999),
        )
        for i in range(count)
    ]


def by_orders(items: Sequence[Candidate], threshold: float, most: int) -> tuple[float, float, float]:
    """(success, rollouts, tokens) averaged over every order of the rollouts."""
    rates, rollouts, tokens = [], [], []
    for order in itertools.permutations(items):
        taken = []
        for item in order[:most]:
            taken.append(item)
            if (item.ef_score or 0.0) >= threshold:
                break
        best = max(item.ef_score or 0.0 for item in taken)
        tied = [item for item in taken if item.ef_score == best]
        rates.append(sum(bool(item.passed) for item in tied) / len(tied))
        rollouts.append(len(taken))
        tokens.append(sum(item.num_tokens for item in taken))
    count = len(rates)
    return sum(rates) / count, sum(rollouts) / count, sum(tokens) / count


@pytest.mark.parametrize("threshold", [0.0, 0.4, 0.85, 2.0])
@pytest.mark.parametrize("seed", range(4))
def test_stopping_rule_against_all_orders(seed: int, threshold: float) -> None:
    items = drawn(random.Random(seed), 6)
    for most in (1, 3, 6):
        found = sequential({"t": items}, threshold=threshold, most=most)
        rate, rollouts, tokens = by_orders(items, threshold, most)
        assert found.rate == pytest.approx(rate, abs=1e-12)
        assert found.rollouts == pytest.approx(rollouts)
        assert found.tokens == pytest.approx(tokens)


def test_a_threshold_that_all_reach_costs_one_rollout_and_one_that_none_does_costs_all() -> None:
    items = drawn(random.Random(1), 5)
    assert sequential({"t": items}, threshold=0.0, most=9).rollouts == 1.0
    assert sequential({"t": items}, threshold=2.0, most=9).rollouts == 5.0


def test_a_flagged_score_stops_nothing() -> None:
    items = drawn(random.Random(3), 5)
    flagged = [replace(item, ef_score=1.0, ef_flag="leak: x") for item in items]
    found = sequential({"t": flagged}, threshold=0.5, most=5)
    assert found.rollouts == 5.0
    assert found.rate == pytest.approx(sum(bool(item.passed) for item in items) / 5)


class ByIndex:
    """A verifier that likes the third rollout."""

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        return 0.9 if trajectory.rollout_index == 3 else 0.2


async def test_sampling_stops_at_the_first_confident_score_and_lost_rollouts_do_not_count() -> None:
    def script(session: str, turn: int) -> str | Exception:
        return EngineError("down") if session.endswith("/1") else [FIX, SUBMIT][turn]

    collector, _ = make_collector(World(), script, infra_retries=0)
    options = {"threshold": 0.8, "phase": "eval-x"}
    found, scores = await until_confident(collector, make_task("a"), ByIndex(), most=8, **options)  # type: ignore[arg-type]
    assert [item.rollout_index for item in found] == [0, 2, 3]
    assert scores == [0.2, 0.2, 0.9]
    collector, _ = make_collector(World(), script, infra_retries=0)
    found, scores = await until_confident(collector, make_task("a"), ByIndex(), most=2, **options)  # type: ignore[arg-type]
    assert [item.rollout_index for item in found] == [0, 2]


async def test_evaluation_with_the_rule_hands_in_one_rollout_per_task() -> None:
    """Task a is confident at its fourth rollout; the two of task b are too few for that, so the best score counts."""

    class Scores:
        async def score(self, task: Task, trajectory: Trajectory) -> float:
            by_index = {"a": [0.1, 0.2, 0.3, 0.9], "b": [math.nan, 0.4, 0.2, 0.3]}
            return by_index[task.task_id][trajectory.rollout_index]

    def script(session: str, turn: int) -> str:
        passes = session.endswith(("/a/3", "/b/1"))
        return ([FIX, SUBMIT] if passes else [SUBMIT])[turn]

    collector, _ = make_collector(World(), script)
    tasks = [make_task("a"), make_task("b")]
    options = {"split": "heldout", "name": "eval-x", "threshold": 0.8}
    found = await evaluate_sequentially(collector, tasks, Scores(), most=4, **options)  # type: ignore[arg-type]
    assert found is not None
    assert found.result.by_task == {"a": [1.0], "b": [1.0]}
    assert (found.rollouts, found.confident) == (4.0, 0.5)
    assert len(found.scores) == 8
    assert found.scores["eval-x/0/a/3"] == 0.9
    collector.drain()
    assert await evaluate_sequentially(collector, tasks, Scores(), most=5, **options) is None  # type: ignore[arg-type]


async def test_an_outage_is_no_result() -> None:
    collector, _ = make_collector(World(), lambda session, turn: EngineError("down"), infra_retries=0)
    options = {"split": "heldout", "name": "eval-x", "threshold": 0.8}
    with pytest.raises(SweRlError, match="all rollouts of 2 tasks were lost"):
        await evaluate_sequentially(collector, [make_task("a"), make_task("b")], ByIndex(), most=2, **options)  # type: ignore[arg-type]


def test_rollouts_against_tokens_by_hand() -> None:
    items = [
        Candidate(trajectory_id=f"{i}", task_id="t", repository="r", passed=p, num_context_tokens=n, ef_score=e)
        for i, (p, n, e) in enumerate([(True, 100, 0.9), (True, 300, 0.8), (False, 50, 0.99), (False, 500, 0.1)])
    ]
    cells = {
        (c.limit, c.k): c for c in tokens_against_rollouts({"t": items}, limits=[100, 1000], ks=[1, 2], selector="ef")
    }
    short, long = cells[100, 2], cells[1000, 2]
    assert short.pass_at_k == pytest.approx(pass_at_k(4, 1, 2))
    assert long.pass_at_k == pytest.approx(pass_at_k(4, 2, 2))
    assert short.tokens == pytest.approx(2 * (100 + 100 + 50 + 100) / 4)
    assert long.tokens == pytest.approx(2 * 950 / 4)
    assert cells[100, 1].best_at_k == cells[100, 1].pass_at_k == 0.25
    # pairs at 1,000 tokens, by score: the wrong 0.99 wins three of six, the passing 0.9 two, the passing 0.8 one
    assert long.best_at_k == pytest.approx(0.5)
    # at 100 the episodes cut lose: pairs with the wrong 0.99 fail, the passing 0.9 wins its other two
    assert short.best_at_k == pytest.approx(2 / 6)
    without = tokens_against_rollouts({"t": items}, limits=[100], ks=[1, 9])
    assert len(without) == 1
    assert math.isnan(without[0].best_at_k)


def test_no_opinion_is_no_worse_than_an_episode_that_was_cut() -> None:
    flagged, cut = drawn(random.Random(0), 2)
    flagged = replace(flagged, passed=True, ef_score=0.7, ef_flag="YES and NO are unlikely", num_context_tokens=50)
    cut = replace(cut, passed=True, ef_score=0.9, num_context_tokens=500)
    (cell,) = tokens_against_rollouts({"t": [flagged, cut]}, limits=[100], ks=[2], selector="ef")
    assert cell.best_at_k == pytest.approx(0.5)  # one of two that nothing is known of
