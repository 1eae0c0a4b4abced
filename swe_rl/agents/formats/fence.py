r"""The fenced format: exactly one block between lines of backticks; its label says what it is.

    ```command            a command for the shell, as it is; `bash` and `sh` mean the same
    grep -n 'def f' *.py
    ```
    ```edit               a call of the tool `edit`, one `--NAME 'VALUE'` for each parameter
    --path 'calc.py' --text 'a
    b'
    ```
    ```tool sh            the same for a tool whose name alone means something else here
    ```

Rules, all of them tested:
- The free text before the block is the thought; a leading `<think>...</think>` is never searched.
- Bound to the names of tools, the format takes only their labels and the shell's for actions: other blocks (```python)
  belong to the thought.
- The last line break before the closing backticks is layout; every other character of a command counts. A block ends at
  the first line that is nothing but at least as many backticks as it began with.
- Quotes are the shell's: a value in single quotes is kept to the character, a single quote itself is `'\''`.
- A block without its closing line is never executed, nor one that seems to hold the beginning of another: it ends
  with that one, and the rest of the command is missing. More than one action block is an error.
- Read all the same, and flagged as repaired: a block without a label, taken for the shell's; a value without quotes.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from swe_rl.agents.formats.base import NAME, FormatError, FormatErrorKind, ParsedAction, after_thought
from swe_rl.types import ToolCall

_SHELL_LABELS = ("command", "bash", "sh", "shell")
_SHELL_TOOLS = ("bash", "execute_bash")
_FENCE = re.compile(r"(?<!`)(`{3,})([^`\n]*)$", re.MULTILINE)
_NAMED = re.compile(rf"(tool[ \t]+)?({NAME})")
_OPTION = re.compile(rf"\s*--({NAME})(?:[ \t\r\n]+|=)")
_VALUE = re.compile(
    r"""(?P<single>'[^']*'(?:\\''[^']*')*)|"(?P<double>(?:[^"\\]|\\.)*)"|(?P<bare>[^\s'"\\]+)""", re.DOTALL
)
_UNESCAPE = re.compile(r'\\([\\"$`])')  # inside double quotes a backslash counts before these only
_EXAMPLE = (
    "one block of a line ```command, the command, and a line ``` "
    "(or ```TOOL and --NAME 'VALUE' for each parameter of a tool)"
)


class _Malformed(Exception):
    """A closed block, but not a call; the message is shown to the policy."""


@dataclass(frozen=True, slots=True)
class _Block:
    label: str
    body: str
    start: int
    closed: bool
    inner: str  # a line in it that looks like the beginning of a block


@dataclass(frozen=True, slots=True)
class FenceFormat:
    tools: Mapping[str, Sequence[str]] | None = None  # name -> parameters in order; None: any label is a tool

    name = "fence"
    help = (
        "a block that begins with a line ```command and ends with a line ```, the shell command between them as it is; "
        "for a tool that is no shell the label is its name, and --NAME 'VALUE' gives each parameter, quoted as in a "
        "shell"
    )

    def parse(self, text: str, *, cut: bool = False) -> ParsedAction | FormatError:
        """The one call in `text`, or why there is none. Out of a `cut` text no call is taken: the line of backticks
        that seems to end its block may be one of a document that the command was writing."""
        start = after_thought(text)
        if start is None:
            return _error("no_call", "the thought never ended")
        actions = [block for block in _blocks(text, start) if self._is_action(block)]
        if not actions:
            return _error("no_call", "no command block")
        block = actions[0]
        if cut or not block.closed:
            what = "the message was cut off" if block.closed else "the block is not closed by a line of backticks"
            return _error("truncated", what)
        if len(actions) > 1:
            return _error("several", "more than one command block")
        try:
            call, repaired = self._call(block)
        except _Malformed as err:
            return _error("malformed", str(err))
        return ParsedAction(tool_call=call, thought=text[: block.start], repaired=repaired)

    def render(self, name: str, arguments: Mapping[str, str]) -> str:
        """The text of a call. Raises ValueError for a name that the format cannot carry."""
        for word in (name, *arguments):
            if not re.fullmatch(NAME, word):
                raise ValueError(f"{word!r} cannot be a function or parameter name in the fence format")
        shell, parameter = self._shell()
        if name == shell and list(arguments) == [parameter]:
            return _fenced("command", arguments[parameter])
        plain = name not in (shell, *_SHELL_LABELS) and (self.tools is None or name in self.tools)
        body = "\n".join(f"--{key} {_quote(value)}" for key, value in arguments.items())
        return _fenced(name if plain else f"tool {name}", body)

    def bind(self, tools: Mapping[str, Sequence[str]]) -> FenceFormat:
        """The format for these tools (name -> parameters in their order)."""
        return FenceFormat({name: tuple(parameters) for name, parameters in tools.items()})

    def _shell(self) -> tuple[str, str]:
        """(tool, parameter) that a command block is for."""
        for name in _SHELL_TOOLS:
            if self.tools is not None and self.tools.get(name):
                return name, self.tools[name][0]
        return "bash", "command"

    def _is_action(self, block: _Block) -> bool:
        if block.label in ("", *_SHELL_LABELS):
            return True
        named = _NAMED.fullmatch(block.label)
        return named is not None and bool(named.group(1) or self.tools is None or named.group(2) in self.tools)

    def _call(self, block: _Block) -> tuple[ToolCall, str]:
        """(call that an action block means, what was repaired). Raises _Malformed."""
        if block.inner:
            raise _Malformed(f"a line {block.inner[:20]} inside the block, which then needs more backticks around it")
        named = _NAMED.fullmatch(block.label)
        if named is None or block.label in _SHELL_LABELS:
            shell, parameter = self._shell()
            repaired = "" if block.label else "a block without a label"
            return ToolCall(name=shell, arguments={parameter: block.body}), repaired
        arguments, repaired = _arguments(block.body)
        return ToolCall(name=named.group(2), arguments=arguments), repaired


