"""What is known of one graded patch beside its value: `Reward.terms`.

resolved       1 when the tests say so, whatever shaping makes of the value
f2p, p2p       fractions of FAIL_TO_PASS and PASS_TO_PASS that passed
tests_run      required tests that came to an end, passed or not
patch_bytes    of the patch as handed in; patch_lines: lines added and removed by what was kept of it
dropped        paths that the policy left out; tamper: of these and of forged results, what deserves blame
suspect        signs of code that no repair needs (suspect.py); decides nothing
flaky          1 when two sandboxes gave different answers
ended          tests whose process came to no proper end, by sys.exit, os._exit or a crash
and, when they are the reason, one of empty, malformed, apply_failed, tests_blocked, timeout, incomplete or the outcome
of the sandbox (oom, pids_limit, ...).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from swe_rl.rewards.policy import FilteredPatch
from swe_rl.tasks.pass_rules import Judgement
from swe_rl.tasks.test_runner import Verdict
from swe_rl.types import Reward, Task

_ENDED_SIGNS = ("the process under test ended", "the process of the test ended", "SystemExit")


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one fresh sandbox judged the patch."""

    terms: Mapping[str, float]
    report: Mapping[str, Verdict] | None = None  # by test id; None: the tests came to no end
    judgement: Judgement | None = None  # in place of a report, by the rule of the task's data set

    def status(self, task: Task) -> dict[str, str]:
        """Of every required test."""
        if self.judgement is not None:
            return dict(self.judgement.statuses)
        required = (*task.fail_to_pass, *task.pass_to_pass)
        return {name: self.report[name].status if self.report else "missing" for name in required}

    def fails_only_others(self, task: Task) -> bool:
        """Every FAIL_TO_PASS test passed, and some PASS_TO_PASS test did not."""
        if self.judgement is not None:
            return self.judgement.f2p == 1.0 and self.judgement.p2p < 1.0
        status = self.status(task)
        fixed = bool(task.fail_to_pass) and all(status[name] == "passed" for name in task.fail_to_pass)
        return fixed and not self.terms and any(status[name] != "passed" for name in task.pass_to_pass)

    def agrees_with(self, other: Attempt, task: Task) -> bool:
        return self.terms == other.terms and self.status(task) == other.status(task)

    def with_term(self, name: str) -> Attempt:
        return replace(self, terms={**self.terms, name: 1.0})


def make_reward(
    task: Task, attempt: Attempt, patch: bytes, filtered: FilteredPatch | None = None, *, signs: Sequence[str] = ()
) -> Reward:
    """1.0 or 0.0 with all terms. filtered: None when the patch could not be read."""
    status = attempt.status(task)
    forged = float(any(state == "forged" for state in status.values()))
    forged += float("equals everything" in signs)
    if forged or attempt.terms.get("tamper"):
        status = dict.fromkeys(status, "error")  # of no result is it known whether it is one
    passed = sum(state == "passed" for state in status.values())
    reasons = {name: value for name, value in attempt.terms.items() if name != "flaky"}
    judged = attempt.judgement
    good = bool(task.fail_to_pass) and passed == len(status) if judged is None else judged.resolved
    resolved = good and not reasons and not forged
    terms = {
        **attempt.terms,
        "resolved": float(resolved),
        "f2p": _fraction(task.fail_to_pass, status) if judged is None or forged else judged.f2p,
        "p2p": _fraction(task.pass_to_pass, status) if judged is None or forged else judged.p2p,
        "tests_run": float(sum(state in ("passed", "failed", "error") for state in status.values())),
        "patch_bytes": float(len(patch)),
        "patch_lines": float(changed_lines(filtered.patch if filtered else b"")),
        "dropped": float(len(filtered.dropped) if filtered else 0),
        "tamper": attempt.terms.get("tamper", 0.0) + forged + float(filtered.tamper if filtered else 0),
        "suspect": float(len(signs)),
        "flaky": attempt.terms.get("flaky", 0.0),
        "ended": float(_ended(task, attempt)),
    }
    shown = {name: state if state not in ("ended", "forged") else "error" for name, state in status.items()}
    return Reward(value=float(resolved), terms=terms, tests_passed=passed, tests_total=len(status), test_status=shown)


def changed_lines(patch: bytes) -> int:
    """Lines that a diff adds or removes, its headers not counted."""
    lines = patch.split(b"\n")
    return sum(line[:1] in (b"+", b"-") and line[:4] not in (b"+++ ", b"--- ") for line in lines)


def _ended(task: Task, attempt: Attempt) -> int:
    if attempt.report is None:
        return 0
    verdicts = [attempt.report[name] for name in (*task.fail_to_pass, *task.pass_to_pass)]
    return sum(
        verdict.status == "ended"
        or (verdict.status != "passed" and any(sign in verdict.message for sign in _ENDED_SIGNS))
        for verdict in verdicts
    )


def _fraction(names: tuple[str, ...], status: Mapping[str, str]) -> float:
    return sum(status.get(name) == "passed" for name in names) / len(names) if names else 1.0
