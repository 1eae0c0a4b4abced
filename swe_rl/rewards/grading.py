"""Grading: the patch alone, in a fresh sandbox, against hidden tests that appear there only after it was applied.

Whose failure is it? A patch that is malformed, does not apply, breaks imports, hangs, fills memory or ends the process
is the agent's: 0. Where the only sign is time or a missing report, a second sandbox has to agree. A sandbox that cannot
be made, is lost or answers nonsense is the machine's: again in a fresh one, and in the end SandboxError. Never 0.
"""

from __future__ import annotations

import asyncio
import errno
import posixpath
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from swe_rl.errors import PatchError, SandboxError, SandboxLost, SandboxUnavailable
from swe_rl.protocols import Sandbox
from swe_rl.rewards.cache import ResultCache, result_key
from swe_rl.rewards.patch import CLEAN_ENV
from swe_rl.rewards.policy import FilteredPatch, filter_patch
from swe_rl.tasks.test_runner import Verdict, run_tests
from swe_rl.types import ExecResult, Reward, SandboxSpec, Task

REPORT_BYTES = 2 << 20  # room for the report of some ten thousand tests
APPLY_TIMEOUT_S = 30.0
RETRY_PAUSE_S = 0.2  # before the second attempt, doubled each time

# Attributes of the tree must not convert line ends or run filters while a patch is applied byte for byte.
_APPLY = (
    "{ mkdir -p .git/info && echo '* -text -eol -ident -filter -working-tree-encoding' "
    ">.git/info/attributes; } || exit 127; "
    f"exec {CLEAN_ENV} git -c core.autocrlf=false -c core.fileMode=true apply --whitespace=nowarn -"
)
_CANNOT_START = (126, 127)  # no interpreter, no git, no workspace: nothing of the agent's ran yet
_MACHINE_SIGNS = ("Resource temporarily unavailable", "Cannot allocate memory", "BlockingIOError", "time limit")
_BLOCKED_BY_PATCH = (errno.ENOTDIR, errno.EISDIR, errno.ENOSPC, errno.EACCES)  # files of the patch stand in the way

OpenSandbox = Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]


class Leases(Protocol):
    """What grading wants of a pool: a fresh sandbox that is gone afterwards."""

    def lease(self, spec: SandboxSpec) -> AbstractAsyncContextManager[Sandbox]: ...


@dataclass(frozen=True, slots=True)
class _Attempt:
    """How one fresh sandbox judged the patch."""

    terms: Mapping[str, float]
    report: Mapping[str, Verdict] | None = None  # by test id; None: the tests came to no end


@dataclass(frozen=True, slots=True)
class _Canary:
    """A test that must fail, among the hidden ones. Pytest and the code under test share a process, so that code may
    let tests pass that do not, by patching pytest or by imitating the recorder: then this one does not fail as it
    should."""

    path: str
    test_id: str
    message: str

    @classmethod
    def beside(cls, required: Sequence[str]) -> _Canary:
        """Its file is the last one in order, so that what the other tests call has had its effect."""
        last = max(test_id.partition("::")[0] for test_id in required)
        file_token, name, message = (secrets.token_hex(4) for _ in range(3))
        path = f"{posixpath.splitext(last)[0]}_{file_token}.py"
        return cls(path, f"{path}::test_{name}", message)

    @property
    def source(self) -> bytes:
        name = self.test_id.partition("::")[2]
        return f"def {name}():\n    raise AssertionError({self.message!r})\n".encode()

    def is_forged(self, verdicts: Mapping[str, Verdict], required: Sequence[str]) -> bool:
        """It passed, or everything else did while it did not fail for its own reason."""
        own = verdicts[self.test_id]
        if own.status == "failed" and self.message in own.message:
            return False
        return own.status == "passed" or all(verdicts[name].status == "passed" for name in required)


async def grade(
    task: Task,
    patch: bytes,
    *,
    spec: SandboxSpec,
    timeout_s: float | None = None,
    retries: int = 2,
    pool: Leases | OpenSandbox | None = None,
    cache: ResultCache | None = None,
    trusted: bool = False,
) -> Reward:
    """1.0 if and only if every FAIL_TO_PASS and PASS_TO_PASS test passed, else 0.0.

    spec: has the task's base tree as a layer. timeout_s: of the tests, `task.timeout_s` by default. pool: a pool or a
    function that opens a sandbox; one of its own per attempt by default. trusted: the patch as it is, no policy, an
    empty one too: for validating tasks, never for agents. `Reward.terms` says what happened: `resolved`, `f2p` and
    `p2p` (fractions passed), `tamper`, `dropped`, `patch_bytes`, and one of `empty`, `malformed`, `apply_failed`,
    `timeout`, `incomplete` or the sandbox's outcome. Missing, skipped and xfailed tests are not passed.

    Raises SandboxError when no attempt out of 1 + retries came to a verdict.
    """
    try:
        filtered = _untouched(patch) if trusted else filter_patch(patch, hidden=task.hidden_files, existing=task.tree)
    except PatchError as err:
        return _reward(task, _Attempt({err.reason: 1.0}), len(patch), None)
    if not filtered.patch and not trusted:
        return _reward(task, _Attempt({"empty": 1.0}), len(patch), filtered)
    limit_s = task.timeout_s if timeout_s is None else min(timeout_s, task.timeout_s)
    key = result_key(task, filtered.patch, limit_s)
    attempt = cache.get(key) if cache is not None else None
    if attempt is None:
        attempt = await _with_retries(
            task, filtered.patch, _grading_spec(spec, limit_s), limit_s, retries, _opener(pool)
        )
        if cache is not None and not _may_be_the_machine(attempt):
            cache.put(key, attempt)
    return _reward(task, attempt, len(patch), filtered)


