"""Grading: the patch alone, in a fresh sandbox, against hidden tests that appear there only after it was applied.

Whose failure is it? A patch that is malformed, does not apply, breaks imports, hangs, fills memory or ends the process
is the agent's: 0. Where the only sign is time or a missing report, a second sandbox has to agree. A sandbox that cannot
be made, is lost or answers nonsense is the machine's: again in a fresh one, and in the end SandboxError. Never 0.

What is not prevented: with test_runner="pytest" the code under test shares its interpreter with the tests, see
swe_rl/tasks/runner. Strong mode, the canary and the signs of suspect.py catch the imitations that do not know them.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, replace
from typing import Protocol

from swe_rl.errors import PatchError, SandboxError, SandboxLost, SandboxUnavailable
from swe_rl.protocols import Sandbox
from swe_rl.rewards.cache import ResultCache, result_key
from swe_rl.rewards.canary import Canary
from swe_rl.rewards.patch import CLEAN_ENV
from swe_rl.rewards.policy import FilteredPatch, filter_patch
from swe_rl.rewards.script_grading import LOG_BYTES, applies_tests_itself, run_script
from swe_rl.rewards.suspect import suspicious
from swe_rl.rewards.terms import Attempt, make_reward
from swe_rl.tasks.environment import run_setup
from swe_rl.tasks.test_logs import check_gradable
from swe_rl.tasks.test_runner import run_tests
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Job:
    """One patch on its way through sandboxes."""

    task: Task
    patch: bytes  # filtered
    spec: SandboxSpec
    limit_s: float
    open_one: OpenSandbox
    strong: bool
    order_seed: int


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
    strong: bool = True,
    rerun: bool = True,
    order_seed: int = 0,
) -> Reward:
    """1.0 if and only if every FAIL_TO_PASS and PASS_TO_PASS test passed, else 0.0.

    spec: has the task's base tree as a layer. timeout_s: of the tests, `task.timeout_s` by default. pool: a pool or a
    function that opens a sandbox; one of its own per attempt by default. trusted: the patch as it is, no policy, an
    empty one too: for validating tasks, never for agents. strong: a process per test file, whose results must agree
    with themselves (see swe_rl/tasks/runner); "functions" is stricter anyway. rerun: when only PASS_TO_PASS fails,
    a second sandbox decides, and a different answer is `flaky`. order_seed: shuffles the tests, 0 keeps their order.

    `Reward.terms` says what happened: see rewards/terms.py. Missing, skipped and xfailed tests are not passed.
    Raises SandboxError when no attempt out of 1 + retries came to a verdict, ConfigError for a task whose results
    nothing here can read.
    """
    check_gradable(task)
    try:
        filtered = _untouched(patch) if trusted else filter_patch(patch, hidden=_hidden(task), existing=task.tree)
    except PatchError as err:
        return make_reward(task, Attempt({err.reason: 1.0}), patch)
    if not filtered.patch and not trusted:
        return make_reward(task, Attempt({"empty": 1.0}), patch, filtered)
    limit_s = task.timeout_s if timeout_s is None else min(timeout_s, task.timeout_s)
    job = _Job(
        task=task,
        patch=filtered.patch,
        spec=_grading_spec(spec, limit_s, LOG_BYTES if task.test_runner == "script" else REPORT_BYTES),
        limit_s=limit_s,
        open_one=_opener(pool),
        strong=strong,
        order_seed=order_seed,
    )
    attempt = await _cached(job, retries, rerun=rerun, cache=cache)
    signs = () if trusted else suspicious(filtered.patch, tree=task.tree)
    return make_reward(task, attempt, patch, filtered, signs=signs)


async def _cached(job: _Job, retries: int, *, rerun: bool, cache: ResultCache | None) -> Attempt:
    if cache is None:
        return await _with_retries(job, retries, rerun=rerun)
    key = result_key(job.task, job.patch, limit_s=job.limit_s, strong=job.strong, order_seed=job.order_seed)
    attempt: Attempt | None = cache.get(key)
    if attempt is None:
        attempt = await _with_retries(job, retries, rerun=rerun)
        if not _may_be_the_machine(attempt):
            cache.put(key, attempt)
    return attempt


def _hidden(task: Task) -> list[str]:
    """Paths of hidden tests as they stand in patches: relative to the workspace."""
    root = task.workdir.rstrip("/") + "/"
    named = (*task.hidden_files, *task.test_files, *task.hidden_paths)
    return [path.removeprefix(root) for path in named if not path.startswith("/") or path.startswith(root)]


def _untouched(patch: bytes) -> FilteredPatch:
    return FilteredPatch(patch=patch, kept=(), dropped=(), tamper=0)


def _opener(pool: Leases | OpenSandbox | None) -> OpenSandbox:
    if pool is None:
        from swe_rl.sandbox import open_sandbox

        return open_sandbox
    lease: OpenSandbox = getattr(pool, "lease", pool)  # type: ignore[arg-type]  # a pool, or the function itself
    return lease


def _grading_spec(spec: SandboxSpec, limit_s: float, output_bytes: int) -> SandboxSpec:
    limits = replace(
        spec.limits,
        output_bytes=max(spec.limits.output_bytes, output_bytes),
        command_s=max(spec.limits.command_s, limit_s, APPLY_TIMEOUT_S),
    )
    return replace(spec, limits=limits)


async def _with_retries(job: _Job, retries: int, *, rerun: bool) -> Attempt:
    last: SandboxError | None = None
    doubtful: Attempt | None = None
    for number in range(retries + 1):
        if number:
            await asyncio.sleep(RETRY_PAUSE_S * 2 ** (number - 1))
        try:
            async with job.open_one(job.spec) as sandbox:
                attempt = await _attempt(job, sandbox)
        except SandboxUnavailable:
            raise  # no retry makes this machine able
        except SandboxError as err:
            last = err
            continue
        if doubtful is not None:
            return attempt if attempt.agrees_with(doubtful, job.task) else attempt.with_term("flaky")
        if not _may_be_the_machine(attempt) and not (rerun and attempt.fails_only_others(job.task)):
            return attempt
        doubtful = attempt
    if doubtful is not None and last is None:
        return doubtful
    raise SandboxError(f"grading {job.task.task_id} failed {retries + 1} times, last: {last!r}") from last


def _may_be_the_machine(attempt: Attempt) -> bool:
    """No complete report, or a test that failed for want of time, processes or memory: the patch can do that, a
    machine at its limits too. Such a verdict counts once a second sandbox agrees."""
    messages = [verdict.message for verdict in (attempt.report or {}).values() if verdict.status != "passed"]
    unfinished = "incomplete" in attempt.terms or "timeout" in attempt.terms
    return unfinished or any(sign in message for message in messages for sign in _MACHINE_SIGNS)


async def _attempt(job: _Job, sandbox: Sandbox) -> Attempt:
    task = job.task
    await run_setup(sandbox, task)
    if job.patch and (reason := await apply_patch(sandbox, task, job.patch)):
        return Attempt({reason if reason == "timeout" else "apply_failed": 1.0})
    if task.test_runner == "script":
        return await _script_attempt(job, sandbox)
    required = [*task.fail_to_pass, *task.pass_to_pass]
    known = {**task.tree, **task.hidden_files}
    canary = Canary.beside(required, known) if task.test_runner == "pytest" and required else None
    ids = required if canary is None else [*required, canary.test_id]
    files = dict(task.hidden_files) | ({} if canary is None else {canary.path: canary.source})
    try:
        for path, data in files.items():
            await sandbox.write_file(f"{task.workdir}/{path}", data)
        run = await run_tests(
            sandbox,
            task,
            ids,
            limit_s=job.limit_s,
            remove_tests=True,
            per_file=job.strong,
            order_seed=job.order_seed,
        )
    except OSError as err:
        if err.errno in _BLOCKED_BY_PATCH:
            return Attempt({"tests_blocked": 1.0})
        raise SandboxError(f"the tests cannot be written: {err}") from err
    if _answered(run.result).outcome not in ("ok", "nonzero"):
        return Attempt({run.result.outcome: 1.0})
    if run.verdicts is None:
        return Attempt({"incomplete": 1.0})
    return Attempt({"tamper": 1.0} if canary and canary.is_forged(run.verdicts, required) else {}, run.verdicts)


async def apply_patch(sandbox: Sandbox, task: Task, patch: bytes) -> str:
    """ "" when `patch` applies to the workspace, else why not."""
    result = _answered(await sandbox.exec(_APPLY, timeout_s=APPLY_TIMEOUT_S, cwd=task.workdir, stdin=patch))
    if result.outcome == "timeout":
        return "timeout"
    return "" if result.exit_code == 0 else result.stderr[-200:].decode("utf-8", "replace") or "refused"


async def _script_attempt(job: _Job, sandbox: Sandbox) -> Attempt:
    """By the data set's own command, after the hidden tests have come."""
    task = job.task
    try:
        for path, data in task.hidden_files.items():
            await sandbox.write_file(path if path.startswith("/") else f"{task.workdir}/{path}", data)
    except OSError as err:
        if err.errno in _BLOCKED_BY_PATCH:
            return Attempt({"tests_blocked": 1.0})
        raise SandboxError(f"the tests cannot be written: {err}") from err
    comes = task.test_patch and not applies_tests_itself(task)
    if comes and (why := await apply_patch(sandbox, task, task.test_patch)):
        if job.patch:
            return Attempt({"tests_blocked": 1.0})
        raise SandboxError(f"the test patch of task {task.task_id} does not apply to its base: {why}")
    result, judgement = await run_script(sandbox, task, limit_s=job.limit_s)
    if _answered(result, script=True).outcome not in ("ok", "nonzero"):
        return Attempt({result.outcome: 1.0})
    return Attempt({"incomplete": 1.0}) if judgement is None else Attempt({}, judgement=judgement)


def _answered(result: ExecResult, *, script: bool = False) -> ExecResult:
    """Raises SandboxError for what is the machine's; of a data set's script any exit code may be the tests'."""
    if result.outcome == "lost":
        raise SandboxLost("the sandbox ended while grading")
    if result.exit_code in _CANNOT_START and not script:
        raise SandboxError(
            f"the grading sandbox is unusable: {result.stderr[-200:].decode('utf-8', 'replace').strip()}"
        )
    return result
