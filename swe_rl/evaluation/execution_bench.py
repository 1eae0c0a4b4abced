"""Runs existing and written tests on candidate patches, each in a fresh sandbox that knows nothing of the hidden tests.

Whose failure is it? A patch that does not apply, breaks imports or hangs is the candidate's: its tests do not pass. A
sandbox that is lost is the machine's: again in a fresh one, and in the end SandboxError; never a score of 0. Where the
only sign is a missing report, a second sandbox has to agree, however few retries there are for lost ones.
"""

from __future__ import annotations

import posixpath
import shlex
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import TypeVar

from swe_rl.agents.visible_tests import visible_test_files
from swe_rl.errors import PatchError, SandboxError, SandboxUnavailable
from swe_rl.evaluation.execution_outcomes import OTHER, outcome_of, printed_outcomes
from swe_rl.evaluation.execution_tests import WrittenTest, examined, functions_in_file
from swe_rl.protocols import Sandbox
from swe_rl.rewards import filter_patch
from swe_rl.rewards.diff import split_patch
from swe_rl.rewards.grading import APPLY_TIMEOUT_S, REPORT_BYTES, apply_patch
from swe_rl.tasks.environment import prepare_sandbox
from swe_rl.tasks.test_runner import Verdict, run_tests
from swe_rl.types import ExecResult, Reward, SandboxSpec, Task

