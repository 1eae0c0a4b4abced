"""Typed access to the fields of a data set's row: what is missing, malformed or unknown is named with the row."""

from __future__ import annotations

import ast
import json
import math
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from typing import Any

from swe_rl.errors import ConfigError

_SHOWN = 60  # characters of a wrong value in a message
LIST_OF_TEXT = "a list of strings, or one written as JSON"
MAP = "an object, or one written as JSON"


class RowError(ConfigError):
    """A row is not of the family it is read as. `field` is the field at fault."""

    def __init__(self, where: str, field: str, problem: str) -> None:
        super().__init__(f"{where}: field {field} {problem}")
        self.field = field


class SkipRow(Exception):
    """This row is well formed and yet no task: the reason goes into the report."""


class Row:
    """One row. Each accessor marks its field as known; `finish` complains about the rest."""

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        self.values = values
        self.where = where
        self._known: set[str] = set()

    def has(self, field: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(field) is not None

    def value(self, field: str) -> Any:
        """The raw value, None when absent."""
        self._known.add(field)
        return self.values.get(field)

    def text(self, field: str, default: str | None = None) -> str:
        """A string. `default` stands in for an absent or null field; without one that is an error."""
        found = self._found(field, "a string", required=default is None)
        if found is None:
            return default or ""
        if not isinstance(found, str):
            raise self.wrong(field, "a string")
        return found

    def full_text(self, field: str) -> str:
        """A string that is not blank."""
        found = self.text(field)
        if not found.strip():
            raise RowError(self.where, field, "is empty, expected a string with content")
        return found

    def name(self, field: str) -> str:
        """A string that can be part of a path or image name: one line, without blanks at its ends."""
        found = self.full_text(field)
        if found != found.strip() or "\n" in found or "\0" in found:
            raise self.wrong(field, "a name on one line")
        return found

    def time(self, field: str) -> str:
        """ISO 8601 text of a date, "" when absent: strings stay as they are, numbers are milliseconds since 1970."""
        found = self.value(field)
        if found is None or isinstance(found, str):
            return found or ""
        if isinstance(found, int | float) and not isinstance(found, bool):
            try:
                return datetime.fromtimestamp(found / 1000, UTC).isoformat()
            except (OverflowError, ValueError, OSError):
                pass
        raise self.wrong(field, "a date as text, or milliseconds since 1970")

    def number(self, field: str, default: float | None = None) -> float:
        """A finite number."""
        found = self._found(field, "a number", required=default is None)
        if found is None:
            return default or 0.0
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise self.wrong(field, "a number")
        return float(found)

    def texts(self, field: str, *, required: bool = True) -> tuple[str, ...]:
        """A list of strings, given as one or as text of one (JSON, or Python's notation)."""
        found = self._found(field, LIST_OF_TEXT, required=required)
        if found is None:
            return ()
        decoded = _decoded(found)
        if not isinstance(decoded, list | tuple) or not all(isinstance(item, str) for item in decoded):
            raise self.wrong(field, LIST_OF_TEXT)
        return tuple(decoded)

    def objects(self, field: str) -> list[Mapping[str, Any]]:
        """A list of objects, empty when absent or null."""
        found = _decoded(self.value(field))
        if found is None:
            return []
        if not isinstance(found, list) or not all(isinstance(item, Mapping) for item in found):
            raise self.wrong(field, "a list of objects")
        return found

    def mapping(self, field: str, *, required: bool = True) -> Mapping[str, Any]:
        """An object, given as one or as JSON text of one."""
        found = self._found(field, MAP, required=required)
        if found is None:
            return {}
        decoded = _decoded(found)
        if not isinstance(decoded, Mapping):
            raise self.wrong(field, MAP)
        return decoded

    def sub(self, field: str, *, required: bool = True) -> Row:
        """The object in `field` as a row of its own."""
        return Row(self.mapping(field, required=required), where=f"{self.where}, in {field}")

    def know(self, fields: Iterable[str]) -> None:
        """Declares fields that a family may have and that are kept as they are."""
        self._known.update(fields)

    def finish(self, *, keep_unknown: bool) -> None:
        """Raises RowError for the first field that no accessor asked for, unless those are to be kept."""
        unknown = sorted(set(self.values) - self._known)
        if unknown and not keep_unknown:
            kind = type(self.values[unknown[0]]).__name__
            raise RowError(
                self.where,
                unknown[0],
                f"({kind}) is unknown in this family, expected one of {', '.join(sorted(self._known))}; "
                "--keep-unknown carries it along",
            )

    def wrong(self, field: str, expected: str) -> RowError:
        shown = repr(self.values.get(field))
        shown = shown if len(shown) <= _SHOWN else shown[:_SHOWN] + "..."
        kind = type(self.values.get(field)).__name__
        return RowError(self.where, field, f"is {shown} ({kind}), expected {expected}")

    def _found(self, field: str, expected: str, *, required: bool) -> Any:
        found = self.value(field)
        if found is None and required:
            state = "is null" if field in self.values else "is missing"
            raise RowError(self.where, field, f"{state}, expected {expected}")
        return found


def _decoded(found: Any) -> Any:
    """Text of a literal as its value; anything else, and text that is none, as it is."""
    if not isinstance(found, str):
        return found
    try:
        return json.loads(found)
    except (ValueError, RecursionError):
        pass
    try:
        return ast.literal_eval(found.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return found
