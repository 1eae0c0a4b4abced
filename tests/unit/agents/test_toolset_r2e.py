"""R2E-Gym's tools on a real sandbox of each backend, one test for each rule of the published scaffold."""

from __future__ import annotations

import pytest
from tool_calls import ON_BOTH_BACKENDS, Tools, open_tools

from swe_rl.protocols import EnvStep
from swe_rl.types import StopReason

pytestmark = ON_BOTH_BACKENDS
HEAD = "Execution output of [file_editor]:\n"
LONG = "".join(
    [
        '"""Module."""\n',
        "class A:\n",
        '    """One\n    two\n    three\n    four\n    """\n',  # 3-7: five lines
        "    x = 1\n",
        "    def short(self):\n        a = 1\n        return a\n",  # 9-11
        "    def long(self):\n        a = 1\n        b = 2\n        c = 3\n        return a\n",  # 12-16
        *(f"y{i} = {i}\n" for i in range(100)),
    ]
).encode()


async def edit(tools: Tools, command: str, path: str, **arguments: str) -> str:
    got = await tools.call("file_editor", command=command, path=path, **arguments)
    assert got.startswith(HEAD)
    return got.removeprefix(HEAD)


async def test_a_directory_is_listed_two_levels_deep_without_hidden_and_foreign_files() -> None:
    files = {p: b"x" for p in ("a.py", "b.txt", ".h.py", "d/c.py", "d/n.md", "d/e/f.py", ".git2/x.py")}
    async with open_tools("r2e", files) as tools:
        assert (
            await edit(tools, "view", "/testbed")
            == "/testbed\n/testbed/a.py\n/testbed/d\n/testbed/d/c.py\n/testbed/d/e"
        )
        assert await edit(tools, "view", "d") == "/testbed/d\n/testbed/d/c.py\n/testbed/d/e\n/testbed/d/e/f.py"
        assert "/testbed/b.txt\n" in await edit(tools, "view", ".", python_only="false")
        assert (
            await edit(tools, "view", ".", view_range="[1, 2]") == "error: view_range is for files; this is a directory"
        )


async def test_view_of_a_file() -> None:
    async with open_tools("r2e", {"a.py": b"x = 1\n\ty\r\nlast", "n.txt": b"n\n", "e.py": b""}) as tools:
        assert await edit(tools, "view", "a.py") == "     1\tx = 1\n     2\t\ty\n     3\tlast"
        assert await edit(tools, "view", "/testbed/a.py", view_range="[2, -1]") == "     2\t\ty\n     3\tlast"
        assert await edit(tools, "view", "a.py", view_range="2,2") == "     2\t\ty"
        for wrong in ("[0, 2]", "[4, 5]", "[2, 1]", "[1, 4]", "[1]", "one"):
            assert (await edit(tools, "view", "a.py", view_range=wrong)).startswith("error: view_range"), wrong
        assert await edit(tools, "view", "e.py") == "e.py is empty"
        assert await edit(tools, "view", "no.py") == "error: No such file or directory"
        assert await edit(tools, "view", "n.txt") == "error: n.txt is no Python file: read it with the shell"
        assert await edit(tools, "view", "n.txt", python_only="false") == "     1\tn"


async def test_long_python_files_are_condensed_and_keep_their_line_numbers() -> None:
    async with open_tools("r2e", {"a.py": LONG, "bad.py": b"def (:\n" * 120}) as tools:
        got = (await edit(tools, "view", "a.py")).split("\n")
        assert got[:3] == ['     1\t"""Module."""', "     2\tclass A:", "       ... lines 3-7 left out ..."]
        assert got[3:7] == [
            "     8\t    x = 1",
            "     9\t    def short(self):",
            "    10\t        a = 1",
            "    11\t        return a",
        ]
        assert got[7:10] == ["    12\t    def long(self):", "       ... lines 13-16 left out ...", "    17\ty0 = 0"]
        assert got[-1] == "   116\ty99 = 99"
        assert "c = 3" in await edit(tools, "view", "a.py", concise="false")
        assert (
            await edit(tools, "view", "a.py", view_range="[13, 14]") == "    13\t        a = 1\n    14\t        b = 2"
        )
        assert (await edit(tools, "view", "bad.py")).count("\n") == 119
    async with open_tools("r2e", {"a.py": LONG[: LONG.index(b"y0")]}) as tools:
        assert "c = 3" in await edit(tools, "view", "a.py")
        assert "c = 3" not in await edit(tools, "view", "a.py", concise="true")


