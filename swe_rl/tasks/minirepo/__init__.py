"""The project's own procedural task family: small packages with injected bugs, endless, seeded, without network.

Splits: "train" and "heldout" share templates and operators but no (template, bug kind) pair; "hard" has templates that
neither of them has, and several bugs in a part of its tasks. Levels: 0 one function, 1 one distractor function, 2 two
files with one or two distractors; hard: 3 one bug, 4 bugs in two functions, 5 two bugs in one function.
"""

from __future__ import annotations

import ast
import functools
from collections.abc import Iterator
from random import Random

from swe_rl.errors import ConfigError
from swe_rl.tasks.minirepo.generate import Plan, build_task
from swe_rl.tasks.minirepo.mutators import BUG_KINDS, EXTRA_KINDS, sites
from swe_rl.tasks.minirepo.templates import HARD, STANDARD, Template
from swe_rl.types import Task

SPLITS = ("train", "heldout", "hard")
Pair = tuple[Template, str]
_VERSION = 1  # part of every seed: raise it when generation changes, so that old task ids never mean new tasks
_MAX_DRAWS = 400
_SHORT = tuple(
    t for t in STANDARD if t.source.count("\n") < 6
)  # distractors, so that a whole file is a short observation


@functools.cache
def pairs(split: str) -> tuple[Pair, ...]:
    """All (template, bug kind) pairs of a split that have a place for the bug. About a quarter is held out."""
    if split not in SPLITS:
        raise ConfigError(f"minirepo has no split {split!r}: use one of {', '.join(SPLITS)}")
    templates, kinds = (HARD, BUG_KINDS + EXTRA_KINDS) if split == "hard" else (STANDARD, BUG_KINDS)
    found = []
    for row, template in enumerate(templates):
        function = ast.parse(template.source.replace("K", "5").replace("L", "9")).body[0]
        assert isinstance(function, ast.FunctionDef)
        for column, kind in enumerate(kinds):
            if split != "hard" and ((row + column) % 4 == 0) != (split == "heldout"):
                continue
            if sites(function, kind):
                found.append((template, kind))
    return tuple(found)


def generate(*, split: str, seed: int) -> Iterator[Task]:
    """Endless stream of distinct tasks. Task i depends on (split, seed, i) alone, in every process."""
    choices = pairs(split)
    seen: set[str] = set()
    index = 0
    while True:
        task = _make(choices, split=split, seed=seed, index=index)
        index += 1
        if task.base_commit not in seen:
            seen.add(task.base_commit)
            yield task


def _make(choices: tuple[Pair, ...], *, split: str, seed: int, index: int) -> Task:
    rng = Random(f"minirepo-{_VERSION}/{split}/{seed}/{index}")
    for _ in range(_MAX_DRAWS):
        plan = _draw_hard_plan(choices, rng) if split == "hard" else _draw_plan(choices, rng)
        task = build_task(plan, task_id=f"minirepo-{split}-{seed}-{index}", split=split, rng=rng)
        if task is not None:
            return task
    raise ConfigError(f"minirepo made no task of split {split!r} in {_MAX_DRAWS} draws: some bug has no effect")


def _draw_plan(choices: tuple[Pair, ...], rng: Random) -> Plan:
    template, kind = rng.choice(choices)
    level = rng.randrange(3)
    distractors = (0, 1, rng.choice((1, 2)))[level]
    others = rng.sample([other for other in _SHORT if other is not template], distractors)
    return Plan(bugs=((template, (kind,)),), distractors=tuple(others), num_files=2 if level == 2 else 1, level=level)


def _draw_hard_plan(choices: tuple[Pair, ...], rng: Random) -> Plan:
    level = rng.choice((3, 3, 4, 5))
    template, kind = rng.choice(choices)
    bugs: tuple[tuple[Template, tuple[str, ...]], ...] = ((template, (kind,)),)
    if level == 4:
        other, other_kind = rng.choice([pair for pair in choices if pair[0] is not template])
        bugs = (*bugs, (other, (other_kind,)))
    if level == 5:
        second = rng.choice([pair[1] for pair in choices if pair[0] is template and pair[1] != kind])
        bugs = ((template, (kind, second)),)
    used = [entry[0] for entry in bugs]
    others = rng.sample([other for other in _SHORT if other not in used], 2 - len(bugs))
    return Plan(bugs=bugs, distractors=tuple(others), num_files=rng.choice((1, 2)), level=level)
