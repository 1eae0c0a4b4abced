"""One attempt, as evaluation counts it, and how attempts end: an outcome is about the patch, a stop reason about the
episode."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from swe_rl.types import StopReason, Task, Trajectory

# From the first that fits; each attempt has one.
OUTCOMES: dict[str, str] = {
    "passed": "all required hidden tests pass",
    "abstained": "the policy said that it cannot solve the task",
    "no_patch": "nothing was changed",
    "bad_patch": "what was changed is no patch: too large, unreadable, or destroyed",
    "env_killed": "its own command ended the sandbox",
    "tampered": "hidden tests fail and the patch touched tests or forged results",
    "unfinished": "the hidden tests came to no end with it",
    "regressed": "all FAIL_TO_PASS tests pass, others broke",
    "partly_fixed": "some of the FAIL_TO_PASS tests pass",
    "unfixed": "no FAIL_TO_PASS test passes",
    "ungraded": "no hidden test was run",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """What a result needs of one rollout; small, so that ranks can exchange it."""

    task_id: str
    kind: str
    passed: bool
    stop_reason: str
    num_turns: int
    num_sampled_tokens: int
    num_format_errors: int
    repository: str = ""
    difficulty: str = ""  # "" where the source does not say
    run: int = 0  # place in the group: attempts of one number are one run over the tasks
    outcome: str = ""  # of OUTCOMES
    num_tokens: int = 0  # context and sampled
    num_commands: int = 0  # tool calls
    seconds: float = 0.0  # of the episode, without waiting for a sandbox and without grading


def attempt_of(trajectory: Trajectory, task: Task, *, run: int = 0) -> Attempt:
    """The attempt of a finished rollout of `task`."""
    return Attempt(
        task_id=trajectory.task_id,
        kind=task.kind,
        passed=is_resolved(trajectory),
        stop_reason=str(trajectory.stop_reason),
        num_turns=len(trajectory.turns),
        num_sampled_tokens=trajectory.num_sampled_tokens,
        num_format_errors=sum(turn.format_error for turn in trajectory.turns),
        repository=task.repo,
        difficulty=str(task.meta.get("difficulty", task.meta.get("level", ""))),
        run=run,
        outcome=outcome_of(trajectory, task),
        num_tokens=len(trajectory.token_ids),
        num_commands=sum(turn.tool_call is not None for turn in trajectory.turns),
        seconds=trajectory.timings_s.get("episode", 0.0),
    )


def is_resolved(trajectory: Trajectory) -> bool:
    """All required hidden tests passed."""
    return trajectory.reward is not None and trajectory.reward.solved


def outcome_of(trajectory: Trajectory, task: Task) -> str:
    """The name in OUTCOMES that fits first."""
    reward = trajectory.reward
    if is_resolved(trajectory):
        return "passed"
    if trajectory.stop_reason is StopReason.ABSTAINED:
        return "abstained"
    if trajectory.stop_reason is StopReason.ENV_KILLED:
        return "env_killed"
    terms = {} if reward is None else reward.terms
    if any(name in terms for name in ("malformed", "apply_failed")) or _unreadable(terms):
        return "bad_patch"
    if trajectory.patch == b"":
        return "no_patch"
    if terms.get("tamper", 0.0) > 0:
        return "tampered"
    if any(name in terms for name in ("timeout", "incomplete")):
        return "unfinished"
    return _tested(terms.get("f2p"))


def _unreadable(terms: Mapping[str, float]) -> bool:
    """Some term says why there was no patch (patch_too_large, ...), as opposed to the measures of one."""
    measures = ("patch_bytes", "patch_lines", "patch_line_cost")
    return any(name.startswith("patch_") and name not in measures for name in terms)


def _tested(fixed: float | None) -> str:
    """By the share of FAIL_TO_PASS tests that pass."""
    if fixed is None:
        return "ungraded"
    return "regressed" if fixed == 1.0 else "partly_fixed" if fixed > 0.0 else "unfixed"
