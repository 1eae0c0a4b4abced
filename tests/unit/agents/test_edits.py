"""Edits on bytes: exact, and only where asked."""

from __future__ import annotations

import ast
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_rl.agents.edits import (
    EditError,
    function_lines,
    insert_lines,
    num_lines,
    occurrence_lines,
    replace_all,
    replace_function,
    replace_lines,
    replace_text,
)

MODULE = b"""import os\r
\r
\r
class A:\r
\t@property\r
\tdef x(self):\r
\t\treturn 1\r
\r
\tasync def y(self): return 2\r
\r
\r
def outer():\r
    def inner():\r
        return 3\r
    return inner\r
"""


@settings(max_examples=100, deadline=None)
@given(
    before=st.binary(max_size=20),
    old=st.text(min_size=1, max_size=6),
    new=st.text(max_size=6),
    after=st.binary(max_size=20),
)
def test_replace_changes_exactly_one_place(before: bytes, old: str, new: str, after: bytes) -> None:
    data = before + old.encode("utf-8", "surrogatepass") + after
    try:
        got = replace_text(data, old=old, new=new)
    except EditError:
        return
    if b"\r\n" not in data:
        assert data.count(old.encode()) == 1
        assert got == data.replace(old.encode(), new.encode())


@pytest.mark.parametrize(
    ("data", "old", "new", "want"),
    [
        (b"a\tb\n", "\tb", "  c", b"a  c\n"),
        (b"no newline", "newline", "end", b"no end"),
        (b"a\r\nb\r\n", "a\nb", "x\ny", b"x\r\ny\r\n"),
        (b"a\r\nb\n", "b\n", "c\n", b"a\r\nc\n"),
        (b"\xff\xfe a", " a", " b", b"\xff\xfe b"),
        ("é".encode(), "é", "ü", "ü".encode()),
    ],
)
def test_replace(data: bytes, old: str, new: str, want: bytes) -> None:
    assert replace_text(data, old=old, new=new) == want


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("", "x", "old is empty"),
        ("x", "x", "old and new are the same"),
        ("zz", "x", "old not found"),
        ("b", "x", r"old found 3 times \(lines 1, 2, 2\)"),
        ("\ud800", "x", "the file's encoding"),
    ],
)
def test_replace_refuses(old: str, new: str, message: str) -> None:
    with pytest.raises(EditError, match=message):
        replace_text(b"ab\nbb", old=old, new=new)


def test_function_lines() -> None:
    data = b"\xef\xbb\xbfimport os\n\n@d\ndef f():\n    return 1\n\nclass A:\n    def g(self): return (\n        2)"
    assert function_lines(data, "f") == (3, 5)
    assert function_lines(data, "A.g") == function_lines(data, "g") == (8, 9)
    with pytest.raises(EditError, match="no function h"):
        function_lines(data, "h")


def test_replace_function_keeps_everything_else() -> None:
    got = replace_function(MODULE, name="A.x", body="def x(self):\n    # two\n    return 2\n")
    assert got == MODULE.replace(b"\tdef x(self):\r\n\t\treturn 1", b"\tdef x(self):\r\n\t    # two\r\n\t    return 2")
    assert ast.parse(got)


def test_nested_async_and_one_line_functions() -> None:
    got = replace_function(MODULE, name="outer.inner", body="def inner():\n    return 4")
    assert got == MODULE.replace(b"return 3", b"return 4")
    got = replace_function(MODULE, name="y", body="async def y(self):\n\treturn 5")
    assert got == MODULE.replace(b"def y(self): return 2", b"def y(self):\r\n\t\treturn 5")


def test_decorators() -> None:
    data = b"@one\n@two(\n    3)\ndef f():\n    pass\n"
    assert (
        replace_function(data, name="f", body="def f():\n    return 1")
        == b"@one\n@two(\n    3)\ndef f():\n    return 1\n"
    )
    assert replace_function(data, name="f", body="@new\ndef f():\n    return 1") == b"@new\ndef f():\n    return 1\n"


def test_indented_body_and_multi_line_strings() -> None:
    data = b"class A:\n    def f(self):\n        pass"
    body = '\n\ndef f(self):\n    text = """\nflush\n    left"""\n\n    return text\n\n'
    want = b'class A:\n    def f(self):\n        text = """\nflush\n    left"""\n\n        return text'
    assert replace_function(data, name="f", body=body) == want
    assert replace_function(data, name="A.f", body="        def f(self):\n            return 1") == (
        b"class A:\n    def f(self):\n        return 1"
    )


def test_encoding_cookie_and_bom() -> None:
    latin = "# -*- coding: latin-1 -*-\ndef f():\n    return 'é'\n".encode("latin-1")
    got = replace_function(latin, name="f", body="def f():\n    return 'ü'")
    assert got == latin.replace(b"\xe9", b"\xfc")
    with pytest.raises(EditError, match="encoding"):
        replace_function(latin, name="f", body="def f():\n    return '€'")
    bom = b"\xef\xbb\xbfdef f():\n    return 1\n"
    assert replace_function(bom, name="f", body="def f():\n    return 2") == bom.replace(b"1", b"2")


@pytest.mark.parametrize(
    ("name", "body", "message"),
    [
        ("g", "def g(): pass", "no function g"),
        ("f", "def f(): pass", r"2 functions f: A.f line 2, B.f line 5"),
        ("A.f", "return 1", "body must be one whole function"),
        ("A.f", "x = 1", "body must be one whole function"),
        ("A.f", "def f(): pass\ndef g(): pass", "body must be one whole function"),
        ("A.f", "def g(): pass", "body defines g, not f"),
        ("A.f", "def f(:", "syntax error in body line 1"),
        ("A.f", "def f():\n    return (", "syntax error in body line 2"),
        ("A.f", " ", "body is empty"),
        ("A.f", "def f():\n    x\0", "syntax error in body"),
    ],
)
def test_replace_function_refuses(name: str, body: str, message: str) -> None:
    data = b"class A:\n    def f(self): pass\n\nclass B:\n    def f(self): pass\n"
    with pytest.raises(EditError, match=message):
        replace_function(data, name=name, body=body)


