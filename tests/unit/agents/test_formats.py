"""Every action format: exact round trip, no call out of a cut or random text, and an error that explains itself."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_rl.agents.formats import FORMATS, FenceFormat, FormatError, ParsedAction

TOOLS = {"bash": ("command",), "open": ("path", "line"), "edit": ("lines", "text", "path"), "submit": ()}
ALL = {**FORMATS, "fence-bound": FORMATS["fence"].bind(TOOLS)}
EVERY = pytest.mark.parametrize("name", sorted(ALL))
NAMES = st.one_of(
    st.from_regex(r"[A-Za-z_][A-Za-z0-9_.-]{0,8}", fullmatch=True),
    st.sampled_from(["bash", "command", "sh", "tool", "submit", "open", "execute_bash", "think"]),
)
PIECES = st.sampled_from(
    [
        "</parameter>", "<\\/parameter>", "</function>", "<function=f>", "<parameter=k>", "<tool_call>", "</tool_call>",
        "\\u003c", "<think>", "</think>", "```", "````", "\n```\n", "\n```command\n", "--k 'v'", "'", '"', "\\", "\\'",
        "{", "}", '{"name": "f"}', "<<EOF\n", "\nEOF\n", "\n", "\r\n", "\r", "\t", "\0", "\u2028", "\x85", " ",
        "open a", "<|im_end|>", "\U0001f600",
    ]
)  # fmt: skip
VALUES = st.lists(st.one_of(st.text(max_size=12), PIECES), max_size=8).map("".join)
PREFIXES = st.sampled_from(["", "I think.\n", "I think: ", "<think>no <function=f></function> ```x\n</think>\n"])


@EVERY
@settings(max_examples=400, deadline=None)
@given(
    tool=NAMES,
    arguments=st.dictionaries(NAMES, VALUES, max_size=4),
    before=PREFIXES,
    after=st.sampled_from(["", "\n", "\nok"]),
)
def test_round_trip_is_exact(name: str, tool: str, arguments: dict[str, str], before: str, after: str) -> None:
    got = ALL[name].parse(before + ALL[name].render(tool, arguments) + after)
    assert isinstance(got, ParsedAction), got
    assert (got.tool_call.name, dict(got.tool_call.arguments)) == (tool, arguments)
    assert (got.thought, got.repaired) == (before, "")


@EVERY
@settings(max_examples=400, deadline=None)
@given(command=VALUES, before=PREFIXES)
def test_any_shell_command_is_kept_to_the_character(name: str, command: str, before: str) -> None:
    got = ALL[name].parse(before + ALL[name].render("bash", {"command": command}))
    assert isinstance(got, ParsedAction), got
    assert (got.tool_call.name, dict(got.tool_call.arguments)) == ("bash", {"command": command})


@EVERY
@settings(max_examples=300, deadline=None)
@given(tool=NAMES, arguments=st.dictionaries(NAMES, VALUES, max_size=3), cut=st.integers(1, 10_000))
def test_a_truncated_call_is_never_an_action(name: str, tool: str, arguments: dict[str, str], cut: int) -> None:
    text = ALL[name].render(tool, arguments)
    got = ALL[name].parse(text[: -(1 + cut % (len(text) - 1))])
    assert isinstance(got, FormatError)
    assert got.kind in ("truncated", "no_call", "malformed")


@EVERY
@settings(max_examples=300, deadline=None)
@given(text=st.lists(st.one_of(st.text(max_size=8), PIECES), max_size=12).map("".join))
def test_any_text_gives_an_action_or_an_error(name: str, text: str) -> None:
    got = ALL[name].parse(text)
    if isinstance(got, FormatError):
        assert len(got.message) < 400
    else:
        assert all(part.encode() for part in got.tool_call.arguments), "arguments are text that can be written"


@EVERY
def test_an_error_says_what_was_seen_what_is_expected_an_example_and_the_tries_left(name: str) -> None:
    fmt = ALL[name]
    cut = fmt.parse(fmt.render("bash", {"command": "ls\n" * 3})[:-2])
    assert isinstance(cut, FormatError)
    assert cut.kind == "truncated"
    text = cut.explain(tries_left=2)
    assert cut.seen in text
    assert cut.expected in text
    assert "tries left: 2" in text
    assert "last try" in cut.explain(tries_left=0)
    for mark in {"xml": ["<function="], "hermes": ["<tool_call>"]}.get(fmt.name, ["```command"]):
        assert mark in text
        assert mark in fmt.help
    thought = fmt.parse("<think>" + fmt.render("bash", {"command": "ls"}))
    assert isinstance(thought, FormatError)
    assert (thought.kind, thought.seen) == ("no_call", "the thought never ended")
    two = fmt.parse("\n".join([fmt.render("bash", {"command": "ls"})] * 2))
    assert isinstance(two, FormatError)
    assert two.kind == "several"
    with pytest.raises(ValueError, match="cannot be a function or parameter name"):
        fmt.render("a b", {})
    with pytest.raises(ValueError, match="cannot be a function or parameter name"):
        fmt.render("f", {"1": ""})


def mutate(rng: random.Random, seeds: list[bytes]) -> bytes:
    """Random bytes, or a rendered call with bytes changed, removed, repeated, or cut off."""
    if rng.random() < 0.3:
        return rng.randbytes(rng.randrange(60))
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data) + 1)
        action = rng.randrange(4)
        if action == 0:
            data[at:at] = rng.randbytes(rng.randrange(1, 4))
        elif action == 1:
            del data[at : at + rng.randrange(1, 6)]
        elif action == 2:
            data[at:at] = rng.choice(seeds)[: rng.randrange(30)]
        else:
            del data[at:]
    return bytes(data)


@pytest.mark.slow
@EVERY
def test_bytes_never_crash_the_parser(name: str) -> None:
    """200,000 byte strings, decoded with replacement. A text without the format's closing mark, as a
    cut one is, never gives an action."""
    fmt, rng = ALL[name], random.Random(f"fuzz/{name}")
    values = ["ls -la", "a\n  b\n", "</parameter>", '{"x": [1, "2"]}', "it's", "é\U0001f600", "```\n", "<tool_call>"]
    seeds = [
        fmt.render(tool, {key: rng.choice(values) for key in keys}).encode()
        for tool, keys in [("bash", ("command",)), ("edit", ("path", "text")), ("submit", ())]
        for _ in range(20)
    ]
    seeds += [b'<tool_call>{"name":"f","arguments":"{}"}}</tool_call>', b"```command\nopen a 3\n```"]
    close = {"xml": "</function>", "hermes": "</tool_call>"}.get(fmt.name, "\n```")
    actions = 0
    for _ in range(200_000):
        text = mutate(rng, seeds).decode("utf-8", "replace")
        got = fmt.parse(text)
        assert isinstance(got, ParsedAction | FormatError)
        if isinstance(got, ParsedAction):
            actions += 1
            assert close in text or "`````" in text, text
            assert got.tool_call.name
            "".join([*got.tool_call.arguments, *got.tool_call.arguments.values()]).encode()
        else:
            assert len(got.message) < 400
    assert actions > 4000, "the mutants stay near real calls"


@EVERY
@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>" + "[" * 100_000,
        '<tool_call>{"name": "f", "arguments": ' + '{"a":' * 50_000,
        '<tool_call>{"name": "f", "arguments": {"a": ' + "[" * 50_000 + "]" * 50_000 + "}}</tool_call>",
        '<tool_call>{"name": "f", "arguments": {"a": ' + "9" * 50_000 + "}}</tool_call>",
        "<tool_call>" * 50_000,
        "`" * 200_000,
        "```a``` " * 50_000,
        "```command\n" * 50_000,
        "```edit\n" + "--k 'v' " * 20_000,
        "```edit\n" + "'" * 100_001 + "\n```",
        "<function=f>" * 50_000,
        "<function=f>" + "<parameter=k>" * 50_000,
        "<function=f>" + " " * 200_000 + "<parameter=k>",
        "<think>" * 50_000,
    ],
    ids=lambda text: f"{text[:24]!r}x{len(text)}",
)
@pytest.mark.timeout(20)
def test_hostile_texts_are_read_in_bounded_time(name: str, text: str) -> None:
    assert isinstance(ALL[name].parse(text), FormatError | ParsedAction)


def test_only_the_fence_needs_the_tools() -> None:
    for name in ("xml", "hermes"):
        assert FORMATS[name].bind(TOOLS) is FORMATS[name]
    assert FORMATS["fence"].bind(TOOLS) == FenceFormat(TOOLS)
