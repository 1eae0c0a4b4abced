"""Arguments are text; these read numbers, ranges and switches out of it."""

from __future__ import annotations

import re
from collections.abc import Mapping

from swe_rl.agents.observation import ToolError


def whole_number(arguments: Mapping[str, str], key: str) -> int:
    """The integer `arguments[key]`. Raises ToolError for other text."""
    try:
        return int(arguments[key].strip())
    except ValueError as err:
        raise ToolError(f"{key} must be a whole number, got {arguments[key]!r}") from err


def line_range(arguments: Mapping[str, str], key: str) -> tuple[int, int] | None:
    """The two integers of `[first, last]`; None when the argument is absent or empty."""
    text = arguments.get(key, "").strip()
    if not text:
        return None
    found = re.fullmatch(r"[\[(]?\s*(-?\d+)\s*[,:\s]\s*(-?\d+)\s*[\])]?", text)
    if found is None:
        raise ToolError(f"{key} must be two line numbers like [10, 40], got {text!r}")
    return int(found[1]), int(found[2])


def switch(arguments: Mapping[str, str], key: str, *, default: bool) -> bool:
    """`true` or `false`, in any case; `default` when the argument is absent or empty."""
    text = arguments.get(key, "").strip().lower()
    if not text:
        return default
    if text not in ("true", "false", "1", "0", "yes", "no"):
        raise ToolError(f"{key} must be true or false, got {text!r}")
    return text in ("true", "1", "yes")