def test_a_file_that_does_not_parse() -> None:
    with pytest.raises(EditError, match="syntax error in file line 2"):
        replace_function(b"x = 1\ndef f(:\n", name="f", body="def f(): pass")


@settings(max_examples=100, deadline=None)
@given(value=st.text(max_size=20), depth=st.integers(0, 3), unit=st.sampled_from(["    ", "\t", " "]))
def test_indentation_never_changes_what_the_function_does(value: str, depth: int, unit: str) -> None:
    literal = (
        ascii(value).replace("\\n", "\n")
        if "'" not in value and '"' not in value and "\\" not in value
        else ascii(value)
    )
    text = f"'''{literal[1:-1]}'''" if "\n" in literal else literal
    body = f"def f():\n{unit}x = {text}\n{unit}return x\n"
    lines = [f"{unit * level}if 1:\n" for level in range(depth)]
    data = ("".join(lines) + f"{unit * depth}def f():\n{unit * (depth + 1)}return None\n").encode()
    scope: dict[str, object] = {}
    want: dict[str, object] = {}
    exec(replace_function(data, name="f", body=body), scope)
    exec(body, want)
    assert scope["f"]() == want["f"]()  # type: ignore[operator]


LINES = st.lists(st.text("ab\t \x0c\x85é", max_size=3), max_size=6)


def content(lines: list[str], newline: str, ends: bool) -> bytes:
    return (newline.join(lines) + (newline if ends and lines else "")).encode()


@given(LINES, LINES, st.booleans(), st.booleans(), st.booleans(), st.data())
def test_lines_are_replaced_and_inserted_as_in_a_list_of_lines(
    lines: list[str], new: list[str], crlf: bool, ends: bool, text_ends: bool, data: st.DataObject
) -> None:
    """Against a list of lines. Without a last newline the file must not end in an empty line, which is none there."""
    lines, new = [f"{line}x" for line in lines] or ["x"], [f"{line}y" for line in new]
    newline = "\r\n" if crlf and (ends or len(lines) > 1) else "\n"
    before = content(lines, newline, ends)
    text = "\n".join(new) + ("\n" if text_ends and new else "")
    first = data.draw(st.integers(1, len(lines)))
    last = data.draw(st.integers(first, len(lines)))
    got = replace_lines(before, first=first, last=last, text=text)
    want = [*lines[: first - 1], *new, *lines[last:]]
    cut = not new and last == len(lines) and not ends and first > 1  # the line before keeps the newline that it had
    assert got == content(want, newline, ends or cut)
    after = data.draw(st.integers(0, len(lines)))
    got = insert_lines(before, after=after, text=text)
    assert got == content([*lines[:after], *new, *lines[after:]], newline, ends)


@pytest.mark.parametrize(
    ("data", "after", "text", "want"),
    [
        (b"", 0, "a", b"a\n"),
        (b"a", 1, "b", b"a\nb"),
        (b"a", 1, "b\n", b"a\nb"),
        (b"a", 1, "b\n\n", b"a\nb\n"),
        (b"a\n", 1, "b", b"a\nb\n"),
        (b"a\r\nb", 2, "c\nd", b"a\r\nb\r\nc\r\nd"),
        (b"a\r\nb\n", 1, "c", b"a\r\nc\nb\n"),  # mixed line ends: what is added is plain
        (b"a\rb\n", 1, "c", b"a\rb\nc\n"),
        (b"\xff\n", 0, "c", b"c\n\xff\n"),
    ],
)
def test_insert_lines(data: bytes, after: int, text: str, want: bytes) -> None:
    assert insert_lines(data, after=after, text=text) == want


@pytest.mark.parametrize(
    ("edit", "words"),
    [
        (lambda: insert_lines(b"a\nb", after=3, text="x"), "line 3 is not in the file: it has 2 lines"),
        (lambda: insert_lines(b"", after=1, text="x"), "line 1 is not in the file: it has 0 lines"),
        (lambda: replace_lines(b"a\n", first=0, last=1, text="x"), "lines 0:1 are not in the file: it has 1 lines"),
        (lambda: replace_lines(b"a\n", first=2, last=2, text="x"), "lines 2:2"),
        (lambda: replace_lines(b"a\nb\n", first=2, last=1, text="x"), "lines 2:1"),
        (lambda: occurrence_lines(b"a", ""), "the text to look for is empty"),
    ],
)
def test_lines_that_are_not_there(edit: Callable[[], object], words: str) -> None:
    with pytest.raises(EditError, match=words):
        edit()


def test_occurrences_and_replacing_all() -> None:
    data = b"ab\r\nabab\r\n\r\nab\r\nx\r\n"
    assert occurrence_lines(data, "ab") == [1, 2, 2, 4]
    assert occurrence_lines(data, "ab\nx") == [4]  # a plain newline means the file's
    assert occurrence_lines(b"aaa", "aa") == [1]
    assert replace_all(data, old="ab\n", new="c\n") == b"c\r\nabc\r\n\r\nc\r\nx\r\n"
    assert [num_lines(d) for d in (b"", b"\n", b"a", b"a\n", b"a\nb")] == [0, 1, 1, 1, 2]
