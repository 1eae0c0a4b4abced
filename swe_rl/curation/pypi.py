"""Bug-fix tasks from real packages: source distribution -> stable tests -> injected bugs -> validated tasks.

pypi_sdist downloads and unpacks, mutators proposes bugs, pypi_probe asks the package inside a sandbox, pypi_judge
decides about one bug, pypi_issue words the report; here is the order of things. Candidates, their order and every
decision are functions of (packages, seed); time limits are in CPU seconds.
"""

from __future__ import annotations

import asyncio
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path

from swe_rl.curation.pypi_judge import NO_EXAMPLE, VERSION, Candidate, Verdict, Workshop, candidates, judge
from swe_rl.curation.pypi_probe import Probe
from swe_rl.curation.pypi_sdist import Package, download, load_package, refuse_second_copy, requirements_layer
from swe_rl.errors import ConfigError, SandboxError
from swe_rl.sandbox import open_sandbox
from swe_rl.tasks import materialize, task_spec, tree_commit, write_tasks
from swe_rl.types import Limits, SandboxSpec, Task

WORKDIR, LAYER_PATH = "/testbed", "/opt/task-env"
MAX_PER_FUNCTION = 2
MAX_SILENT = 2  # a function is left alone after so many bugs that no single call shows
INFRA_RETRIES = 2
HELDOUT_EVERY = 5  # every fifth function's tasks are held out
BASE_LIMITS = Limits(command_s=900.0, memory_bytes=1 << 30, pids=128, disk_bytes=256 << 20, lease_s=7200.0)

OpenProbe = Callable[[], Awaitable[Probe]]


@dataclass(frozen=True, slots=True, kw_only=True)
class BuildOptions:
    num_tasks: int
    seed: int = 0
    test_requires: tuple[str, ...] = ()  # besides pytest and what the packages require
    concurrency: int = 2  # candidates looked at together


@dataclass(slots=True)
class BuildStats:
    tasks: list[Task] = field(default_factory=list)
    candidates: int = 0
    rejected: dict[str, int] = field(default_factory=dict)  # reason -> count
    seconds: float = 0.0

    def reject(self, reason: str) -> None:
        self.rejected[reason] = self.rejected.get(reason, 0) + 1


async def build_tasks(
    pins: Sequence[str], *, options: BuildOptions, out: Path, cache_dir: Path, report: Callable[[str], None] = print
) -> BuildStats:
    """Writes a task set of `options.num_tasks` tasks, spread evenly over the packages, to `out`.

    Raises ConfigError for unusable input (no index, no tests, too few bugs) and SandboxError when the machine fails.
    """
    start = time.monotonic()
    if not pins:
        raise ConfigError("no package given: name at least one with --package NAME==VERSION")
    if options.num_tasks < 1:
        raise ConfigError(f"--num-tasks {options.num_tasks} must be at least 1")
    packages = [load_package(pin, download(pin, cache_dir)) for pin in dict.fromkeys(pins)]
    layer = _layer(packages, options, out, cache_dir)
    stats = BuildStats()
    for number, package in enumerate(packages):
        quota = math.ceil((options.num_tasks - len(stats.tasks)) / (len(packages) - number))
        await _build_package(package, quota, stats, options=options, layer=layer, cache_dir=cache_dir, report=report)
    if not stats.tasks:
        raise ConfigError(f"no task could be made from {', '.join(pins)} (rejected: {stats.rejected}); choose others")
    relative = [_with_relative_mounts(task, out) for task in stats.tasks]
    await asyncio.to_thread(write_tasks, relative, out)
    stats.seconds = time.monotonic() - start
    return stats


def _layer(packages: Sequence[Package], options: BuildOptions, out: Path, cache_dir: Path) -> Path:
    """pytest and all requirements in one directory below `out`, so that the task set is complete by itself."""
    wanted = ["pytest", *options.test_requires, *(r for package in packages for r in package.requirements)]
    made = requirements_layer(wanted, cache_dir)
    for package in packages:
        refuse_second_copy(package, made)
    target = out / "env" / made.name
    if not target.is_dir():
        staging = target.with_name(f".{made.name}.part")
        shutil.rmtree(staging, ignore_errors=True)
        shutil.copytree(made, staging, symlinks=True)
        staging.rename(target)
    return target.resolve()


async def _build_package(
    package: Package,
    quota: int,
    stats: BuildStats,
    *,
    options: BuildOptions,
    layer: Path,
    cache_dir: Path,
    report: Callable[[str], None],
) -> None:
    whole = _bare_task(package, layer)
    async with AsyncExitStack() as stack:
        trees = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix=".trees-", dir=cache_dir)))
        trees.chmod(0o755)
        spec = task_spec(whole, SandboxSpec(limits=BASE_LIMITS), tree=materialize(whole, trees))

        async def open_probe() -> Probe:
            sandbox = await stack.enter_async_context(open_sandbox(spec))
            probe = Probe(sandbox, package, workdir=WORKDIR, layer_path=LAYER_PATH)
            await probe.start()
            return probe

        first = await open_probe()
        await first.refuse_copies()
        report(f"{package.label}: running its tests three times")
        baseline = await first.baseline()
        report(f"{package.label}: {len(baseline.stable)} stable tests, {len(baseline.spans)} functions entered")
        workshop = Workshop(package=package, baseline=baseline, whole=whole, trees=trees, seed=options.seed)
        probes = [first, *[await open_probe() for _ in range(options.concurrency - 1)]]
        line = _Line(workshop=workshop, probes=probes, open_probe=open_probe)
        await _collect(line, quota, stats, report=report, total=options.num_tasks)


