"""Words of a command line, split as a POSIX shell splits them, without expansions."""

from __future__ import annotations

import re
from dataclasses import dataclass

_TOKEN = re.compile(
    r"""(?P<space>[ \t\r\n]+)
    | '(?P<single>[^']*)'
    | "(?P<double>(?:[^"\\]|\\.)*)"
    | <<-?\s*(?P<mark>'[^'\n]+'|"[^"\n]+"|[A-Za-z_]\w*)[^\S\n]*\n
    | \\(?P<escaped>.)
    | (?P<plain>[^ \t\r\n'"\\<]+|<)""",
    re.VERBOSE | re.DOTALL,
)
_UNESCAPE = re.compile(r'\\([\\"$`\n])')  # inside double quotes a backslash counts before these only


class WordError(Exception):
    """The line cannot be split; the message is shown to the policy."""


@dataclass(frozen=True, slots=True)
class Word:
    text: str
    quoted: bool = False  # some of it was in quotes, so it is a value whatever it looks like
    here: bool = False  # the text of a here-document


def read_words(line: str) -> list[Word]:
    """The words of `line`; a here-document is its last word, without the line break before its end mark. Raises
    WordError."""
    words: list[Word] = []
    parts: list[str] = []
    started = quoted = False
    position = 0
    while position < len(line):
        token = _TOKEN.match(line, position)
        if token is None:
            raise WordError("a quote that is not closed" if line[position] in "'\"" else "a lone backslash at the end")
        position = token.end()
        if token["space"] is None and token["mark"] is None:
            parts.append(_text(token))
            quoted = quoted or token["single"] is not None or token["double"] is not None
            started = True
        elif started:
            words.append(Word("".join(parts), quoted))
            parts, started, quoted = [], False, False
        if token["mark"] is not None:
            return [*words, _here_document(line, position, token["mark"].strip("'\""))]
    return [*words, Word("".join(parts), quoted)] if started else words


def _text(token: re.Match[str]) -> str:
    if token["single"] is not None:
        return token["single"]
    if token["double"] is not None:
        return _UNESCAPE.sub(r"\1", token["double"])
    return token["escaped"] if token["escaped"] is not None else token.group()


def _here_document(line: str, start: int, mark: str) -> Word:
    end = re.compile(rf"^{re.escape(mark)}[^\S\n]*$", re.MULTILINE).search(line, start)
    if end is None:
        raise WordError(f"the here-document is not closed by a line {mark}")
    if line[end.end() :].strip():
        raise WordError(f"text after the here-document: {line[end.end() :].strip()[:20]!r}")
    return Word(line[start : max(end.start() - 1, start)], quoted=True, here=True)