PASSED, MISSING = "passed", "missing"
R = TypeVar("R")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcomes:
    """What the tests said about one program."""

    regression: Mapping[str, str] = field(default_factory=dict)  # existing test -> status; only "passed" counts
    reproduction: Mapping[str, str] = field(default_factory=dict)  # id of a written test -> outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionBench:
    """Where candidates are tried out."""

    spec_of: Callable[[Task], Awaitable[SandboxSpec]]  # with the base tree of the task
    lease: Callable[[SandboxSpec], AbstractAsyncContextManager[Sandbox]]
    limit_s: float  # of all tests of one run
    retries: int = 2  # of a sandbox that was lost

    async def regression_tests(self, task: Task) -> list[str]:
        """Existing tests that pass on the unpatched program, without those known to be unstable.

        None of a task with a test command of its own, or that comes as an image: what it has is not known here.
        """
        files = visible_test_files(task)
        if not files or task.test_runner == "script":
            return []
        verdicts = await self._in_sandbox(task, b"", lambda sandbox: self._run_ids(sandbox, task, files))
        unstable = frozenset(task.meta.get("unstable_tests", ()))
        return sorted(k for k, v in (verdicts or {}).items() if v.status == PASSED and k not in unstable)

    async def written_tests(self, task: Task, patch: bytes, *, name: str) -> list[WrittenTest]:
        """The tests in the patch that the test agent `name` handed in, each with its state on the unpatched program.

        What did not become a test is one entry that says why, so that nothing is lost in silence.
        """
        if not patch:
            return [WrittenTest(test_id=name, task_id=task.task_id, state="empty")]
        found = await self._in_sandbox(task, patch, lambda sandbox: self._examine(sandbox, task, patch, name))
        return found or [WrittenTest(test_id=name, task_id=task.task_id, state="apply_failed")]

    async def grade_tests(self, task: Task, patch: bytes) -> Reward:
        """A RewardFn for test agents: 1 when at least one valid test was written."""
        states = [test.state for test in await self.written_tests(task, patch, name="tests")]
        terms = {state: float(states.count(state)) for state in set(states)}
        valid = terms.get("valid", 0.0)
        return Reward(value=float(valid > 0), terms=terms, tests_passed=int(valid), tests_total=len(states))

    async def run(
        self, task: Task, patch: bytes, *, regression: Sequence[str], tests: Sequence[WrittenTest]
    ) -> Outcomes:
        """Existing and written tests on the program with `patch` (b"": as it is). Edits of test files do not count, as
        in grading. Raises SandboxError when no attempt came to a result."""
        nothing = Outcomes(
            regression=dict.fromkeys(regression, MISSING), reproduction={test.test_id: OTHER for test in tests}
        )
        try:
            kept = filter_patch(patch, hidden=(), existing=task.tree).patch if patch else b""
        except PatchError:
            return nothing
        found = await self._in_sandbox(task, kept, lambda sandbox: self._run_both(sandbox, task, regression, tests))
        return nothing if found is None else found

    async def _examine(self, sandbox: Sandbox, task: Task, patch: bytes, name: str) -> list[WrittenTest] | None:
        """The patch is applied: reads its test files back, and runs them where they stand."""
        found: list[WrittenTest] = []
        for part in split_patch(patch):
            path = part.paths[-1].decode("utf-8", "surrogateescape")
            if part.is_new and path.endswith(".py") and posixpath.basename(path).startswith("test"):
                source = await sandbox.read_file(f"{task.workdir}/{path}")
                found += functions_in_file(task, source, path=path, name=name)
        if not found:
            return [WrittenTest(test_id=name, task_id=task.task_id, state="no_test")]
        usable = {test.test_id: test for test in found if test.valid}
        before = await self._run_written(sandbox, task, usable)
        return None if before is None else examined(found, before)

    async def _run_both(
        self, sandbox: Sandbox, task: Task, regression: Sequence[str], tests: Sequence[WrittenTest]
    ) -> Outcomes | None:
        placed = {test.test_id: replace(test, path=_own_path(test, number)) for number, test in enumerate(tests)}
        for test in placed.values():
            try:
                await sandbox.write_file(f"{task.workdir}/{test.path}", test.source)
            except OSError:  # what the patch left stands in the way
                return None
        written = await self._run_written(sandbox, task, placed)
        existing = await self._run_ids(sandbox, task, regression) if regression else {}
        if written is None or existing is None:
            return None
        statuses = {item: existing[item].status if item in existing else MISSING for item in regression}
        return Outcomes(regression=statuses, reproduction=written)

    async def _run_written(
        self, sandbox: Sandbox, task: Task, tests: Mapping[str, WrittenTest]
    ) -> dict[str, str] | None:
        if task.test_runner == "script":
            return {name: await self._run_script(sandbox, task, test) for name, test in tests.items()}
        ids = [test.node_id for test in tests.values()]
        verdicts = await self._run_ids(sandbox, task, ids) if ids else {}
        if verdicts is None:
            return None
        return {name: outcome_of(verdicts.get(test.node_id)) for name, test in tests.items()}

    async def _run_ids(self, sandbox: Sandbox, task: Task, ids: Sequence[str]) -> Mapping[str, Verdict] | None:
        many = task.test_runner == "pytest"
        run = await run_tests(sandbox, task, ids, limit_s=self.limit_s, per_file=many, to_file=many)
        _check(run.result, task)
        return run.verdicts

    async def _run_script(self, sandbox: Sandbox, task: Task, test: WrittenTest) -> str:
        """Of a script in the published form, one outcome: what all its lines say."""
        command = f"python3 {shlex.quote(test.path)} -v"
        result = await sandbox.exec(command, cwd=task.workdir, timeout_s=self.limit_s)
        _check(result, task)
        lines = set(printed_outcomes((result.stdout + b"\n" + result.stderr).decode("utf-8", "replace")))
        return lines.pop() if len(lines) == 1 else OTHER

    async def _in_sandbox(self, task: Task, patch: bytes, work: Callable[[Sandbox], Awaitable[R | None]]) -> R | None:
        """`work` in a fresh sandbox with `patch`; None when the patch does not apply, or twice without a result."""
        spec = await self.spec_of(task)
        limits = replace(
            spec.limits,
            output_bytes=max(spec.limits.output_bytes, REPORT_BYTES),
            command_s=max(spec.limits.command_s, self.limit_s, APPLY_TIMEOUT_S),
        )
        lost = inconclusive = 0
        while True:
            try:
                async with self.lease(replace(spec, limits=limits)) as sandbox:
                    await prepare_sandbox(sandbox, task)
                    if patch and await apply_patch(sandbox, task, patch):
                        return None
                    found = await work(sandbox)
            except SandboxUnavailable:
                raise
            except SandboxError as err:
                lost += 1
                if lost > self.retries:
                    raise SandboxError(f"tests of {task.task_id} failed {lost} times, last: {err!r}") from err
                continue
            inconclusive += found is None
            if found is not None or inconclusive == 2:
                return found


def _check(result: ExecResult, task: Task) -> None:
    if result.outcome == "lost":
        raise SandboxError(f"the sandbox ended while tests of {task.task_id} ran")


def _own_path(test: WrittenTest, number: int) -> str:
    """A name that no candidate and no other test uses, in the directory that the test was written for."""
    return posixpath.join(posixpath.dirname(test.path), f"test_reproduction_{number}.py")