async def _collect(line: _Line, quota: int, stats: BuildStats, *, report: Callable[[str], None], total: int) -> None:
    """Decides about the candidates of one package in their order, and stops at `quota` tasks."""
    seen: set[tuple[str, tuple[str, ...]]] = set()
    label = line.workshop.package.label
    made, tried, began = 0, 0, time.monotonic()
    async for candidate, verdict in line.judged():
        stats.candidates += 1
        tried += 1
        if isinstance(verdict, Task) and (candidate.function, verdict.fail_to_pass) in seen:
            verdict = "duplicate"
        if isinstance(verdict, str):
            stats.reject(verdict)
            line.silent[candidate.function] = line.silent.get(candidate.function, 0) + (verdict == NO_EXAMPLE)
            continue
        seen.add((candidate.function, verdict.fail_to_pass))
        line.made[candidate.function] = line.made.get(candidate.function, 0) + 1
        place = list(line.made).index(candidate.function)
        stats.tasks.append(replace(verdict, split="heldout" if place % HELDOUT_EVERY == HELDOUT_EVERY - 1 else "train"))
        made += 1
        flips = f"{len(verdict.fail_to_pass)} tests flip, {len(verdict.pass_to_pass)} stay"
        pace = f"{tried} candidates, {(time.monotonic() - began) / tried:.1f} s each"
        where = f"{label} {candidate.mutation.operator} in {candidate.mutation.function}"
        report(f"[{len(stats.tasks)}/{total}] {where}: {flips} ({pace})")
        if made == quota:
            return
    report(f"{label}: only {made} of {quota} tasks, no candidates left")


@dataclass(slots=True, kw_only=True)
class _Line:
    """Candidates of one package on their way through a few probes."""

    workshop: Workshop
    probes: list[Probe]
    open_probe: OpenProbe
    made: dict[str, int] = field(default_factory=dict)  # function -> tasks
    silent: dict[str, int] = field(default_factory=dict)  # function -> bugs that no call showed

    async def judged(self) -> AsyncIterator[tuple[Candidate, Verdict]]:
        """Verdicts in the order of the candidates, one per probe under way; what `made` and `silent` rule out is not
        looked at. Which candidates those are depends on earlier verdicts only, never on timing."""
        waiting: deque[tuple[Candidate, asyncio.Task[tuple[Verdict, Probe]]]] = deque()
        free = list(self.probes)
        source = iter(candidates(self.workshop))
        try:
            while True:
                while free and (candidate := next(filter(self._is_wanted, source), None)) is not None:
                    waiting.append((candidate, asyncio.create_task(self._judge(candidate, free.pop()))))
                if not waiting:
                    return
                candidate, running = waiting.popleft()
                verdict, probe = await running
                free.append(probe)
                if self._is_wanted(candidate):
                    yield candidate, verdict
        finally:
            for _, running in waiting:
                running.cancel()
            await asyncio.gather(*(running for _, running in waiting), return_exceptions=True)

    def _is_wanted(self, candidate: Candidate) -> bool:
        name = candidate.function
        return self.made.get(name, 0) < MAX_PER_FUNCTION and self.silent.get(name, 0) < MAX_SILENT

    async def _judge(self, candidate: Candidate, probe: Probe) -> tuple[Verdict, Probe]:
        """The verdict and a probe that still works: trouble of the machine is tried again in a fresh sandbox."""
        for _ in range(INFRA_RETRIES):
            try:
                return await judge(self.workshop, candidate, probe), probe
            except SandboxError:
                await asyncio.sleep(1.0)
                probe = await self.open_probe()
        return await judge(self.workshop, candidate, probe), probe


def _bare_task(package: Package, layer: Path) -> Task:
    path = ":".join((LAYER_PATH, *(f"{WORKDIR}/{part}".rstrip("/") for part in package.python_path)))
    return Task(
        task_id=f"pypi/{package.label}",
        source="pypi",
        split="train",
        repo=package.name,
        base_commit=tree_commit(package.files),
        problem_statement="",
        fail_to_pass=(),
        pass_to_pass=(),
        gold_patch=b"",
        tree=package.files,
        workdir=WORKDIR,
        test_runner="pytest",
        meta={
            "package": package.name,
            "version": package.version,
            "sdist_sha256": package.sha256,
            "recipe": VERSION,
            "mounts": [[str(layer), LAYER_PATH]],
            "env": {"PYTHONPATH": path},
        },
    )


def _with_relative_mounts(task: Task, out: Path) -> Task:
    mounts = [[Path(host).relative_to(out.resolve()).as_posix(), inside] for host, inside in task.meta["mounts"]]
    return replace(task, meta={**task.meta, "mounts": mounts})
