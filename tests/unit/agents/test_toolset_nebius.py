"""The windowed tools of arXiv:2508.03501 on real sandboxes of both backends: commands, calls, shell state."""

from __future__ import annotations

import pytest
from tool_calls import ON_BOTH_BACKENDS, Tools, open_tools

from swe_rl.agents.observation import ToolError
from swe_rl.agents.toolsets.command_line import parse_command
from swe_rl.protocols import EnvStep
from swe_rl.types import StopReason

pytestmark = ON_BOTH_BACKENDS
NUMBERS = "".join(f"l{i}\n" for i in range(1, 301)).encode()


async def run(tools: Tools, command: str) -> list[str]:
    """The lines of the observation of a command, without the prompt line."""
    got = await tools.call("bash", command=command)
    text, _, prompt = got.rpartition("\n")
    assert prompt.startswith("(Current directory: ")
    assert prompt.endswith(") bash-$")
    return text.split("\n")


async def test_open_shows_the_first_hundred_lines() -> None:
    async with open_tools("nebius", {"n.txt": NUMBERS}) as tools:
        got = await run(tools, "open n.txt")
        assert got[0] == "[File: /testbed/n.txt (300 lines total)]"
        assert got[1:3] == ["1:l1", "2:l2"]
        assert got[-2:] == ["100:l100", "(200 more lines below)"]
        prompt = (await tools.call("open", file="n.txt")).split("\n")[-1]
        assert prompt == "(Current directory: /testbed, current file: /testbed/n.txt) bash-$"


async def test_open_and_goto_put_the_line_a_sixth_below_the_edge() -> None:
    async with open_tools("nebius", {"n.txt": NUMBERS}) as tools:
        got = await run(tools, "open n.txt 120")
        assert got[1:3] == ["(104 more lines above)", "105:l105"]
        assert got[-2:] == ["204:l204", "(96 more lines below)"]
        assert got[2 + 15] == "120:l120"  # the 16th of 100 lines
        assert (await run(tools, "goto 150"))[2] == "135:l135"
        assert (await run(tools, "goto 3"))[1] == "1:l1"
        assert (await run(tools, "goto 300"))[-1] == "300:l300"
        assert len(await run(tools, "goto 300")) == 102


async def test_scrolling_keeps_two_lines_and_warns_after_three() -> None:
    async with open_tools("nebius", {"n.txt": NUMBERS}) as tools:
        await run(tools, "open n.txt")
        assert (await run(tools, "scroll_down"))[2] == "99:l99"
        assert (await run(tools, "scroll_down"))[2] == "197:l197"
        got = await run(tools, "scroll_down")
        assert got[2] == "201:l201"  # the window never leaves the file
        assert got[-1] == "3 scrolls in a row: search_file finds a place sooner, goto goes to a line."
        assert (await run(tools, "goto 201"))[-1] != got[-1]
        assert (await run(tools, "scroll_up"))[2] == "88:l88"
        assert (await tools.call("scroll_up")).split("\n")[1] == "1:l1"


async def test_search_file() -> None:
    async with open_tools("nebius", {"n.txt": NUMBERS, "b.txt": b"a.b\naxb\n"}) as tools:
        assert await run(tools, "search_file l1") == ["error: no file is open: open one first"]
        assert await run(tools, "search_file a.b b.txt") == [
            "1 matches for 'a.b' in /testbed/b.txt:",
            "Line 1: a.b",
            "End of the matches",
        ]
        await run(tools, "open n.txt")
        assert (await run(tools, "search_file l300"))[1] == "Line 300: l300"
        assert await run(tools, "search_file 'no such'") == ["no matches for 'no such' in /testbed/n.txt"]
        assert "narrow" in (await run(tools, "search_file l"))[0]


async def test_create_writes_one_newline_and_opens_the_file() -> None:
    async with open_tools("nebius", {"a.py": b"x\n"}) as tools:
        assert await run(tools, "create new/b.py") == ["[File: /testbed/new/b.py (1 lines total)]", "1:"]
        assert await tools.read("new/b.py") == b"\n"
        assert tools.workspace.open_file is not None
        assert await run(tools, "create a.py") == ["error: /testbed/a.py exists already: open it"]
        assert await tools.read("a.py") == b"x\n"


async def test_edit_replaces_an_inclusive_range() -> None:
    async with open_tools("nebius", {"n.txt": b"a\r\nb\r\nc\r\nd", "p.py": b"def f():\n\treturn 1\n"}) as tools:
        assert await run(tools, "edit 1:1 x") == ["error: no file is open: open one first"]
        await run(tools, "open n.txt")
        got = await run(tools, "edit 2:3 <<'EOF'\n  one \"two\" $three\n\nlast\nEOF")
        assert got[1:-1] == ["1:a", '2:  one "two" $three', "3:", "4:last", "5:d"]
        assert got[-1].startswith("Edited. Review")
        assert await tools.read("n.txt") == b'a\r\n  one "two" $three\r\n\r\nlast\r\nd'
        await run(tools, "edit 2:4")  # no text deletes
        assert await tools.read("n.txt") == b"a\r\nd"
        await run(tools, 'edit 2:2 "x\ny"')
        assert await tools.read("n.txt") == b"a\r\nx\r\ny"
        await run(tools, "edit --file p.py 2:2 <<EOF\n\treturn 2\nEOF")
        assert await tools.read("p.py") == b"def f():\n\treturn 2\n"
        assert tools.workspace.open_file is not None
        assert tools.workspace.open_file.path == "/testbed/p.py"
        await tools.call("edit", first="1", last="1", text="def g():", file="p.py")
        assert await tools.read("p.py") == b"def g():\n\treturn 2\n"
        assert await run(tools, "edit 2:9 x") == ["error: lines 2:9 are not in the file: it has 2 lines"]


