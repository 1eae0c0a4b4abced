"""The tag format: round trip over arbitrary text, exact values, and a message for everything that is no call."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_rl.agents.formats import FORMATS, FormatError, ParsedAction

XML = FORMATS["xml"]
NAMES = st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True)
PIECES = st.sampled_from(
    [
        "</parameter>",
        "<\\/parameter>",
        "<\\\\/function>",
        "</function>",
        "<function=f>",
        "<parameter=k>",
        "\n",
        "\\",
        "\t",
        "\r\n",
    ]
)
VALUES = st.lists(st.one_of(st.text(max_size=12), PIECES), max_size=8).map("".join)


@settings(max_examples=200, deadline=None)
@given(name=NAMES, arguments=st.dictionaries(NAMES, VALUES, max_size=4), tail=st.sampled_from(["", "\n", " done"]))
def test_round_trip_is_exact(name: str, arguments: dict[str, str], tail: str) -> None:
    got = XML.parse("I think.\n" + XML.render(name, arguments) + tail)
    assert isinstance(got, ParsedAction), got
    assert got.tool_call.name == name
    assert dict(got.tool_call.arguments) == arguments
    assert got.thought == "I think.\n"


@settings(max_examples=200, deadline=None)
@given(text=st.lists(st.one_of(st.text(max_size=8), PIECES), max_size=12).map("".join))
def test_any_text_gives_an_action_or_an_error(text: str) -> None:
    got = XML.parse(text)
    assert isinstance(got, ParsedAction | FormatError)
    if isinstance(got, FormatError):
        assert len(got.message) < 330


@settings(max_examples=200, deadline=None)
@given(arguments=st.dictionaries(NAMES, VALUES, min_size=1, max_size=3), cut=st.integers(1, 10_000))
def test_a_truncated_call_is_never_an_action(arguments: dict[str, str], cut: int) -> None:
    text = XML.render("f", arguments)
    got = XML.parse(text[: -(1 + cut % (len(text) - 1))])
    assert isinstance(got, FormatError)


def test_plain_rendering() -> None:
    text = XML.render("replace", {"path": "a.py", "old": "\tx = 1\n", "new": ""})
    assert text == (
        "<function=replace><parameter=path>a.py</parameter><parameter=old>\tx = 1\n</parameter>"
        "<parameter=new></parameter></function>"
    )


@pytest.mark.parametrize(
    ("raw", "value"),
    [
        ("\nx\n", "x"),
        ("\n  x\n\n", "  x\n"),
        ("x\n", "x\n"),
        ("\nx", "\nx"),
        ("\n", "\n"),
        ("\n\n", ""),
        (" x ", " x "),
        ("a &lt; b", "a &lt; b"),
        ("<\\/parameter>", "</parameter>"),
        ("<\\n>", "<\\n>"),
    ],
)
def test_values(raw: str, value: str) -> None:
    got = XML.parse(f"<function=f>\n<parameter=k>{raw}</parameter>\n</function>")
    assert isinstance(got, ParsedAction)
    assert got.tool_call.arguments == {"k": value}


@pytest.mark.parametrize(
    ("text", "kind", "seen"),
    [
        ("", "no_call", "no function call"),
        ("ls -la", "no_call", "no function call"),
        ("<think>should I <function=submit></function>", "no_call", "the thought never ended"),
        ("<function=>", "malformed", "the function tag has no valid name"),
        ("<function=f", "malformed", "the function tag has no valid name"),
        ("<function=f>", "truncated", "the call is not closed by </function>"),
        ("<function=f><param", "truncated", "the call is not closed by </function>"),
        ("<function=f><parameter=k", "truncated", "the call is not closed by </function>"),
        ("<function=f><parameter=k>v", "truncated", "parameter k is not closed"),
        ("<function=f><parameter=k>v</parameter></func", "truncated", "the call is not closed by </function>"),
        ("<function=f>ls</function>", "malformed", "unexpected text inside the call: 'ls</function>'"),
        ("<function=f><parameter=k>a</parameter>b</parameter></function>", "malformed", None),
        (
            "<function=f><parameter=k>a</parameter><parameter=k>b</parameter></function>",
            "malformed",
            "parameter k given twice",
        ),
        ("<function=f></function><function=g></function>", "several", "more than one function call"),
    ],
)
def test_errors_say_what_was_seen(text: str, kind: str, seen: str | None) -> None:
    got = XML.parse(text)
    assert isinstance(got, FormatError)
    assert got.kind == kind
    assert seen is None or got.seen == seen
    assert got.message.startswith(f"format error: {got.seen}; expected one <function=NAME>")


def test_a_call_inside_the_thought_is_not_the_call() -> None:
    got = XML.parse("<think>not <function=submit></function></think>now <function=test></function>")
    assert isinstance(got, ParsedAction)
    assert got.tool_call.name == "test"


@pytest.mark.parametrize("name", ["", "a b", "1a", "a>", "a\n"])
def test_names_that_cannot_be_written(name: str) -> None:
    with pytest.raises(ValueError, match="cannot be a function or parameter name"):
        XML.render(name, {})
    with pytest.raises(ValueError, match="cannot be a function or parameter name"):
        XML.render("f", {name: ""})
