"""The fenced format: blocks, labels, quoted parameters, and what binding to tools changes."""

from __future__ import annotations

import pytest

from swe_rl.agents.formats import FORMATS, FormatError, ParsedAction

FENCE = FORMATS["fence"]
BOUND = FENCE.bind({"execute_bash": ("cmd", "command"), "open": ("path", "line"), "submit": ()})


def test_plain_rendering() -> None:
    assert FENCE.render("bash", {"command": "ls\n"}) == "```command\nls\n\n```"
    assert FENCE.render("bash", {"command": "cat <<E\n```\nE"}) == "````command\ncat <<E\n```\nE\n````"
    assert FENCE.render("edit", {"path": "a b", "text": "it's\n"}) == "```edit\n--path 'a b'\n--text 'it'\\''s\n'\n```"
    assert FENCE.render("submit", {}) == "```submit\n\n```"
    assert BOUND.render("execute_bash", {"cmd": "ls"}) == "```command\nls\n```"
    assert BOUND.render("execute_bash", {"command": "ls"}) == "```tool execute_bash\n--command 'ls'\n```"
    assert BOUND.render("other", {}) == "```tool other\n\n```"


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("```command\nls -la | head\n```", "bash", {"command": "ls -la | head"}),
        ("Look: ```bash\nls\n```", "bash", {"command": "ls"}),
        ("```command  \r\nls\n```\t\r", "bash", {"command": "ls"}),
        ("```command\n```", "bash", {"command": ""}),
        ("`x` and ```y``` then\n```sh\na\n\nb\n```\nok", "bash", {"command": "a\n\nb"}),
        ("```command\n  ``` x\n```", "bash", {"command": "  ``` x"}),
        ("```f\n--a '1' --b \"x \\\"y\\\"\\n\"\n  --c='--d'\t\n\n```", "f", {"a": "1", "b": 'x "y"\\n', "c": "--d"}),
        ("```tool bash\n--cmd ''\n```", "bash", {"cmd": ""}),
    ],
)
def test_blocks(text: str, name: str, arguments: dict[str, str]) -> None:
    got = FENCE.parse(text)
    assert isinstance(got, ParsedAction), got
    assert (got.tool_call.name, got.tool_call.arguments, got.repaired) == (name, arguments, "")


def test_what_is_repaired_is_flagged() -> None:
    got = FENCE.parse("So\n```\nls\n```")
    assert isinstance(got, ParsedAction)
    assert (got.tool_call.arguments, got.repaired) == ({"command": "ls"}, "a block without a label")
    got = FENCE.parse("```open\n--path a.py --line '3'\n```")
    assert isinstance(got, ParsedAction)
    assert (got.tool_call.arguments, got.repaired) == ({"path": "a.py", "line": "3"}, "a value without quotes")


def test_a_command_goes_to_the_shell_of_the_tools() -> None:
    got = BOUND.parse("```command\nopen a 3\n```")
    assert isinstance(got, ParsedAction)
    assert (got.tool_call.name, got.tool_call.arguments) == ("execute_bash", {"cmd": "open a 3"})


def test_other_blocks_belong_to_the_thought_once_the_tools_are_known() -> None:
    text = "The cause:\n```python\nreturn a - b\n```\nso\n```open\n--path 'a'\n```"
    got = BOUND.parse(text)
    assert isinstance(got, ParsedAction)
    assert got.thought == text[: text.index("```open")]
    assert isinstance(FENCE.parse(text), FormatError), "unbound, any label may be a tool"


@pytest.mark.parametrize(
    ("text", "kind", "seen"),
    [
        ("ls", "no_call", "no command block"),
        ("``ls``", "no_call", "no command block"),
        ("```command\nls", "truncated", "the block is not closed by a line of backticks"),
        ("````command\nls\n```", "truncated", None),
        ("```command\nls\n``` x", "truncated", None),
        ("```command\nls\n```\n```command\nls\n```", "several", "more than one command block"),
        ("```command\nls\n```\n```command\nls", "several", None),
        ("```command\ncat > a.md <<E\n```python\nx\n```\nE\n```", "several", None),
        (
            "```command\ncat > a.md <<E\n```python\nx\n```\n",
            "malformed",
            "a line ```python inside the block, which then needs more backticks around it",
        ),
        ("```open\n--path 'a\n```", "malformed", "the value of --path is not one quoted text"),
        ("```open\n--path 'a'b\n```", "malformed", "the value of --path is not one quoted text"),
        ("```open\n--path\n```", "malformed", None),
        ("```open\n--path a --path b\n```", "malformed", "--path given twice"),
        ("```open\na 3\n```", "malformed", "no --NAME 'VALUE' at 'a 3'"),
    ],
)
def test_errors_say_what_was_seen(text: str, kind: str, seen: str | None) -> None:
    got = BOUND.parse(text)
    assert isinstance(got, FormatError), got
    assert got.kind == kind
    assert seen is None or got.seen == seen


def test_no_call_is_taken_from_a_message_that_was_cut() -> None:
    text = "```command\ncat > a.md <<E\n```\n"
    assert isinstance(FENCE.parse(text), ParsedAction)
    got = FENCE.parse(text, cut=True)
    assert isinstance(got, FormatError)
    assert (got.kind, got.seen) == ("truncated", "the message was cut off")
    for name in ("xml", "hermes"):  # their end mark cannot occur inside a call
        whole = FORMATS[name].render("bash", {"command": "ls"}) + " and"
        assert FORMATS[name].parse(whole, cut=True) == FORMATS[name].parse(whole)