async def test_edit_that_breaks_the_syntax_is_refused_with_both_versions() -> None:
    async with open_tools("nebius", {"p.py": b"a = 1\nb = 2\n", "bad.py": b"def (\nx\n"}) as tools:
        await run(tools, "open p.py")
        got = await run(tools, "edit 2:2 'b = ('")
        assert got[0].startswith("error: nothing was changed, because of a syntax error in line 2: ")
        assert got[1:] == [
            "Your edit would have given",
            "1:a = 1",
            "2:b = (",
            "The file still reads",
            "1:a = 1",
            "2:b = 2",
        ]
        assert await tools.read("p.py") == b"a = 1\nb = 2\n"
        await run(tools, "edit --file bad.py 2:2 y")  # was broken before
        assert await tools.read("bad.py") == b"def (\ny\n"


async def test_replace() -> None:
    async with open_tools("nebius", {"a.txt": b"x y x\nz\n"}) as tools:
        assert await run(tools, "replace a b") == ["error: no file is open: open one first"]
        await run(tools, "open a.txt")
        assert await run(tools, "replace q b") == ["error: the text does not occur in /testbed/a.txt"]
        assert "occurs 2 times (lines 1, 1)" in (await run(tools, "replace x b"))[0]
        assert (await run(tools, "replace --replace-all x 'b b'"))[-1].startswith("Replaced 2 times.")
        assert await tools.read("a.txt") == b"b b y b b\nz\n"
        await tools.call("replace", search="y b", replacement="Y")
        assert await tools.read("a.txt") == b"b b Y b\nz\n"


async def test_shell_commands_carry_directory_and_exports() -> None:
    async with open_tools("nebius", {"d/a.txt": b"in d\n"}, command_s=1.0) as tools:
        assert await run(tools, 'cd d && export A="x\'y\nz" && B=1') == ["exit 0"]
        assert await run(tools, 'cat a.txt; echo "$A|$B"') == ["in d", "x'y", "z|"]
        assert (await tools.call("open", file="a.txt")).startswith("[File: /testbed/d/a.txt")
        assert (await run(tools, "false"))[-1] == "exit 1"
        assert (await run(tools, "exit 7"))[-1] == "exit 7"
        assert (await run(tools, "cd /; sleep 9"))[-1] == "timeout: killed after 1 s"  # killed: the state stays
        assert await run(tools, "pwd") == ["/testbed/d"]
        assert await run(tools, "rmdir ../d/x; rm -r ../d; pwd") == [
            "/testbed/d",
            "rmdir: failed to remove '../d/x': No such file or directory",
        ]
        assert await run(tools, "pwd") == ["/testbed"]  # where it was is gone
        assert "line 1: nosuch: command not found" in (await run(tools, "nosuch"))[0]
        assert await run(tools, "export BIG=$(head -c 5000 /dev/zero | tr '\\0' b); cd /tmp") == ["exit 0"]
        assert await run(tools, "echo ${#BIG}; pwd") == ["0", "/tmp"]  # too much to carry: only the directory
        assert await run(tools, "exec >&-; cd /") == ["exit 0"]
        assert await run(tools, "cat <<X\nopen\nX") == ["open"]


async def test_submit_and_mistakes() -> None:
    async with open_tools("nebius") as tools:
        assert await tools.step("bash", command="submit") == EnvStep(
            observation="", done=True, stop_reason=StopReason.SUBMITTED
        )
        assert (await tools.step("submit")).stop_reason is StopReason.SUBMITTED
        assert await run(tools, "open no.py") == ["error: there is no /testbed/no.py"]
        assert await run(tools, "open .") == ["error: /testbed is a directory: list it with ls"]
        assert await run(tools, "open calc.py 9") == ["error: line 9 is not in the file: it has 2 lines"]
        assert await run(tools, "goto 2") == ["error: no file is open: open one first"]
        assert (await tools.call("jump")).split("\n")[-1].startswith("(Current directory:")


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ("ls -l", None, {}),
        ("", None, {}),
        ("opener x", None, {}),
        ("  open 'a b.py' 3\n", "open", {"file": "a b.py", "line": "3"}),
        ("scroll_up", "scroll_up", {}),
        ("edit 1:2 ''", "edit", {"first": "1", "last": "2", "text": ""}),
        ("edit 1:2 <<E\n\tx\n<<E\n E\nE", "edit", {"first": "1", "last": "2", "text": "\tx\n<<E\n E\n"}),
        ("edit 1:2 <<E\nE\n\n", "edit", {"first": "1", "last": "2", "text": ""}),
        ("replace 'a\nb' ''", "replace", {"search": "a\nb", "replacement": ""}),
        ("replace a b --replace-all", "replace", {"search": "a", "replacement": "b", "replace_all": "true"}),
    ],
)
def test_command_language(text: str, name: str | None, arguments: dict[str, str]) -> None:
    call = parse_command(text)
    assert (call and call.name) == name
    assert call is None or call.arguments == arguments


@pytest.mark.parametrize(
    "text",
    ["open", "open a b c", "open a.py && ls", "goto", "submit now", "edit x", "edit 1-2 y", "edit 1:2 a b",
     "edit --file", "edit 1:2 <<E\nx", "edit 1:2 <<E\nx\nE\nls", "replace a", "search_file", "open 'a", "create a b"],
)  # fmt: skip
def test_command_language_says_how_to_write_it(text: str) -> None:
    with pytest.raises(ToolError, match=text.split()[0]):
        parse_command(text)
