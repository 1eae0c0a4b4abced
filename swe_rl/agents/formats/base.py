"""What every action format returns: a parsed action, or a typed explanation of what is wrong with the text."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

from swe_rl.types import ToolCall

FormatErrorKind = Literal["no_call", "truncated", "malformed", "several"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ParsedAction:
    """One complete call and the free text before it."""

    tool_call: ToolCall
    thought: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatError:
    """The text holds no executable call. It is shown to the policy, so it stays short."""

    kind: FormatErrorKind
    seen: str  # what is wrong with the text
    expected: str  # the rule, with one example

    @property
    def message(self) -> str:
        return f"format error: {self.seen}; expected {self.expected}"


class ActionFormat(Protocol):
    """How a tool call is written as text. `parse(prefix + render(name, arguments))` gives the call back exactly."""

    name: str
    help: str  # one line for the system prompt

    def parse(self, text: str) -> ParsedAction | FormatError: ...
    def render(self, name: str, arguments: Mapping[str, str]) -> str: ...
