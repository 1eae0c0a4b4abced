"""What every action format returns: a parsed action, or a typed explanation of what is wrong with the text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self

from swe_rl.types import ToolCall

FormatErrorKind = Literal["no_call", "truncated", "malformed", "several"]
NAME = r"[A-Za-z_][A-Za-z0-9_.-]*"  # of a tool or a parameter, in every format

_THINK, _END_THINK = "<think>", "</think>"


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAction:
    """One complete call and the free text before it."""

    tool_call: ToolCall
    thought: str = ""
    repaired: str = ""  # what was not quite as the format wants it and was read all the same; "" when all was right


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatError:
    """The text holds no executable call. `message` is for a policy that pays for every token, `explain` for others."""

    kind: FormatErrorKind
    seen: str  # what is wrong with the text
    expected: str  # the rule, with one example

    @property
    def message(self) -> str:
        return f"format error: {self.seen}; expected {self.expected}"

    def explain(self, *, tries_left: int) -> str:
        """What was seen, what is expected, an example, and how many further errors in a row are allowed."""
        tries = "this was the last try" if tries_left <= 0 else f"tries left: {tries_left}"
        return f"Format error, nothing was run.\nSeen: {self.seen}.\nExpected: {self.expected}\nIn a row, {tries}."


class ActionFormat(Protocol):
    """How a tool call is written as text. `parse(prefix + render(name, arguments))` gives the call back exactly."""

    name: str
    help: str  # one line for the system prompt

    def parse(self, text: str, *, cut: bool = False) -> ParsedAction | FormatError:
        """The one call in `text`, or why there is none. `cut`: the text ends where a limit was reached, which matters
        to a format whose end mark may also occur inside a call."""
        ...

    def render(self, name: str, arguments: Mapping[str, str]) -> str: ...
    def bind(self, tools: Mapping[str, Sequence[str]]) -> Self:
        """The format for these tools (name -> parameters in their order); the same one where it needs no names."""
        ...


def after_thought(text: str) -> int | None:
    """Where calls may begin: behind a leading `<think>...</think>`. None when that thought never ended."""
    if not text.lstrip().startswith(_THINK):
        return 0
    end = text.find(_END_THINK)
    return None if end < 0 else end + len(_END_THINK)
