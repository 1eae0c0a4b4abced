"""Is a task fit for training? Nothing done must be worth 0, the gold patch 1, every time, in any order, in time, and
the answer must stand nowhere.

Verdicts, in the order in which they are looked for:
    leaking       the answer is readable: in the base tree, in the image, in a repository's history
    no-op passes  without any change the task counts as solved, or some FAIL_TO_PASS test passes
    gold fails    the gold patch does not solve it
    flaky         the same patch got different answers, by repetition or in another order of tests
    too slow      the tests do not end within the limit, twice
    ok            none of these
Trouble of the machine is no verdict: the task stays undecided and is tried again by the next run.

Each verdict is kept under a digest of the task, the grader and the options, in a file that is only appended to: a
killed run goes on where it was, and a finished one has nothing left to do.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from swe_rl.curation.leaks import (
    Findings,
    changed_modules,
    gold_blocks,
    scan_environment,
    scan_workspace,
    tree_leak,
)
from swe_rl.errors import ConfigError, SandboxError, SandboxUnavailable
from swe_rl.rewards import grade, grader_version, task_digest
from swe_rl.rewards.grading import Leases
from swe_rl.tasks.environment import hide_answers
from swe_rl.tasks.test_logs import check_gradable
from swe_rl.types import Reward, SandboxSpec, Task

GATE_VERSION = 1  # raised when the same results would get another verdict
VERDICTS = ("ok", "leaking", "no-op passes", "gold fails", "flaky", "too slow")
ORDER_SEED = 1  # of the shuffled run; the k-th shuffled one has seed k


@dataclass(frozen=True, slots=True, kw_only=True)
class GateOptions:
    repeats: int = 3  # runs of each of the two patches; the last one of each in shuffled order, if there are two
    limit_s: float = 60.0  # of the tests of one run; a task's own limit when that is shorter
    concurrency: int = 2  # tasks looked at together
    scan: bool = True  # look for leaks inside sandboxes, too
    sandbox: str = ""  # what else of the sandboxes decides, such as their memory: another text, another verdict


@dataclass(frozen=True, slots=True, kw_only=True)
class GateVerdict:
    task_id: str
    digest: str
    verdict: str  # of VERDICTS
    reason: str = ""  # one line; "" for ok
    seconds: float = 0.0  # spent on it

    @property
    def passed(self) -> bool:
        return self.verdict == "ok"


@dataclass(slots=True, kw_only=True)
class GateResult:
    verdicts: list[GateVerdict]  # in the order of the tasks
    undecided: dict[str, str]  # task id -> what the machine failed with
    reused: int  # verdicts of an earlier run


SpecOf = Callable[[Task], SandboxSpec]


async def gate_tasks(
    tasks: Sequence[Task],
    *,
    options: GateOptions,
    record: Path,
    spec_of: SpecOf,
    pool: Leases,
    report: Callable[[str], None] = lambda line: None,
) -> GateResult:
    """A verdict for every task; those in `record` (JSON lines) are not made again.

    spec_of: the sandbox of a task, with its base tree. Raises ConfigError for options that cannot work or a damaged
    record, SandboxUnavailable when this machine cannot make sandboxes.
    """
    _check(options)
    for task in tasks:
        check_gradable(task)
    known = read_record(record)
    digests = {task.task_id: gate_digest(task, options) for task in tasks}
    if len(digests) != len(tasks):
        raise ConfigError("two tasks have the same id: a verdict could not be told from the other's")
    found = {name: known[digest] for name, digest in digests.items() if digest in known}
    waiting = [task for task in tasks if task.task_id not in found]
    result = GateResult(verdicts=[], undecided={}, reused=len(found))
    judge = _Judge(options=options, spec_of=spec_of, pool=pool)
    places = asyncio.Semaphore(options.concurrency)

    async def one(task: Task, leak: str) -> None:
        async with places:
            start = time.monotonic()
            try:
                verdict, reason = await judge.verdict(task, leak)
            except SandboxUnavailable:
                raise
            except SandboxError as err:
                result.undecided[task.task_id] = str(err)
                report(f"{task.task_id}: undecided, {err}")
                return
            row = GateVerdict(
                task_id=task.task_id,
                digest=digests[task.task_id],
                verdict=verdict,
                reason=reason,
                seconds=round(time.monotonic() - start, 3),
            )
            await asyncio.to_thread(append_record, record, row)
            found[task.task_id] = row
            report(f"[{len(found)}/{len(tasks)}] {task.task_id}: {verdict}{': ' if reason else ''}{reason}")

    leaks = await judge.environment_leaks(waiting, failed=result.undecided) if options.scan else {}
    async with asyncio.TaskGroup() as group:
        for task in waiting:
            if task.task_id not in result.undecided:
                group.create_task(one(task, leaks.get(task.task_id, "")))
    result.verdicts = [found[task.task_id] for task in tasks if task.task_id in found]
    return result


def gate_digest(task: Task, options: GateOptions) -> str:
    """Names everything that decides the verdict about a task."""
    pieces = (GATE_VERSION, grader_version(task), task_digest(task, with_gold=True), options.repeats, options.limit_s)
    text = "\0".join(map(str, (*pieces, options.scan, options.sandbox)))
    return hashlib.sha256(text.encode()).hexdigest()


def read_record(path: Path) -> dict[str, GateVerdict]:
    """Verdicts by digest; a last line that was cut by a kill is ignored. Raises ConfigError for other damage."""
    if not path.is_file():
        return {}
    lines = path.read_bytes().split(b"\n")
    found = {}
    for number, line in enumerate(lines[:-1], start=1):
        try:
            row = GateVerdict(**json.loads(line))
        except (ValueError, TypeError) as err:
            raise ConfigError(f"{path} line {number} is no verdict of a gate: move the file away") from err
        found[row.digest] = row
    return found


def append_record(path: Path, row: GateVerdict) -> None:
    """One line, on disk when this returns. What a kill left of an earlier line is cut off first. Several gates may
    write to one record: a lock keeps a line that is being written from being taken for one that was left."""
    with open(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        if size and file.read() != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)
        file.write(json.dumps(asdict(row)).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _check(options: GateOptions) -> None:
    for name, smallest in (("repeats", 1), ("concurrency", 1)):
        if getattr(options, name) < smallest:
            raise ConfigError(f"--{name} {getattr(options, name)} must be at least {smallest}")
    if not options.limit_s > 0:
        raise ConfigError(f"--time-limit {options.limit_s} must be positive")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Judge:
    options: GateOptions
    spec_of: SpecOf
    pool: Leases

    async def environment_leaks(self, tasks: Sequence[Task], *, failed: dict[str, str]) -> dict[str, str]:
        """Task id -> what gives its answer away outside the workspace. Tasks of one environment are looked at
        together; where the machine fails, they go into `failed` with the reason."""
        shared: dict[str, list[Task]] = {}
        for task in tasks:
            shared.setdefault(_environment(task), []).append(task)
        leaks: dict[str, str] = {}
        for group in shared.values():
            try:
                spec = await asyncio.to_thread(self.spec_of, group[0])
                async with self.pool.lease(spec) as sandbox:
                    await hide_answers(sandbox, group[0])
                    found = await scan_environment(sandbox, group, workdir=group[0].workdir)
            except SandboxUnavailable:
                raise
            except SandboxError as err:
                failed.update({task.task_id: str(err) for task in group})
                continue
            for task in group:
                reason = _of_task(found, task).reason
                if reason:
                    leaks[task.task_id] = reason
        return leaks

    async def verdict(self, task: Task, leak: str) -> tuple[str, str]:
        """(verdict, reason). Raises SandboxError when the machine fails."""
        leak = leak or tree_leak(task)
        spec = await asyncio.to_thread(self.spec_of, task)
        if not leak and self.options.scan:
            async with self.pool.lease(spec) as sandbox:
                await hide_answers(sandbox, task)
                leak = (await scan_workspace(sandbox, task)).reason
        if leak:
            return "leaking", leak
        nothing = await self._runs(task, b"", spec)
        if reason := _no_op_passes(task, nothing):
            return "no-op passes", reason
        gold = await self._runs(task, task.gold_patch, spec)
        for runs in (nothing, gold):
            if any("timeout" in reward.terms for reward in runs):
                return "too slow", f"the tests do not end within {min(self.options.limit_s, task.timeout_s):g} s"
        if all(reward.value < 1.0 for reward in gold):
            return "gold fails", _why_gold_fails(gold[0])
        for what, runs in (("nothing done", nothing), ("the gold patch", gold)):
            if reason := _differs(runs):
                return "flaky", f"{what}: {reason}"
        return "ok", ""

    async def _runs(self, task: Task, patch: bytes, spec: SandboxSpec) -> list[Reward]:
        """Rewards of all repeats; none after one that took too long."""
        found: list[Reward] = []
        for number in range(self.options.repeats):
            shuffled = number == self.options.repeats - 1 and number > 0
            reward = await grade(
                task,
                patch,
                spec=spec,
                timeout_s=self.options.limit_s,
                pool=self.pool,
                trusted=True,
                rerun=False,
                order_seed=ORDER_SEED if shuffled else 0,
            )
            found.append(reward)
            if "timeout" in reward.terms:
                break
        return found


def _environment(task: Task) -> str:
    """Tasks with equal names see the same files outside the workspace."""
    return json.dumps([task.image, task.workdir, [list(map(str, mount)) for mount in task.meta.get("mounts", ())]])


def _of_task(found: Findings, task: Task) -> Findings:
    own = {f"{task.task_id} {name}" for name in _block_names(task)}
    return Findings(
        hits=tuple((name.removeprefix(task.task_id + " "), where) for name, where in found.hits if name in own),
        copies=tuple(path for path in found.copies if _is_copy_for(path, task)),
        history=found.history,
    )


def _block_names(task: Task) -> list[str]:
    return [block.name for block in gold_blocks(task, context=1)]


def _is_copy_for(path: str, task: Task) -> bool:
    plain = path.replace("/__pycache__/", "/").split(".")[0]
    return any(plain.endswith("/" + module.removesuffix(".py")) for module in changed_modules([task]))


def _no_op_passes(task: Task, runs: Sequence[Reward]) -> str:
    passing = [n for n in task.fail_to_pass if all(reward.test_status[n] == "passed" for reward in runs)]
    return (
        f"{len(passing)} of {len(task.fail_to_pass)} FAIL_TO_PASS tests pass, such as {passing[0]}" if passing else ""
    )


def _why_gold_fails(reward: Reward) -> str:
    failing = [f"{name} is {status}" for name, status in reward.test_status.items() if status != "passed"]
    signs = [
        name
        for name in ("apply_failed", "malformed", "incomplete", "tests_blocked", "tamper", "oom")
        if reward.terms.get(name)
    ]
    return "; ".join((*signs, *failing[:2])) or "no FAIL_TO_PASS test"


def _differs(runs: Sequence[Reward]) -> str:
    first: Mapping[str, str] = runs[0].test_status
    for number, reward in enumerate(runs[1:], start=2):
        for name, status in reward.test_status.items():
            if status != first[name]:
                return f"{name} is {first[name]} in run 1 and {status} in run {number}"
    flaky = [reward for reward in runs if reward.terms.get("flaky")]
    return "two sandboxes gave different answers" if flaky else ""
