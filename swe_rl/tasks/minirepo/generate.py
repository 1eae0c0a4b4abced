"""Builds one minirepo task from a plan: which bugs, how many distractors, how many files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from swe_rl.tasks.minirepo.functions import (
    Answer,
    Arguments,
    Function,
    answers,
    draw_inputs,
    draw_words,
    find_mutant,
    instantiate,
)
from swe_rl.tasks.minirepo.names import FUNCTIONS, MODULES, PACKAGES
from swe_rl.tasks.minirepo.templates import Template
from swe_rl.tasks.patches import tree_diff
from swe_rl.tasks.repository import tree_commit
from swe_rl.types import Task

HIDDEN_PATH = "tests/test_hidden.py"
NUM_INPUTS = 72  # tried per buggy function
_TEST_INPUTS = 4  # asserts of one hidden test, at most
_NUM_FAILING = 3  # hidden tests per bug that fail before the fix, at most
_NUM_KEPT = 3  # hidden tests per bug that pass before and after, at most
_ISSUES = (
    "{call} gives {got}, expected {expected}.",
    "Expected {expected} from {call}, got {got}.",
    "{call} should give {expected} but gives {got}.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    bugs: tuple[tuple[Template, tuple[str, ...]], ...]  # one entry per buggy function: its template and its bug kinds
    distractors: tuple[Template, ...] = ()
    num_files: int = 1
    level: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Example:
    function: Function
    arguments: Arguments
    expected: Answer
    got: Answer  # of the buggy function

    @property
    def fails(self) -> bool:
        return self.got != self.expected

    @property
    def check(self) -> str:
        return f"{self.function.call(self.arguments)} == {self.expected[1]!r}"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bug:
    function: Function
    source: str  # buggy
    kinds: tuple[str, ...]
    shown: tuple[_Example, ...]  # in the issue (the first) and in the visible test
    failing: tuple[_Example, ...]  # hidden
    kept: tuple[_Example, ...]  # hidden


def build_task(plan: Plan, *, task_id: str, split: str, rng: Random) -> Task | None:
    """The task of `plan`, or None when the drawn names and constants leave a bug without an effect."""
    names = rng.sample(FUNCTIONS, len(plan.bugs) + len(plan.distractors))
    words = draw_words(rng)
    bugs: list[_Bug] = []
    for (template, kinds), name in zip(plan.bugs, names, strict=False):
        bug = _make_bug(instantiate(template, name=name, words=words, rng=rng), kinds=kinds, rng=rng)
        if bug is None:
            return None
        bugs.append(bug)
    others = [
        instantiate(template, name=name, words=words, rng=rng)
        for template, name in zip(plan.distractors, names[len(bugs) :], strict=True)
    ]
    kept = [test for bug in bugs for test in _share(bug.kept, _NUM_KEPT)]
    kept += [_examples(function, count=_TEST_INPUTS, rng=rng) for function in others]
    if not kept:
        return None
    return _assemble(plan, bugs=bugs, others=others, kept=kept, task_id=task_id, split=split, rng=rng)


def _make_bug(function: Function, *, kinds: Sequence[str], rng: Random) -> _Bug | None:
    inputs = draw_inputs(function, count=NUM_INPUTS, rng=rng)
    expected = answers(function.source, name=function.name, inputs=inputs)
    source, got = function.source, expected
    for kind in kinds:  # each bug on top of the one before must change the answers once more
        mutant = find_mutant(source, name=function.name, kind=kind, inputs=inputs, expected=got, rng=rng)
        if mutant is None:
            return None
        source, got = mutant.source, mutant.answers
    examples = [
        _Example(function=function, arguments=given, expected=right, got=wrong)
        for given, right, wrong in zip(inputs, expected, got, strict=True)
    ]
    failing = [example for example in examples if example.fails]
    kept = [example for example in examples if not example.fails]
    if len(failing) < 3:
        return None
    first = min(failing[:6], key=lambda example: len(example.check))  # short, so that the issue is
    failing.remove(first)
    return _Bug(
        function=function,
        source=source,
        kinds=tuple(kinds),
        shown=(first, *failing[2:3], *kept[:2]),
        failing=tuple(failing[:2] + failing[3:]),
        kept=tuple(kept[2:]),
    )


def _examples(function: Function, *, count: int, rng: Random) -> tuple[_Example, ...]:
    inputs = draw_inputs(function, count=count, rng=rng)
    results = answers(function.source, name=function.name, inputs=inputs)
    return tuple(
        _Example(function=function, arguments=given, expected=answer, got=answer)
        for given, answer in zip(inputs, results, strict=True)
    )


def _share(examples: Sequence[_Example], count: int) -> list[tuple[_Example, ...]]:
    """Deals examples to at most `count` tests of at most _TEST_INPUTS asserts each."""
    dealt = [tuple(examples[start : count * _TEST_INPUTS : count]) for start in range(count)]
    return [test for test in dealt if test]


def _assemble(
    plan: Plan,
    *,
    bugs: list[_Bug],
    others: list[Function],
    kept: list[tuple[_Example, ...]],
    task_id: str,
    split: str,
    rng: Random,
) -> Task:
    package = rng.choice(PACKAGES)
    modules = rng.sample(MODULES, plan.num_files)
    functions = [*(bug.function for bug in bugs), *others]
    homes = {function.name: module for function, module in zip(functions, _cycle(modules, len(functions)), strict=True)}
    rng.shuffle(functions)
    paths = {name: f"{package}/{module}.py" for name, module in homes.items()}
    clean = {f"{package}/__init__.py": b"", **_files(functions, paths, {})}
    clean[f"tests/test_{homes[bugs[0].function.name]}.py"] = _test_file(
        {f"test_{bug.function.name}": bug.shown for bug in bugs}, paths
    )
    tree = clean | _files(functions, paths, {bug.function.name: bug.source for bug in bugs})
    failing = _numbered([test for bug in bugs for test in _share(bug.failing, _NUM_FAILING)], start=1)
    passing = _numbered(kept, start=1 + len(failing))
    return Task(
        task_id=task_id,
        source="minirepo",
        split=split,
        repo=f"minirepo/{package}",
        base_commit=tree_commit(tree),
        problem_statement=" ".join(_issue(bug.shown[0], rng) for bug in bugs),
        fail_to_pass=tuple(f"{HIDDEN_PATH}::{name}" for name in failing),
        pass_to_pass=tuple(f"{HIDDEN_PATH}::{name}" for name in passing),
        gold_patch=tree_diff(tree, clean),
        tree=tree,
        hidden_files={HIDDEN_PATH: _test_file(failing | passing, paths)},
        timeout_s=20.0,
        meta=_meta(plan, bugs, paths),
    )


def _cycle(modules: Sequence[str], count: int) -> list[str]:
    return [modules[index % len(modules)] for index in range(count)]


def _files(functions: Sequence[Function], paths: Mapping[str, str], changed: Mapping[str, str]) -> dict[str, bytes]:
    files: dict[str, list[str]] = {}
    for function in functions:
        files.setdefault(paths[function.name], []).append(changed.get(function.name, function.source))
    return {path: ("\n\n\n".join(sources) + "\n").encode() for path, sources in files.items()}


def _numbered(tests: Sequence[tuple[_Example, ...]], *, start: int) -> dict[str, tuple[_Example, ...]]:
    return {f"test_{test[0].function.name}_{number}": test for number, test in enumerate(tests, start=start)}


def _test_file(tests: Mapping[str, Sequence[_Example]], paths: Mapping[str, str]) -> bytes:
    names = sorted({example.function.name for examples in tests.values() for example in examples})
    imports = [f"from {paths[name][:-3].replace('/', '.')} import {name}\n" for name in names]
    bodies = [
        f"\n\ndef {test}():\n" + "".join(f"    assert {example.check}\n" for example in examples)
        for test, examples in tests.items()
    ]
    return "".join(imports + bodies).encode()


def _issue(example: _Example, rng: Random) -> str:
    return rng.choice(_ISSUES).format(
        call=example.function.call(example.arguments),
        got=example.got[1] if example.got[0] == "raise" else repr(example.got[1]),
        expected=repr(example.expected[1]),
    )


def _meta(plan: Plan, bugs: Sequence[_Bug], paths: Mapping[str, str]) -> dict[str, Any]:
    """What the demonstrator and the reports need; `bugs` has one entry per buggy function."""
    entries = [
        {
            "path": paths[bug.function.name],
            "function": bug.function.name,
            "clean": bug.function.source,
            "buggy": bug.source,
            "template": bug.function.template.name,
            "kind": "+".join(bug.kinds),
        }
        for bug in bugs
    ]
    pair = "+".join(f"{entry['template']}/{entry['kind']}" for entry in entries)
    return {"level": plan.level, "pair": pair, "num_files": plan.num_files, **entries[0], "bugs": entries}
