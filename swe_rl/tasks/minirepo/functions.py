"""One concrete function of a template, inputs for it, and what a body answers on them."""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

from swe_rl.tasks.minirepo.mutators import sites
from swe_rl.tasks.minirepo.names import VARIABLES
from swe_rl.tasks.minirepo.templates import ArgumentKind, Template

Arguments = tuple[Any, ...]
Answer = tuple[str, Any]  # ("value", returned) or ("raise", exception class name)

_PLACEHOLDER = re.compile(r"\b[FABXYZIKL]\b")
_WORDS = tuple("ash bay cliff creek dune fog ice lake moss peak river storm sun valley".split())
_MIN_FAILING = 3  # inputs on which a bug must show: one is in the issue, the others are hidden


@dataclass(frozen=True, slots=True, kw_only=True)
class Function:
    name: str
    source: str  # clean, normal form of ast.unparse, without a final newline
    template: Template
    constants: tuple[int, int]  # K, L

    def call(self, arguments: Arguments) -> str:
        return f"{self.name}({', '.join(map(repr, arguments))})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mutant:
    source: str
    kind: str
    answers: list[Answer]  # aligned to the inputs it was tried on


def draw_words(rng: Random) -> dict[str, str]:
    """Parameter and local names by placeholder: the naming habits of one repository, shared by its functions."""
    return {role: rng.choice(pool) for role, pool in VARIABLES.items()}


def instantiate(template: Template, *, name: str, words: Mapping[str, str], rng: Random) -> Function:
    """The template with these names and freshly drawn constants."""
    constants = (rng.randint(*template.k_range), rng.randint(*template.l_range))
    words = {**words, "F": name, "K": str(constants[0]), "L": str(constants[1])}
    source = _PLACEHOLDER.sub(lambda match: words[match[0]], template.source)
    return Function(name=name, source=source, template=template, constants=constants)


def draw_inputs(function: Function, *, count: int, rng: Random) -> list[Arguments]:
    """Up to `count` distinct inputs, most of them near the function's constants, where bounds are decided."""
    near = [constant + delta for constant in function.constants for delta in (-1, 0, 1)]
    drawn = {}
    for _ in range(count):
        arguments = tuple(_draw(kind, near, rng) for kind in function.template.arguments)
        drawn[repr(arguments)] = arguments
    return list(drawn.values())


def _draw(kind: ArgumentKind, near: Sequence[int], rng: Random) -> Any:
    match kind:
        case "numbers":
            return [_number(near, rng) for _ in range(rng.choice((0, 1, 2, 3, 3, 4, 4, 5, 5, 6)))]
        case "number":
            return _number(near, rng)
        case "index":
            return rng.randrange(3)
        case "word":
            return rng.choice(_WORDS)[: near[1] + rng.randrange(-1, 4)]


def _number(near: Sequence[int], rng: Random) -> int:
    return rng.choice(near) if rng.random() < 0.5 else rng.randrange(10)


def answers(source: str, *, name: str, inputs: Sequence[Arguments]) -> list[Answer]:
    """What the function `name` of `source` returns or raises on each input. The source is this package's own."""
    namespace: dict[str, Any] = {}
    exec(compile(source, "<minirepo>", "exec"), namespace)
    function = namespace[name]
    results: list[Answer] = []
    for arguments in inputs:
        try:
            results.append(("value", function(*arguments)))
        except Exception as error:
            results.append(("raise", type(error).__name__))
    return results


def find_mutant(
    source: str, *, name: str, kind: str, inputs: Sequence[Arguments], expected: Sequence[Answer], rng: Random
) -> Mutant | None:
    """A bug of `kind` that changes the answer on at least three inputs; one that answers wrongly is preferred over
    one that only raises. None when no place does."""
    module = ast.parse(source)
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    places = sites(function, kind)
    rng.shuffle(places)
    raising = None
    for place in places:
        undo = place()
        mutated = ast.unparse(module)
        undo()
        got = answers(mutated, name=name, inputs=inputs)
        changed = [given for given, right in zip(got, expected, strict=True) if given != right]
        if len(changed) < _MIN_FAILING:
            continue
        mutant = Mutant(source=mutated, kind=kind, answers=got)
        if any(answer[0] == "value" for answer in changed):
            return mutant
        raising = raising or mutant
    return raising