async def test_a_view_is_cut_at_ten_thousand_characters() -> None:
    async with open_tools("r2e", {"a.py": b"x = 1  # " + b"y" * 200 + b"\n" * 100, "b.py": b"#" * 20_000}) as tools:
        got = await edit(tools, "view", "b.py")
        assert got.startswith(
            "     1\t" + "#" * 9993 + "\n... cut after 10000 characters: find line numbers with grep -n"
        )


async def test_str_replace_wants_exactly_one_match_and_shows_the_place() -> None:
    lines = "".join(f"line {i}\n" for i in range(1, 21))
    async with open_tools("r2e", {"a.py": lines.encode()}) as tools:
        got = await edit(tools, "str_replace", "a.py", old_str="line 10\n", new_str="ten\nten and a half\n")
        shown = [line.split("\t") for line in got.split("\n")[1:]]
        assert got.startswith("edited a.py, which now reads\n")
        assert [int(number) for number, _ in shown] == list(range(6, 16))
        assert [text for _, text in shown][3:7] == ["line 9", "ten", "ten and a half", "line 11"]
        before = await tools.read("a.py")
        assert before == lines.replace("line 10\n", "ten\nten and a half\n").encode()
        assert await edit(tools, "str_replace", "a.py", old_str="line 99", new_str="x") == (
            "error: no occurrences of old_str in a.py; it must match exactly, spaces included"
        )
        got = await edit(tools, "str_replace", "a.py", old_str="line 2", new_str="x")
        assert got == "error: multiple occurrences of old_str in a.py (lines 2, 21): make it unique"
        assert await edit(tools, "str_replace", "a.py", new_str="x") == "error: str_replace needs old_str"
        assert (
            await edit(tools, "str_replace", "a.py", old_str="", new_str="x") == "error: the text to look for is empty"
        )
        assert (
            await edit(tools, "str_replace", "a.py", old_str="ten\n", new_str="ten\n")
            == "error: old and new are the same"
        )
        assert await tools.read("a.py") == before
        await edit(tools, "str_replace", "a.py", old_str="ten\n")  # without new_str it is deleted
        assert await tools.read("a.py") == before.replace(b"ten\n", b"")


async def test_insert_goes_after_the_line() -> None:
    async with open_tools("r2e", {"a.py": b"a\nb"}) as tools:
        assert await edit(tools, "insert", "a.py", insert_line="0", new_str="top") == (
            "edited a.py, which now reads\n     1\ttop\n     2\ta\n     3\tb"
        )
        await edit(tools, "insert", "a.py", insert_line="3", new_str="end\n")
        assert await tools.read("a.py") == b"top\na\nb\nend"
        await edit(tools, "insert", "a.py", insert_line="1", new_str="")
        assert await tools.read("a.py") == b"top\n\na\nb\nend"
        for line, seen in (
            ("6", "line 6 is not in the file: it has 5 lines"),
            ("-1", "line -1"),
            ("x", "whole number"),
        ):
            assert seen in await edit(tools, "insert", "a.py", insert_line=line, new_str="z")
        assert await edit(tools, "insert", "a.py", new_str="z") == "error: insert needs insert_line"


