"""Bug-fix tasks from real packages: source distribution -> stable tests -> injected bug -> validated task.

For each candidate bug: run the tests that enter the changed function; keep it if 1 to 30 of them flip and a call shows
the difference; hide the files of the flipped tests; then, as an agent's patch would be, grade in fresh sandboxes: no
change must fail exactly the flipped tests, the repair must pass everything, twice.
Candidates, their order and every decision are functions of (packages, seed); time limits are in CPU seconds.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import shutil
import tempfile
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random

from swe_rl.curation.mutators import OPERATORS, Mutation, find_mutations, is_valid
from swe_rl.curation.pypi_issue import Behaviour, issue_text, pick_behaviours
from swe_rl.curation.pypi_probe import Baseline, Probe
from swe_rl.curation.pypi_sdist import Package, download, load_package, refuse_second_copy, requirements_layer
from swe_rl.errors import ConfigError
from swe_rl.rewards import grade, grade_unfiltered
from swe_rl.sandbox import open_sandbox
from swe_rl.tasks import materialize, task_spec, tree_commit, tree_diff, write_tasks
from swe_rl.types import Limits, SandboxSpec, Task

VERSION = 1  # of the recipe; part of every task id's digest
WORKDIR, LAYER_PATH = "/testbed", "/opt/task-env"
MAX_FLIPPED = 30
MIN_PASS_TO_PASS, MAX_PASS_TO_PASS = 5, 100
MAX_COVERING = 400  # tests of one candidate; functions that everything enters are left out
MAX_PER_FUNCTION = 2
HELDOUT_EVERY = 5  # every fifth function's tasks are held out
BASE_LIMITS = Limits(command_s=900.0, memory_bytes=1 << 30, pids=128, disk_bytes=256 << 20, lease_s=7200.0)


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    path: str
    mutation: Mutation
    content: bytes  # of the file with the bug
    tests: tuple[str, ...]  # stable tests that enter the function

    @property
    def function(self) -> str:
        return f"{self.path}:{self.mutation.function}"


Verdict = Task | str  # a task, or why there is none


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
        probes = []
        for _ in range(options.concurrency):
            sandbox = await stack.enter_async_context(open_sandbox(spec))
            probes.append(Probe(sandbox, package, workdir=WORKDIR, layer_path=LAYER_PATH))
            await probes[-1].start()
        await probes[0].refuse_copies()
        report(f"{package.label}: running its tests three times")
        baseline = await probes[0].baseline()
        report(f"{package.label}: {len(baseline.stable)} stable tests, {len(baseline.spans)} functions entered")
        workshop = _Workshop(package=package, baseline=baseline, whole=whole, trees=trees, options=options)
        await _collect(workshop, probes, quota, stats, report)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workshop:
    """What every candidate of one package is judged with."""

    package: Package
    baseline: Baseline
    whole: Task  # the correct package as a task record without tests
    trees: Path
    options: BuildOptions

    def rng(self, *what: object) -> Random:
        return Random("/".join(map(str, (VERSION, self.options.seed, self.package.label, *what))))


async def _collect(
    workshop: _Workshop, probes: list[Probe], quota: int, stats: BuildStats, report: Callable[[str], None]
) -> None:
    """Judges candidates a few at a time, decides in their order, and stops at `quota` tasks."""
    functions: dict[str, int] = {}
    seen: set[tuple[str, tuple[str, ...]]] = set()
    made, tried, began = 0, 0, time.monotonic()
    async for candidate, verdict in _judge_in_order(workshop, probes, functions):
        stats.candidates += 1
        tried += 1
        if isinstance(verdict, Task) and (candidate.function, verdict.fail_to_pass) in seen:
            verdict = "duplicate"
        if isinstance(verdict, str):
            stats.reject(verdict)
            continue
        seen.add((candidate.function, verdict.fail_to_pass))
        functions[candidate.function] = functions.get(candidate.function, 0) + 1
        place = list(functions).index(candidate.function)
        stats.tasks.append(replace(verdict, split="heldout" if place % HELDOUT_EVERY == HELDOUT_EVERY - 1 else "train"))
        made += 1
        where = f"{workshop.package.label} {candidate.mutation.operator} in {candidate.mutation.function}"
        flips = f"{len(verdict.fail_to_pass)} tests flip, {len(verdict.pass_to_pass)} stay"
        pace = f"{stats.candidates} candidates, {(time.monotonic() - began) / tried:.1f} s each"
        report(f"[{len(stats.tasks)}/{workshop.options.num_tasks}] {where}: {flips} ({pace})")
        if made == quota:
            return
    report(f"{workshop.package.label}: only {made} of {quota} tasks, no candidates left")


async def _judge_in_order(
    workshop: _Workshop, probes: list[Probe], functions: dict[str, int]
) -> AsyncIterator[tuple[Candidate, Verdict]]:
    """Verdicts in the order of the candidates, `len(probes)` judged at a time."""
    waiting: deque[tuple[Candidate, asyncio.Task[Verdict], Probe]] = deque()
    free = list(probes)
    source = iter(_candidates(workshop))
    try:
        while True:
            while free:
                candidate = next((c for c in source if functions.get(c.function, 0) < MAX_PER_FUNCTION), None)
                if candidate is None:
                    break
                probe = free.pop()
                waiting.append((candidate, asyncio.create_task(_judge(workshop, candidate, probe)), probe))
            if not waiting:
                return
            candidate, running, probe = waiting.popleft()
            verdict = await running
            free.append(probe)
            if functions.get(candidate.function, 0) < MAX_PER_FUNCTION:
                yield candidate, verdict
    finally:
        for _, running, _ in waiting:
            running.cancel()
        await asyncio.gather(*(running for _, running, _ in waiting), return_exceptions=True)


def _candidates(workshop: _Workshop) -> Iterator[Candidate]:
    """Bugs on covered lines, operators taking turns, order by seed."""
    piles: dict[str, list[tuple[str, Mutation]]] = {operator: [] for operator in OPERATORS}
    for path in workshop.package.source_files:
        covered = workshop.baseline.lines.get(path, frozenset())
        if covered:
            for mutation in find_mutations(workshop.package.files[path]):
                if mutation.line in covered:
                    piles[mutation.operator].append((path, mutation))
    for operator, pile in piles.items():
        workshop.rng("order", operator).shuffle(pile)
    while any(piles.values()):
        for pile in piles.values():
            if not pile:
                continue
            path, mutation = pile.pop()
            tests = workshop.baseline.covering(path, mutation.line)
            source = workshop.package.files[path]
            if 0 < len(tests) <= MAX_COVERING and is_valid(source, mutation):
                yield Candidate(path=path, mutation=mutation, content=mutation.apply(source), tests=tests)


async def _judge(workshop: _Workshop, candidate: Candidate, probe: Probe) -> Verdict:
    cpu_s = 3 + math.ceil(3 * sum(workshop.baseline.seconds[test] for test in candidate.tests))
    run = await probe.run_mutant(candidate.path, candidate.content, candidate.tests, cpu_s=cpu_s)
    if not run.finished:
        return "hangs or crashes"
    flipped = run.failed(candidate.tests)
    if not flipped:
        return "survives"
    if len(flipped) > MAX_FLIPPED or any("::" not in name for name in run.status):
        return "breaks too much"
    behaviours = pick_behaviours(run.examples, await probe.evaluate(run.examples)) if run.examples else []
    if not behaviours:
        return "no example"
    task = _task(workshop, candidate, flipped, behaviours)
    if len(task.pass_to_pass) < MIN_PASS_TO_PASS:
        return "too few other tests"
    return await _validate(workshop, task)


def _task(workshop: _Workshop, candidate: Candidate, flipped: tuple[str, ...], behaviours: Sequence[Behaviour]) -> Task:
    package, mutation = workshop.package, candidate.mutation
    hidden = sorted({test.partition("::")[0] for test in flipped})
    tree = {path: data for path, data in package.files.items() if path not in hidden} | {
        candidate.path: candidate.content
    }
    key = f"{VERSION}/{package.sha256}/{candidate.path}/{mutation.start}/{mutation.end}/{mutation.replacement!r}"
    digest = hashlib.sha256(key.encode()).hexdigest()[:10]
    rng = workshop.rng("issue", digest)
    return replace(
        workshop.whole,
        task_id=f"pypi/{package.label}/{mutation.operator}-{digest}",
        base_commit=tree_commit(tree),
        problem_statement=issue_text(behaviours, label=f"{package.name} {package.version}", rng=rng),
        fail_to_pass=flipped,
        pass_to_pass=_pass_to_pass(workshop.baseline, candidate.tests, flipped),
        gold_patch=tree_diff({candidate.path: candidate.content}, {candidate.path: package.files[candidate.path]}),
        tree=tree,
        hidden_files={path: package.files[path] for path in hidden},
        meta={
            **workshop.whole.meta,
            "operator": mutation.operator,
            "function": mutation.function,
            "file": candidate.path,
            "line": mutation.line,
            "level": 1,
            "num_fail_to_pass": len(flipped),
        },
    )


def _pass_to_pass(baseline: Baseline, covering: Sequence[str], flipped: Sequence[str]) -> tuple[str, ...]:
    """Covering tests that still pass, then others of the same files, at most MAX_PASS_TO_PASS, in suite order."""
    gone = set(flipped)
    files = {test.partition("::")[0] for test in covering}
    others = [test for test in baseline.stable if test.partition("::")[0] in files]
    chosen = [test for test in dict.fromkeys((*covering, *others)) if test not in gone][:MAX_PASS_TO_PASS]
    return tuple(test for test in baseline.stable if test in set(chosen))


async def _validate(workshop: _Workshop, task: Task) -> Verdict:
    """Grades in fresh sandboxes: nothing done must fail exactly FAIL_TO_PASS; the repair must pass, twice."""
    tree = await asyncio.to_thread(materialize, task, workshop.trees)
    spec = task_spec(task, SandboxSpec(), tree=tree)
    try:
        nothing = await grade_unfiltered(task, b"", spec=spec)
        passing = {test for test, status in nothing.test_status.items() if status == "passed"}
        if passing != set(task.pass_to_pass):
            return "unstable"
        for _ in range(2):
            if (await grade(task, task.gold_patch, spec=spec)).value != 1.0:
                return "not repaired"
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    return task


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
