r"""The Hermes and Qwen format: `<tool_call>{"name": NAME, "arguments": {KEY: VALUE, ...}}</tool_call>`.

Rules, all of them tested:
- The free text before the first `<tool_call>` is the thought; a leading `<think>...</think>` is never searched.
- Exactly one call. A second `<tool_call>` after the first is an error; other text after it is ignored.
- A value that is no string arrives as its JSON text: 3, true, [1, 20]. null means that the argument is not given.
- A call without `</tool_call>` behind its JSON is never executed, nor is JSON that ends early: nothing is completed.
- Read all the same, and flagged as repaired: raw line breaks and tabs inside a string, `parameters` for `arguments`,
  arguments given as a string that holds the object, no arguments at all, closing braces too many.
- Rendered text has no control word inside a value: its `<` is written as \u003c. So values may hold any text, and a
  tokenizer that knows `</tool_call>` as one token meets it only where the call ends.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from swe_rl.agents.formats.base import NAME, FormatError, FormatErrorKind, ParsedAction, after_thought
from swe_rl.types import ToolCall

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_CONTROL = re.compile(r"<(?=/?(?:tool_call|tool_response|think)>)")
_ESCAPED = r"\\u003c"  # a template of re.sub: one backslash
_SURROGATE = re.compile(r"[\ud800-\udfff]")
_SPACE = re.compile(r"\s*")
_EXTRA = re.compile(r"\s*(\}[\s}]*)?")
_EXAMPLE = (
    'one <tool_call>{"name": NAME, "arguments": {KEY: VALUE}}</tool_call> with valid JSON, for example '
    '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
)


class _Malformed(Exception):
    """Complete, but not a call; the message is shown to the policy."""


class HermesFormat:
    name = "hermes"
    help = (
        '<tool_call>{"name": NAME, "arguments": {KEY: VALUE}}</tool_call>, one JSON object, line breaks and quotes '
        r"inside strings escaped as JSON wants it (\n, \")"
    )

    def parse(self, text: str, *, cut: bool = False) -> ParsedAction | FormatError:
        """The one call in `text`, or why there is none. A closed call is whole, wherever the text was cut."""
        start = after_thought(text)
        if start is None:
            return _error("no_call", "the thought never ended")
        opening = text.find(_OPEN, start)
        if opening < 0:
            return _error("no_call", "no tool call")
        try:
            call, end, repaired = _read_call(text, opening + len(_OPEN))
        except _Malformed as err:
            return _error("malformed", str(err))
        if end is None:
            return _error("truncated", f"the call is not closed by {_CLOSE}")
        if text.find(_OPEN, end) >= 0:
            return _error("several", "more than one tool call")
        return ParsedAction(tool_call=call, thought=text[:opening], repaired=", ".join(repaired))

    def render(self, name: str, arguments: Mapping[str, str]) -> str:
        """The text of a call. Raises ValueError for a name that the format cannot carry."""
        for word in (name, *arguments):
            if not re.fullmatch(NAME, word):
                raise ValueError(f"{word!r} cannot be a function or parameter name in the hermes format")
        body = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
        return f"{_OPEN}\n{_CONTROL.sub(_ESCAPED, body)}\n{_CLOSE}"

    def bind(self, tools: Mapping[str, Sequence[str]]) -> HermesFormat:
        """Itself: a call names its tool and its parameters."""
        return self


def _read_call(text: str, position: int) -> tuple[ToolCall, int | None, list[str]]:
    """(call, end of its closing tag or None when it is cut off, repairs). Raises _Malformed."""
    repaired: list[str] = []
    cut_off = ToolCall(name="", arguments={}), None, repaired
    start = _SPACE.match(text, position).end()  # type: ignore[union-attr]  # matches the empty text
    if start == len(text):
        return cut_off
    if text[start] != "{":
        raise _Malformed(f"no JSON object after {_OPEN}, but {text[start : start + 20]!r}")
    try:
        value, end = _decode(text, start, repaired)
    except json.JSONDecodeError as err:
        if text.find(_CLOSE, start) < 0:
            return cut_off
        raise _Malformed(f"invalid JSON: {err.msg} at {text[err.pos : err.pos + 20]!r}") from err
    except (ValueError, RecursionError) as err:  # a number of thousands of digits; nesting without end
        raise _Malformed(f"JSON that cannot be read: {' '.join(str(err).split())[:80]}") from err
    extra = _EXTRA.match(text, end)
    if extra is not None and extra.group(1):
        repaired.append("closing braces too many")
    end = end if extra is None else extra.end()
    if not text.startswith(_CLOSE, end):
        if _CLOSE.startswith(text[end:]):
            return cut_off
        raise _Malformed(f"unexpected text after the JSON: {text[end : end + 20]!r}")
    return _call(value, repaired), end + len(_CLOSE), repaired


def _decode(text: str, start: int, repaired: list[str]) -> tuple[Any, int]:
    try:
        return _STRICT.raw_decode(text, start)
    except json.JSONDecodeError as err:
        if not err.msg.startswith("Invalid control character"):
            raise
    repaired.append("raw control characters in a string")
    return _LAX.raw_decode(text, start)


def _call(value: dict[str, Any], repaired: list[str]) -> ToolCall:
    """The call that a decoded object means. Raises _Malformed."""
    name = value.get("name")
    if not isinstance(name, str) or not re.fullmatch(NAME, name):
        raise _Malformed('"name" must be the name of a tool')
    arguments = value.get("arguments")
    if arguments is None and isinstance(value.get("parameters"), dict):
        arguments = value["parameters"]
        repaired.append('"parameters" for "arguments"')
    elif arguments is None:
        arguments = {}
        repaired.append("no arguments")
    if isinstance(arguments, str):
        arguments = _nested(arguments)
        repaired.append("arguments as a string")
    if not isinstance(arguments, dict):
        raise _Malformed('"arguments" must be an object')
    texts = {key: _text(item) for key, item in arguments.items() if item is not None}
    if any(_SURROGATE.search(part) for pair in texts.items() for part in pair):
        raise _Malformed("half a surrogate pair, which is no text")
    return ToolCall(name=name, arguments=texts)


def _nested(text: str) -> Any:
    try:
        return _STRICT.decode(text)
    except (ValueError, RecursionError) as err:
        raise _Malformed('"arguments" must be an object, not a string') from err


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (ValueError, RecursionError) as err:
        raise _Malformed("a value that cannot be read") from err


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Malformed(f"{key[:40]!r} given twice")
        found[key] = value
    return found


def _no_constant(name: str) -> NoReturn:
    raise _Malformed(f"{name} is not JSON")


_STRICT = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant)
_LAX = json.JSONDecoder(object_pairs_hook=_unique, parse_constant=_no_constant, strict=False)


def _error(kind: FormatErrorKind, seen: str) -> FormatError:
    return FormatError(kind=kind, seen=seen, expected=_EXAMPLE)