async def test_create_refuses_what_is_there_and_undo_takes_edits_back() -> None:
    async with open_tools("r2e", {"a.py": b"x = 1\n"}) as tools:
        refused = "error: a.py exists already: change it with str_replace or insert"
        assert await edit(tools, "create", "a.py", file_text="y") == refused
        assert await edit(tools, "create", "/testbed", file_text="y") == "error: /testbed is a directory"
        assert await edit(tools, "create", "new/b.py", file_text="\tb = 1\r\n\n  ") == "created new/b.py (3 lines)"
        assert await tools.read("new/b.py") == b"\tb = 1\r\n\n  "
        await edit(tools, "str_replace", "a.py", old_str="1", new_str="2")
        await edit(tools, "insert", "a.py", insert_line="0", new_str="# top")
        assert await edit(tools, "undo_edit", "a.py") == "took back the last edit of a.py (1 line)"
        assert await tools.read("a.py") == b"x = 2\n"
        await edit(tools, "undo_edit", "a.py")
        assert await tools.read("a.py") == b"x = 1\n"
        assert await edit(tools, "undo_edit", "a.py") == "error: no edit of a.py to take back"
        assert await edit(tools, "undo_edit", "new/b.py") == "removed new/b.py, which was created here"
        assert "No such file" in await edit(tools, "view", "new/b.py")


async def test_edits_keep_every_other_byte() -> None:
    odd = b"\xef\xbb\xbfa\t=\t1\r\nb = '\xe9'\r\n\x0c\r\nc\t= 3"
    async with open_tools("r2e", {"a.py": odd}) as tools:
        await edit(tools, "str_replace", "a.py", old_str="c\t= 3", new_str="c\t= 4\nd\t= 5")
        assert await tools.read("a.py") == odd[:-5] + b"c\t= 4\r\nd\t= 5"
        await edit(tools, "insert", "a.py", insert_line="1", new_str="\tn")
        assert await tools.read("a.py") == odd[:10] + b"\tn\r\n" + odd[10:-5] + b"c\t= 4\r\nd\t= 5"


async def test_linting_refuses_new_syntax_errors_only() -> None:
    async with open_tools("r2e", {"a.py": b"x = 1\n", "bad.py": b"def (\n"}) as tools:
        got = await edit(tools, "str_replace", "a.py", old_str="1", new_str="(", enable_linting="true")
        assert got.startswith("error: nothing was changed, because the file would have a syntax error in line 1: ")
        assert await tools.read("a.py") == b"x = 1\n"
        await edit(tools, "str_replace", "a.py", old_str="1", new_str="(")
        assert await tools.read("a.py") == b"x = (\n"
        await edit(tools, "insert", "bad.py", insert_line="0", new_str="y", enable_linting="true")
        assert await tools.read("bad.py") == b"y\ndef (\n"


async def test_execute_bash_shows_exit_code_and_both_streams() -> None:
    async with open_tools("r2e", command_s=1.0) as tools:
        bash = "Execution output of [execute_bash]:\n"
        assert await tools.call("execute_bash", cmd="echo out; echo err >&2") == (
            f"Exit code: 0\n{bash}[STDOUT]\nout\n[STDERR]\nerr"
        )
        assert await tools.call("execute_bash", command="true") == f"Exit code: 0\n{bash}[STDOUT]\n[STDERR]"
        assert await tools.call("execute_bash", cmd="echo o; exit 3") == (
            f"Exit code: Error: Exit code 3\n{bash}The command failed\n[STDOUT]\no\n[STDERR]"
        )
        got = await tools.call("execute_bash", cmd="echo begun; sleep 50")
        assert (
            got == f"Exit code: -1\n{bash}[STDOUT]\nbegun\n[STDERR]\nThe command took too long: it was killed after 1 s"
        )
        got = await tools.call("execute_bash", cmd="printf '\\033[31mred\\033[0m\\r\\n'")
        assert got == f"Exit code: 0\n{bash}[STDOUT]\nred\n[STDERR]"


