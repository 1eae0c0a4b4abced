r"""The tag format: `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`.

Rules, all of them tested:
- The free text before the first `<function=NAME>` is the thought; a leading `<think>...</think>` is never searched for
  calls.
- Exactly one call. A second call after the first is an error; other text after it is ignored.
- A value is kept to the character. Only when it has a newline directly after `<parameter=KEY>` and another directly
  before `</parameter>`, those two are layout and dropped.
- A value ends at the first `</parameter>`. To write the literal text `</parameter>` or `</function>` inside a value,
  put a backslash before the slash: `<\/parameter>`; to write that text, one more: `<\\/parameter>`. Nothing else is
  escaped.
- A call without its end tag is never executed.
- Nothing is repaired: the tags leave no doubt about what was meant, or no call is there.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from swe_rl.agents.formats.base import NAME, FormatError, FormatErrorKind, ParsedAction, after_thought
from swe_rl.types import ToolCall

_OPEN = re.compile(rf"<function=({NAME})>")
_ANY_OPEN = re.compile(r"<function\b")
_PARAMETER = re.compile(rf"\s*<parameter=({NAME})>")
_END_VALUE = "</parameter>"
_END_CALL = re.compile(r"\s*</function>")
_ESCAPE = re.compile(r"<(\\*)/(parameter|function)>")
_UNESCAPE = re.compile(r"<\\(\\*)/(parameter|function)>")
_EXAMPLE = "one <function=NAME><parameter=KEY>VALUE</parameter></function>"


class XmlFormat:
    name = "xml"
    help = (
        "<function=NAME><parameter=KEY>VALUE</parameter></function>, values as they are, without quotes or escapes "
        "(only a literal </parameter> or </function> inside a value is written with a backslash before the slash)"
    )

    def parse(self, text: str, *, cut: bool = False) -> ParsedAction | FormatError:
        """The one call in `text`, or why there is none. A closed call is whole, wherever the text was cut."""
        start = after_thought(text)
        if start is None:
            return _error("no_call", "the thought never ended")
        opening = _OPEN.search(text, start)
        if opening is None:
            if _ANY_OPEN.search(text, start):
                return _error("malformed", "the function tag has no valid name")
            return _error("no_call", "no function call")
        arguments, position, failure = _parameters(text, opening.end())
        if failure is not None:
            return failure
        if _OPEN.search(text, position):
            return _error("several", "more than one function call")
        call = ToolCall(name=opening.group(1), arguments=arguments)
        return ParsedAction(tool_call=call, thought=text[: opening.start()])

    def render(self, name: str, arguments: Mapping[str, str]) -> str:
        """The text of a call. Raises ValueError for a name that the format cannot carry."""
        for word in (name, *arguments):
            if not re.fullmatch(NAME, word):
                raise ValueError(f"{word!r} cannot be a function or parameter name in the xml format")
        values = "".join(f"<parameter={key}>{_render_value(value)}{_END_VALUE}" for key, value in arguments.items())
        return f"<function={name}>{values}</function>"

    def bind(self, tools: Mapping[str, Sequence[str]]) -> XmlFormat:
        """Itself: a call names its tool and its parameters."""
        return self


def _parameters(text: str, position: int) -> tuple[dict[str, str], int, FormatError | None]:
    """Reads parameters from `position` up to and including the end tag of the call."""
    arguments: dict[str, str] = {}
    while True:
        if (end := _END_CALL.match(text, position)) is not None:
            return arguments, end.end(), None
        opening = _PARAMETER.match(text, position)
        if opening is None:
            return arguments, position, _broken(text[position:])
        key = opening.group(1)
        if key in arguments:
            return arguments, position, _error("malformed", f"parameter {key} given twice")
        end_value = text.find(_END_VALUE, opening.end())
        if end_value < 0:
            return arguments, position, _error("truncated", f"parameter {key} is not closed")
        arguments[key] = _parse_value(text[opening.end() : end_value])
        position = end_value + len(_END_VALUE)


def _broken(rest: str) -> FormatError:
    text = rest.lstrip()
    cut_tag = "<parameter=".startswith(text) or "</function>".startswith(text)
    if not text or cut_tag or re.fullmatch(r"<parameter=[^>]*", text):
        return _error("truncated", "the call is not closed by </function>")
    return _error("malformed", f"unexpected text inside the call: {text[:20]!r}")


def _render_value(value: str) -> str:
    escaped = _ESCAPE.sub(r"<\\\1/\2>", value)
    framed = len(value) > 1 and value[0] == "\n" and value[-1] == "\n"
    return f"\n{escaped}\n" if framed else escaped


def _parse_value(raw: str) -> str:
    framed = len(raw) > 1 and raw[0] == "\n" and raw[-1] == "\n"
    return _UNESCAPE.sub(r"<\1/\2>", raw[1:-1] if framed else raw)


def _error(kind: FormatErrorKind, seen: str) -> FormatError:
    return FormatError(kind=kind, seen=seen, expected=_EXAMPLE)
