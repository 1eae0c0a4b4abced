"""How attempts end, and what an evaluation reports of them."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

from swe_rl.cli.eval_table import final_table, without_times
from swe_rl.evaluation.attempt import OUTCOMES, attempt_of, outcome_of
from swe_rl.evaluation.benchmark import EvalResult
from swe_rl.evaluation.statistics import mean_of_runs
from swe_rl.testing import make_task
from swe_rl.types import Completion, Reward, StopReason, ToolCall, Trajectory, Turn

TASK = make_task("a")
GRADED = {"resolved": 0.0, "patch_bytes": 9.0, "patch_lines": 2.0, "tamper": 0.0, "f2p": 0.0, "p2p": 1.0}


def rollout(**values: object) -> Trajectory:
    completion = Completion(
        token_ids=[1, 2, 3], rollout_logprobs=[0.0] * 3, finish_reason="stop", policy_version=0, policy_version_max=0
    )
    call = ToolCall(name="bash", arguments={"command": "ls"})
    fields: dict[str, object] = {
        "trajectory_id": "e/0/a/0",
        "task_id": "a",
        "group_id": "e/0/a",
        "rollout_index": 0,
        "turns": [
            Turn(context_ids=[7] * 5, completion=completion, tool_call=call, observation="x"),
            Turn(context_ids=[8], completion=completion, tool_call=None, observation="", format_error=True),
        ],
        "stop_reason": StopReason.SUBMITTED,
        "temperature": 1.0,
        "patch": b"+x\n",
        "timings_s": {"episode": 4.0, "open_sandbox": 9.0},
    }
    return Trajectory(**{**fields, **values})  # type: ignore[arg-type]


def reward(**terms: float) -> Reward:
    return Reward(value=terms.get("resolved", 0.0), terms={**GRADED, **terms})


@pytest.mark.parametrize(
    ("values", "outcome"),
    [
        ({"reward": reward(resolved=1.0, f2p=1.0)}, "passed"),
        ({"reward": reward(f2p=1.0, p2p=0.5)}, "regressed"),
        ({"reward": reward(f2p=0.5)}, "partly_fixed"),
        ({"reward": reward()}, "unfixed"),
        ({"reward": reward(f2p=1.0, tamper=2.0)}, "tampered"),
        ({"reward": reward(timeout=1.0)}, "unfinished"),
        ({"reward": reward(apply_failed=1.0)}, "bad_patch"),
        ({"reward": Reward(value=0.0, terms={"patch_too_large": 1.0}), "patch": None}, "bad_patch"),
        ({"reward": reward(empty=1.0), "patch": b""}, "no_patch"),
        ({"reward": Reward(value=0.0, terms={"env_killed": 1.0}), "stop_reason": StopReason.ENV_KILLED}, "env_killed"),
        ({"reward": Reward(value=0.5, terms={"resolved": 0.0}), "stop_reason": StopReason.ABSTAINED}, "abstained"),
        ({"reward": None}, "ungraded"),
        ({"reward": reward(f2p=0.0), "stop_reason": StopReason.MAX_TURNS}, "unfixed"),
    ],
)
def test_outcomes(values: dict[str, object], outcome: str) -> None:
    assert outcome in OUTCOMES
    assert outcome_of(rollout(**values), TASK) == outcome


def test_an_attempt_counts_turns_commands_tokens_and_seconds() -> None:
    task = replace(TASK, meta={"level": 3}, repo="o/r", kind="feature")
    found = attempt_of(rollout(reward=reward()), task, run=2)
    assert (found.num_turns, found.num_commands, found.num_format_errors) == (2, 1, 1)
    assert (found.num_sampled_tokens, found.num_tokens, found.seconds) == (6, 12, 4.0)
    assert (found.repository, found.difficulty, found.kind, found.run) == ("o/r", "3", "feature", 2)


def results() -> EvalResult:
    """Tasks a and b in one repository, c in another; two runs."""
    passing = {"a": (True, True), "b": (True, False), "c": (False, False)}
    attempts = []
    for name, outcomes in passing.items():
        task = replace(make_task(name), repo="o/two" if name == "c" else "o/one", meta={"difficulty": f"level {name}"})
        for run, passed in enumerate(outcomes):
            terms = reward(resolved=float(passed), f2p=float(passed))
            attempts.append(attempt_of(rollout(task_id=name, reward=terms), task, run=run))
    return EvalResult(split="test", mode="sampled", attempts=attempts, num_lost=1)


def test_the_report_has_runs_intervals_parts_and_costs() -> None:
    row = json.loads(json.dumps(results().as_report()))
    assert row["success"] == pytest.approx(0.5)
    assert row["run_means"] == pytest.approx([2 / 3, 1 / 3])
    assert row["run_stderr"] == pytest.approx(mean_of_runs([2 / 3, 1 / 3])[1])
    assert {k: v[0] for k, v in row["pass_at"].items()} == pytest.approx({"1": 0.5, "2": 2 / 3})
    low, high = row["interval"]
    assert 0.0 <= low < 0.5 < high <= 1.0
    assert row["cost"] == {
        "num_turns": 2.0,
        "num_commands": 1.0,
        "num_sampled_tokens": 6.0,
        "num_tokens": 12.0,
        "seconds": 4.0,
    }
    assert row["by_repository"]["o/one"][0] == pytest.approx(0.75)
    assert row["by_repository"]["o/two"] == [0.0, row["by_repository"]["o/two"][1], 1]
    assert list(row["by_difficulty"]) == ["level a", "level b", "level c"]
    assert row["outcomes"] == {"passed": 3, "unfixed": 3}
    assert "seconds" not in without_times(row)["cost"]


def test_runs_count_only_as_far_as_every_task_has_them() -> None:
    found = results()
    short = replace(found, attempts=[a for a in found.attempts if not (a.task_id == "c" and a.run == 1)])
    assert short.run_means == pytest.approx([2 / 3])
    assert list(short.curve()) == [1]
    assert math.isnan(mean_of_runs(short.run_means)[1])


def test_the_table_says_all_of_it() -> None:
    text = final_table([results().as_report()])
    for words in (
        "pass@1",
        "test sampled",
        "50.0",
        "pass@2",
        "66.7",
        "o/one",
        "level c",
        "unfixed",
        "ended: submitted",
    ):
        assert words in text, words
    none = final_table([EvalResult(split="s", mode="m", attempts=[]).as_report()])
    assert "s m" in none