def _arguments(body: str) -> tuple[dict[str, str], str]:
    """(arguments by name, what was repaired). Raises _Malformed."""
    arguments: dict[str, str] = {}
    repaired, position, end = "", 0, len(body.rstrip(" \t\r\n"))
    while position < end:
        option = _OPTION.match(body, position)
        if option is None:
            raise _Malformed(f"no --NAME 'VALUE' at {body[position:].lstrip()[:20]!r}")
        value = _VALUE.match(body, option.end())
        if value is None or not (value.end() >= end or body[value.end()].isspace()):
            raise _Malformed(f"the value of --{option.group(1)} is not one quoted text")
        if option.group(1) in arguments:
            raise _Malformed(f"--{option.group(1)} given twice")
        arguments[option.group(1)] = _value(value)
        repaired = "a value without quotes" if value["bare"] is not None else repaired
        position = value.end()
    return arguments, repaired


def _value(found: re.Match[str]) -> str:
    if found["single"] is not None:
        return found["single"][1:-1].replace("'\\''", "'")
    return found.group() if found["bare"] is not None else _UNESCAPE.sub(r"\1", found["double"])


def _blocks(text: str, start: int) -> Iterator[_Block]:
    """Fenced blocks from `start` on; the last may lack its end. A block may begin within a line if it has a label."""
    opening, inner = None, ""
    for line in _FENCE.finditer(text, start):
        ticks, label = line.group(1), line.group(2).strip()
        at_start = line.start() == start or text[line.start() - 1] == "\n"
        if opening is None:
            attached = bool(_NAMED.fullmatch(label)) and not line.group(2)[0].isspace()
            opening, inner = (line if at_start or attached else None), ""
        elif at_start and len(ticks) >= len(opening.group(1)):
            if label:
                inner = inner or line.group()
                continue
            yield _block(text, opening, line.start(), inner)
            opening = None
    if opening is not None:
        yield _block(text, opening, None, inner)


def _block(text: str, opening: re.Match[str], end: int | None, inner: str) -> _Block:
    body = text[opening.end() + 1 : None if end is None else max(end - 1, opening.end() + 1)]
    return _Block(opening.group(2).strip(), body, opening.start(), end is not None, inner)


def _fenced(label: str, body: str) -> str:
    longest = max((len(run) for run in re.findall(r"`+", body)), default=0)
    ticks = "`" * max(3, longest + 1)
    return f"{ticks}{label}\n{body}\n{ticks}"


def _quote(value: str) -> str:
    return "'" + value.replace("'", "'\\''") + "'"


def _error(kind: FormatErrorKind, seen: str) -> FormatError:
    return FormatError(kind=kind, seen=seen, expected=_EXAMPLE)
