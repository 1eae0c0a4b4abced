"""The fenced format: blocks and labels, and command lines once it is bound to tools."""

from __future__ import annotations

import pytest

from swe_rl.agents.formats import FORMATS, FormatError, ParsedAction

FENCE = FORMATS["fence"]
BOUND = FENCE.bind(
    {
        "execute_bash": ("cmd", "command"),
        "open": ("path", "line"),
        "edit": ("lines", "text", "file"),
        "replace": ("search", "replace", "replace_all"),
        "submit": (),
    }
)


def test_plain_rendering() -> None:
    assert FENCE.render("bash", {"command": "ls\n"}) == "```command\nls\n\n```"
    assert FENCE.render("bash", {"command": "cat <<E\n```\nE"}) == "````command\ncat <<E\n```\nE\n````"
    assert FENCE.render("edit", {"path": "a b", "text": "it's\n"}) == "```edit\n--path 'a b'\n--text 'it'\\''s\n'\n```"
    assert FENCE.render("submit", {}) == "```submit\n\n```"
    assert BOUND.render("execute_bash", {"cmd": "ls"}) == "```command\nls\n```"
    assert BOUND.render("execute_bash", {"cmd": "open x"}) == "```tool execute_bash\n--cmd 'open x'\n```"
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
        ('```f\n--a 1 --b "x \\"y" --c a\' b\'c\\ d\n```', "f", {"a": "1", "b": 'x "y', "c": "a bc d"}),
        ("```f\n--flag --a '--b'\n```", "f", {"flag": "true", "a": "--b"}),
    ],
)
def test_blocks(text: str, name: str, arguments: dict[str, str]) -> None:
    got = FENCE.parse(text)
    assert isinstance(got, ParsedAction), got
    assert (got.tool_call.name, got.tool_call.arguments, got.repaired) == (name, arguments, "")


def test_a_block_without_a_label_is_flagged() -> None:
    got = FENCE.parse("So\n```\nls\n```")
    assert isinstance(got, ParsedAction)
    assert (got.tool_call.arguments, got.repaired) == ({"command": "ls"}, "a block without a label")


@pytest.mark.parametrize(
    ("body", "name", "arguments"),
    [
        ("grep -n open *.py", "execute_bash", {"cmd": "grep -n open *.py"}),
        ("opener a", "execute_bash", {"cmd": "opener a"}),
        ("open calc.py", "open", {"path": "calc.py"}),
        ("  open 'my file.py' 20\n", "open", {"path": "my file.py", "line": "20"}),
        ("open --line 3 calc.py", "open", {"path": "calc.py", "line": "3"}),
        ("submit", "submit", {}),
        ("edit 3:4 'x = 1'", "edit", {"lines": "3:4", "text": "x = 1"}),
        ("edit 3:4", "edit", {"lines": "3:4"}),
        ("edit --file a.py 3:4 <<'EOF'\n\tx = \"1\"\n\nEOF", "edit", {"file": "a.py", "lines": "3:4", "text": None}),
        ("edit 3:4 <<EOF\nEOF\n", "edit", {"lines": "3:4", "text": ""}),
        ("replace a b --replace-all", "replace", {"search": "a", "replace": "b", "replace_all": "true"}),
    ],
)
def test_command_lines_of_bound_tools(body: str, name: str, arguments: dict[str, str | None]) -> None:
    got = BOUND.parse(f"```command\n{body}\n```")
    assert isinstance(got, ParsedAction), got
    want = {key: '\tx = "1"\n' if value is None else value for key, value in arguments.items()}
    assert (got.tool_call.name, got.tool_call.arguments) == (name, want)


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
        ("```open\n--path 'a\n```", "malformed", "a quote that is not closed"),
        ("```open\n--path a --path b\n```", "malformed", "--path given twice"),
        ("```open\na\n```", "malformed", "a value without a name: 'a'"),
        ("```command\nopen a 1 2\n```", "malformed", "a value without a name: '2'"),
        ("```command\nedit 1:2 <<EOF\nx\n```", "malformed", "the here-document is not closed by a line EOF"),
        ("```command\nedit 1:2 <<EOF\nx\nEOF\nls\n```", "malformed", "text after the here-document: 'ls'"),
    ],
)
def test_errors_say_what_was_seen(text: str, kind: str, seen: str | None) -> None:
    got = BOUND.parse(text)
    assert isinstance(got, FormatError), got
    assert got.kind == kind
    assert seen is None or got.seen == seen
