"""One candidate bug of a package: does it make a good task?

Run the tests that enter the changed function; keep the bug if 1 to 30 of them flip and a call shows the difference;
hide the files of the flipped tests; then grade in fresh sandboxes, as an agent's patch would be: no change must fail
exactly the flipped tests, the repair must pass everything, twice.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

from swe_rl.curation.mutators import OPERATORS, Mutation, find_mutations, is_valid
from swe_rl.curation.pypi_issue import Behaviour, issue_text, pick_behaviours
from swe_rl.curation.pypi_probe import Baseline, Probe
from swe_rl.curation.pypi_sdist import Package
from swe_rl.rewards import grade
from swe_rl.tasks import materialize, task_spec, tree_commit, tree_diff
from swe_rl.types import SandboxSpec, Task

VERSION = 1  # of the recipe; part of every task id's digest
MAX_FLIPPED = 30
MIN_PASS_TO_PASS, MAX_PASS_TO_PASS = 5, 100
MAX_COVERING = 400  # tests of one candidate; functions that everything enters are left out
NO_EXAMPLE = "no example"  # the flipped tests show nothing that fits into one call


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Workshop:
    """What every candidate of one package is judged with."""

    package: Package
    baseline: Baseline
    whole: Task  # the correct package as a task record without tests
    trees: Path
    seed: int

    def rng(self, *what: object) -> Random:
        return Random("/".join(map(str, (VERSION, self.seed, self.package.label, *what))))


def candidates(workshop: Workshop) -> Iterator[Candidate]:
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


async def judge(workshop: Workshop, candidate: Candidate, probe: Probe) -> Verdict:
    """The task of one bug, or why it makes none. Raises SandboxError when the machine fails."""
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
        return NO_EXAMPLE
    task = _task(workshop, candidate, flipped, behaviours)
    if len(task.pass_to_pass) < MIN_PASS_TO_PASS:
        return "too few other tests"
    return await _validate(workshop, task)


def _task(workshop: Workshop, candidate: Candidate, flipped: tuple[str, ...], behaviours: Sequence[Behaviour]) -> Task:
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
            "unstable_tests": list(workshop.baseline.unstable),
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


async def _validate(workshop: Workshop, task: Task) -> Verdict:
    """Grades in fresh sandboxes: nothing done must fail exactly FAIL_TO_PASS; the repair must pass, twice."""
    tree = await asyncio.to_thread(materialize, task, workshop.trees)
    spec = task_spec(task, SandboxSpec(), tree=tree)
    try:
        nothing = await grade(task, b"", spec=spec, trusted=True)
        passing = {test for test, status in nothing.test_status.items() if status == "passed"}
        if passing != set(task.pass_to_pass):
            return "unstable"
        for _ in range(2):
            if (await grade(task, task.gold_patch, spec=spec)).value != 1.0:
                return "not repaired"
    finally:
        shutil.rmtree(tree, ignore_errors=True)
    return task
