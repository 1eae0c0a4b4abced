"""Which results of the hidden tests resolve a task: the data set's own rule, and a strict one for our tasks.

strict             every required test ended as passed. Absent, skipped, xfailed: not passed. Our own tasks.
f2p_p2p            SWE-bench 5, SWE-Gym, SWE-rebench: FAIL_TO_PASS passed or xfailed, PASS_TO_PASS may be skipped, too;
                   an absent test failed; an id that the data set cut inside its parameters matches by its beginning
f2p_p2p_fail_only  SWE-bench's repositories whose logs name failures only: a required test fails where the log says so
f2p_p2p_absent_ok  SWE-smith, which runs subsets: a required test fails where the log says so (failed or error)
all_passed         SWE-rebench v2, SWE-bench Pro, Multi-SWE-bench: every required test ended as passed; durations that
                   runners put into test names are left out
exact_map          R2E-Gym: as many tests as the map has, each with the map's status, failing ones included
reward_file        Harbor: what the verifier wrote; no statuses

No rule is met by a run without results. Only where logs name failures alone does silence count, and only beside other
proof that tests ran. Like upstream, exit_status voids a SWE-bench run whose command failed though no test did.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from swe_rl.errors import ConfigError
from swe_rl.types import PassRule, Task

PASSED, FAILED, ERROR, SKIPPED, XFAIL, MISSING = "passed", "failed", "error", "skipped", "xfail", "missing"
# Durations at the end of a name (PHP and JUnit, JavaScript runners) or inside it (Botan), as SWE-rebench v2 drops them.
_DURATIONS = (
    re.compile(r"\s*\[\s*\d+(?:\.\d+)?\s*m?s\s*\]\s*$", re.IGNORECASE),
    re.compile(r"\s+in\s+\d+(?:\.\d+)?\s+m?sec\b", re.IGNORECASE),
    re.compile(r"\s*\(\s*\d+(?:\.\d+)?\s*m?s\s*\)\s*$", re.IGNORECASE),
)


@dataclass(frozen=True, slots=True)
class TestResults:
    """What one run of the hidden tests reported."""

    __test__ = False  # pytest: not a test class

    statuses: Mapping[str, str]  # test id -> passed | failed | error | skipped | xfail
    complete: bool = True  # the patch applied, and the tests began and ended
    exit_code: int | None = None  # of the test command, None where nobody knows
    suite_ran: bool = False  # the output says that tests ran, though it names none


@dataclass(frozen=True, slots=True)
class Judgement:
    """Whether a task is resolved, and by how much it is not."""

    resolved: bool
    statuses: Mapping[str, str] = field(default_factory=dict)  # of each required test; "missing" where absent
    f2p: float = 0.0  # fraction of FAIL_TO_PASS (of the map, for exact_map) that is as it must be
    p2p: float = 0.0  # fraction of PASS_TO_PASS; 1 where there is none
    reason: str = ""  # why not: incomplete | no_results | exit_status | tests


def judge(task: Task, results: TestResults) -> Judgement:
    """Applies `task.pass_rule`. Raises ConfigError for reward_file, which has no statuses to judge."""
    if task.pass_rule == "reward_file":
        raise ConfigError(f"task {task.task_id} is judged by the file that its verifier writes, not by statuses")
    if not results.complete:
        return _unfinished(task, "incomplete")
    silent_is_good = task.pass_rule == "f2p_p2p_fail_only" and results.suite_ran
    if not results.statuses and not silent_is_good:
        return _unfinished(task, "no_results")
    if task.pass_rule == "exact_map":
        return _exact_map(task, results.statuses)
    if task.pass_rule in _EXIT_CHECKED and _exit_denies(results):
        return _unfinished(task, "exit_status")
    rule = _RULES[task.pass_rule]
    found = {name: rule.find(name, results.statuses) for name in (*task.fail_to_pass, *task.pass_to_pass)}
    f2p = [rule.f2p(found[name]) for name in task.fail_to_pass]
    p2p = [rule.p2p(found[name]) for name in task.pass_to_pass]
    resolved = bool(f2p) and all(f2p) and all(p2p)
    return Judgement(resolved, found, _fraction(f2p), _fraction(p2p), "" if resolved else "tests")


@dataclass(frozen=True, slots=True)
class _Rule:
    """How one family looks a test up, and what counts as good."""

    f2p: Callable[[str], bool]
    p2p: Callable[[str], bool]
    find: Callable[[str, Mapping[str, str]], str]


def _exact(name: str, statuses: Mapping[str, str]) -> str:
    return statuses.get(name, MISSING)


def _by_beginning(name: str, statuses: Mapping[str, str]) -> str:
    """An id with an open bracket was cut; the tests that begin with it count if they agree on having passed."""
    if name in statuses or name.count("[") <= name.count("]"):
        return _exact(name, statuses)
    found = [status for key, status in statuses.items() if key.startswith(name)]
    return found[0] if len({status in _GOOD for status in found}) == 1 else MISSING


def _without_durations(name: str, statuses: Mapping[str, str]) -> str:
    if name in statuses:
        return statuses[name]
    bare = bare_name(name)
    found = [status for key, status in statuses.items() if bare_name(key) == bare]
    return found[-1] if found else MISSING


def bare_name(name: str) -> str:
    """A test's name without a duration."""
    for pattern in _DURATIONS:
        name = pattern.sub("", name)
    return name.strip()


def _not_failed(status: str) -> bool:
    return status not in (FAILED, ERROR)


def _exit_denies(results: TestResults) -> bool:
    """The test command failed and yet no test did: lines that say PASSED prove nothing then."""
    failed = any(status in (FAILED, ERROR) for status in results.statuses.values())
    return results.exit_code not in (None, 0) and bool(results.statuses) and not failed


def _exact_map(task: Task, statuses: Mapping[str, str]) -> Judgement:
    """Extra tests fail it by their number. Without an expected map nothing can be right."""
    expected = task.expected_status
    found = {name: statuses.get(name, MISSING) for name in expected}
    agreeing = [found[name] == status for name, status in expected.items()]
    named = (name for name in statuses if name)  # upstream passes over results without a name, but counts them
    equal = len(statuses) == len(expected) and all(expected.get(name) == statuses[name] for name in named)
    resolved = bool(expected) and equal
    return Judgement(resolved, found, _fraction(agreeing) if expected else 0.0, 1.0, "" if resolved else "tests")


def _unfinished(task: Task, reason: str) -> Judgement:
    required = task.expected_status or (*task.fail_to_pass, *task.pass_to_pass)
    return Judgement(False, dict.fromkeys(required, MISSING), 0.0, 0.0, reason)


_GOOD = (PASSED, XFAIL)
_EXIT_CHECKED: tuple[PassRule, ...] = ("f2p_p2p", "f2p_p2p_fail_only")
_RULES: dict[PassRule, _Rule] = {
    "strict": _Rule(PASSED.__eq__, PASSED.__eq__, _exact),
    "f2p_p2p": _Rule(_GOOD.__contains__, (*_GOOD, SKIPPED).__contains__, _by_beginning),
    "f2p_p2p_fail_only": _Rule(FAILED.__ne__, FAILED.__ne__, _exact),
    "f2p_p2p_absent_ok": _Rule(_not_failed, _not_failed, _exact),
    "all_passed": _Rule(PASSED.__eq__, PASSED.__eq__, _without_durations),
}


def _fraction(good: list[bool]) -> float:
    return sum(good) / len(good) if good else 1.0
