"""Task.kind from the labels that a data set gives its rows."""

from __future__ import annotations

from collections.abc import Iterable

from swe_rl.types import TaskKind

# Part of a label -> kind; the first line that fits any label counts, so a mended bug with new docs is a bug fix.
_BY_LABEL: tuple[tuple[str, TaskKind], ...] = (
    ("bug", "bugfix"),
    ("fix", "bugfix"),
    ("refactor", "refactor"),
    ("code_quality", "refactor"),
    ("feature", "feature"),
    ("feat", "feature"),
    ("enh", "feature"),
    ("doc", "docs"),
)


def kind_of(labels: Iterable[str]) -> TaskKind:
    """The kind that the labels name; "bugfix" where they name none, as in most of these sets."""
    lowered = [label.lower() for label in labels]
    return next((kind for part, kind in _BY_LABEL if any(part in label for label in lowered)), "bugfix")