def _untouched(patch: bytes) -> FilteredPatch:
    return FilteredPatch(patch=patch, kept=(), dropped=(), tamper=0)


def _opener(pool: Leases | OpenSandbox | None) -> OpenSandbox:
    if pool is None:
        from swe_rl.sandbox import open_sandbox

        return open_sandbox
    lease: OpenSandbox = getattr(pool, "lease", pool)  # type: ignore[arg-type]  # a pool, or the function itself
    return lease


def _grading_spec(spec: SandboxSpec, limit_s: float) -> SandboxSpec:
    limits = replace(
        spec.limits,
        output_bytes=max(spec.limits.output_bytes, REPORT_BYTES),
        command_s=max(spec.limits.command_s, limit_s, APPLY_TIMEOUT_S),
    )
    return replace(spec, limits=limits)


async def _with_retries(
    task: Task, patch: bytes, spec: SandboxSpec, limit_s: float, retries: int, open_one: OpenSandbox
) -> _Attempt:
    last: SandboxError | None = None
    doubtful: _Attempt | None = None
    for number in range(retries + 1):
        if number:
            await asyncio.sleep(RETRY_PAUSE_S * 2 ** (number - 1))
        try:
            async with open_one(spec) as sandbox:
                attempt = await _attempt(task, patch, sandbox, limit_s)
        except SandboxUnavailable:
            raise  # no retry makes this machine able
        except SandboxError as err:
            last = err
            continue
        if doubtful is not None or not _may_be_the_machine(attempt):
            return attempt
        doubtful = attempt
    if doubtful is not None and last is None:
        return doubtful
    raise SandboxError(f"grading {task.task_id} failed {retries + 1} times, last: {last!r}") from last


def _may_be_the_machine(attempt: _Attempt) -> bool:
    """No complete report, or a test that failed for want of time, processes or memory: the patch can do that, a
    machine at its limits too. Such a verdict counts once a second sandbox agrees."""
    messages = [verdict.message for verdict in (attempt.report or {}).values() if verdict.status != "passed"]
    unfinished = "incomplete" in attempt.terms or "timeout" in attempt.terms
    return unfinished or any(sign in message for message in messages for sign in _MACHINE_SIGNS)


async def _attempt(task: Task, patch: bytes, sandbox: Sandbox, limit_s: float) -> _Attempt:
    if patch:
        applied = _answered(await sandbox.exec(_APPLY, timeout_s=APPLY_TIMEOUT_S, cwd=task.workdir, stdin=patch))
        if applied.outcome == "timeout":
            return _Attempt({"timeout": 1.0})
        if applied.exit_code != 0:
            return _Attempt({"apply_failed": 1.0})
    required = [*task.fail_to_pass, *task.pass_to_pass]
    canary = _Canary.beside(required) if task.test_runner == "pytest" and required else None
    ids = required if canary is None else [*required, canary.test_id]
    files = dict(task.hidden_files) | ({} if canary is None else {canary.path: canary.source})
    try:
        for path, data in files.items():
            await sandbox.write_file(f"{task.workdir}/{path}", data)
        run = await run_tests(sandbox, task, ids, limit_s=limit_s, remove_tests=True)
    except OSError as err:
        if err.errno in _BLOCKED_BY_PATCH:
            return _Attempt({"tests_blocked": 1.0})
        raise SandboxError(f"the tests cannot be written: {err}") from err
    if _answered(run.result).outcome not in ("ok", "nonzero"):
        return _Attempt({run.result.outcome: 1.0})
    if run.verdicts is None:
        return _Attempt({"incomplete": 1.0})
    return _Attempt({"tamper": 1.0} if canary and canary.is_forged(run.verdicts, required) else {}, run.verdicts)


def _answered(result: ExecResult) -> ExecResult:
    if result.outcome == "lost":
        raise SandboxLost("the sandbox ended while grading")
    if result.exit_code in _CANNOT_START:
        raise SandboxError(
            f"the grading sandbox is unusable: {result.stderr[-200:].decode('utf-8', 'replace').strip()}"
        )
    return result


def _reward(task: Task, attempt: _Attempt, patch_bytes: int, filtered: FilteredPatch | None) -> Reward:
    required = [*task.fail_to_pass, *task.pass_to_pass]
    status = {name: attempt.report[name].status if attempt.report else "missing" for name in required}
    passed = sum(state == "passed" for state in status.values())
    resolved = bool(task.fail_to_pass) and passed == len(status) and not attempt.terms
    terms = {
        **attempt.terms,
        "resolved": float(resolved),
        "f2p": _fraction(task.fail_to_pass, status),
        "p2p": _fraction(task.pass_to_pass, status),
        "tamper": attempt.terms.get("tamper", 0.0) + float(filtered.tamper if filtered else 0),
        "dropped": float(len(filtered.dropped) if filtered else 0),
        "patch_bytes": float(patch_bytes),
    }
    return Reward(value=float(resolved), terms=terms, tests_passed=passed, tests_total=len(status), test_status=status)


def _fraction(names: tuple[str, ...], status: Mapping[str, str]) -> float:
    return sum(status[name] == "passed" for name in names) / len(names) if names else 1.0