async def test_execute_bash_has_no_memory_and_refuses_first_words_only() -> None:
    async with open_tools("r2e", {"d/a": b""}) as tools:
        await tools.call("execute_bash", cmd="cd d; export X=1")
        assert "[STDOUT]\n/testbed:\n" in await tools.call("execute_bash", cmd="echo $PWD:$X")
        for word in ("git log", "ipython", "jupyter lab", "nohup sleep 1 &"):
            got = await tools.call("execute_bash", cmd=word)
            assert got.startswith("Exit code: -1\nExecution output of [execute_bash]:\nerror: "), word
        for word in ("cd d", "pip install x", "ipython"):
            assert "is not allowed here" in await tools.call("execute_bash", command=word)
        assert "git version" in await tools.call("execute_bash", cmd="cd d && git --version")
        assert "git version" in await tools.call("execute_bash", command="git --version")
        assert "needs cmd" in await tools.call("execute_bash")
        assert "needs cmd" in await tools.call("execute_bash", cmd="ls", command="ls")


async def test_long_command_output_keeps_forty_lines_at_each_end() -> None:
    async with open_tools("r2e") as tools:
        got = (await tools.call("execute_bash", cmd="seq 1 200")).split("\n")
        assert len(got) == 2 + 81
        assert got[2:5] == ["[STDOUT]", "1", "2"]
        assert got[42].startswith("... 122 lines left out")
        assert got[-2:] == ["200", "[STDERR]"]


async def test_search_counts_by_file_and_lists_lines_of_one_file() -> None:
    head = "Execution output of [search]:\n"
    files = {"a.py": b"key\nx key\n", "d/b.py": b"k.y\nkey", "c.txt": b"key\n", ".hid.py": b"key", ".d/e.py": b"key"}
    async with open_tools("r2e", files) as tools:
        assert await tools.call("search", search_term="key") == (
            f"{head}3 matches for 'key' in /testbed:\n/testbed/a.py (2 matches)\n/testbed/d/b.py (1 match)"
        )
        assert "c.txt (1 match)" in await tools.call("search", search_term="key", python_only="false")
        assert await tools.call("search", search_term="k.y", path="d") == (
            f"{head}1 matches for 'k.y' in /testbed/d:\n/testbed/d/b.py (1 match)"
        )
        got = await tools.call("search", search_term="key", path="a.py")
        assert got == f"{head}matches for 'key' in /testbed/a.py:\n1:key\n2:x key"
        assert (
            await tools.call("search", search_term="-n'\"$(x)", path=".")
            == f"{head}no matches for '-n\\'\"$(x)' in /testbed"
        )
        assert await tools.call("search", search_term="key", path="no") == f"{head}error: there is no /testbed/no"
        for term in ("", "a\nb"):
            assert (await tools.call("search", search_term=term)).startswith(f"{head}error: the search term")


async def test_search_with_too_many_files_asks_to_narrow() -> None:
    async with open_tools("r2e", {}) as tools:
        await tools.call("execute_bash", cmd="for i in $(seq 1 101); do echo key > f$i.py; done")
        assert "error: more than 100 files match 'key'" in await tools.call("search", search_term="key")
        await tools.call("execute_bash", cmd="rm f1.py")
        assert "100 matches" in await tools.call("search", search_term="key")


@pytest.mark.parametrize(("name", "arguments"), [("finish", {"command": "submit", "result": "x"}), ("submit", {})])
async def test_finish_ends_the_episode(name: str, arguments: dict[str, str]) -> None:
    async with open_tools("r2e", {}) as tools:
        got = await tools.step(name, **arguments)
        assert got == EnvStep(observation="", done=True, stop_reason=StopReason.SUBMITTED)


async def test_mistakes_name_the_cure() -> None:
    async with open_tools("r2e") as tools:
        assert await tools.call("grep") == "error: no tool grep; use file_editor, execute_bash, search, finish"
        assert await tools.call("file_editor", command="view") == "error: file_editor needs path"
        assert await tools.call("search", search_term="x", regex="y") == "error: search has no parameter regex"
        assert await edit(tools, "delete", "calc.py") == (
            "error: no command delete; use view, create, str_replace, insert, undo_edit"
        )
        got = await tools.call("file_editor", command="view", path="\ud800")
        assert got == "error: path holds half a surrogate pair, which is no text"
