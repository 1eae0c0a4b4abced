"""Issue texts that state behaviour: a call, what it gives, what it should give. Never the fix, never a test's code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from swe_rl.curation.pypi_probe import Example


@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """The same call before and after the bug was put in."""

    example: Example  # with the bug
    expected_kind: str
    expected: str

    @property
    def rank(self) -> tuple[bool, int, str]:
        """Sort key: a wrong value says more than a comparison that is False, a short one is read sooner."""
        expression, got = self.example.expression, self.example.text
        compared = {got, self.expected} == {"True", "False"}
        return compared, len(expression) + len(got) + len(self.expected), expression


def pick_behaviours(
    examples: Sequence[Example], expected: Sequence[tuple[str, str] | None], *, limit: int = 2
) -> list[Behaviour]:
    """The shortest calls whose result differs, at most `limit`, none of them part of another."""
    found: dict[str, Behaviour] = {}
    for example, right in zip(examples, expected, strict=True):
        if right is not None and right != (example.kind, example.text):
            found.setdefault(example.expression, Behaviour(example=example, expected_kind=right[0], expected=right[1]))
    chosen: list[Behaviour] = []
    for behaviour in sorted(found.values(), key=lambda b: b.rank):
        text = behaviour.example.expression
        if not any(text in b.example.expression or b.example.expression in text for b in chosen):
            chosen.append(behaviour)
    return chosen[:limit]


def issue_text(behaviours: Sequence[Behaviour], *, label: str, rng: Random) -> str:
    """A short report. Wording varies with `rng`; content is the behaviours only."""
    first = behaviours[0]
    parts = [_title(first, rng), "", _intro(label, rng), "", "```python"]
    imports = dict.fromkeys(statement for b in behaviours for statement in b.example.imports)
    parts += [f">>> {statement}" for statement in imports]
    for behaviour in behaviours:
        parts += [f">>> {behaviour.example.expression}", _shown(behaviour.example.kind, behaviour.example.text)]
    parts += ["```", ""]
    parts += [_expectation(b, rng, with_call=len(behaviours) > 1) for b in behaviours]
    return "\n".join(parts) + "\n"


def _title(behaviour: Behaviour, rng: Random) -> str:
    name = _called(behaviour)
    if behaviour.example.kind == "raises":
        error = behaviour.example.text.partition(":")[0]
        return rng.choice([f"`{name}` raises {error} unexpectedly", f"Unexpected {error} from `{name}`"])
    if behaviour.expected_kind == "raises":
        error = behaviour.expected.partition(":")[0]
        return rng.choice([f"`{name}` does not raise {error}", f"Missing {error} from `{name}`"])
    return rng.choice([f"Wrong result from `{name}`", f"`{name}` gives a wrong result", f"`{name}` is incorrect"])


def _called(behaviour: Behaviour) -> str:
    """The imported name that the expression uses first, with what follows it up to the bracket."""
    expression = behaviour.example.expression
    names = [statement.split()[-1] for statement in behaviour.example.imports]
    places = [(expression.find(name), name) for name in names if name in expression]
    start = min(places)[0] if places else 0
    return expression[start:].partition("(")[0]


def _intro(label: str, rng: Random) -> str:
    return rng.choice([f"Seen with {label}:", f"With {label} I get this:", f"To reproduce with {label}:"])


def _shown(kind: str, text: str) -> str:
    return text if kind == "value" else f"Traceback (most recent call last):\n  ...\n{text}"


def _expectation(behaviour: Behaviour, rng: Random, *, with_call: bool) -> str:
    subject = f"`{behaviour.example.expression}`" if with_call else "the call"
    if behaviour.expected_kind == "raises":
        return f"Expected: {subject} raises `{behaviour.expected}`."
    verb = rng.choice(["gives", "returns"])
    return f"Expected: {subject} {verb} `{behaviour.expected}`."
