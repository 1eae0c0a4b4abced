"""The reader of diffs agrees with `git apply`, and each trick of a patch is dropped."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from swe_rl.errors import PatchError
from swe_rl.rewards import filter_patch
from swe_rl.rewards.diff import split_patch

SOURCE = b"diff --git a/pkg/m.py b/pkg/m.py\n--- a/pkg/m.py\n+++ b/pkg/m.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n"


def new_file(path: str, text: str = "x = 1\n", *, mode: str = "100644") -> bytes:
    lines = text.splitlines(keepends=True)
    body = "".join("+" + line for line in lines) + ("" if text.endswith("\n") else "\n\\ No newline at end of file\n")
    head = f"diff --git a/{path} b/{path}\nnew file mode {mode}\n--- /dev/null\n+++ b/{path}\n"
    return f"{head}@@ -0,0 +1,{len(lines)} @@\n{body}".encode()


def edit(path: str) -> bytes:
    return SOURCE.replace(b"pkg/m.py", path.encode())


TAMPER = {
    "conftest": new_file("conftest.py"),
    "nested conftest": new_file("pkg/sub/conftest.py"),
    "pytest.ini": new_file("pytest.ini"),
    "tox.ini": edit("tox.ini"),
    "setup.cfg": edit("setup.cfg"),
    "pyproject": edit("pyproject.toml"),
    "sitecustomize": new_file("sitecustomize.py"),
    "pth": new_file("pkg/evil.pth"),
    "entry point": new_file("evil.dist-info/entry_points.txt"),
    "egg-info": new_file("evil.egg-info/PKG-INFO"),
    "existing test": edit("tests/test_m.py"),
    "test in package": edit("pkg/tests/test_m.py"),
    "deleted test": b"diff --git a/test_a.py b/test_a.py\ndeleted file mode 100644\n"
    b"--- a/test_a.py\n+++ /dev/null\n@@ -1 +0,0 @@\n-x\n",
    "renamed test": b"diff --git a/test_a.py b/a.py\nsimilarity index 100%\nrename from test_a.py\nrename to a.py\n",
    "mode of test": b"diff --git a/tests/a.py b/tests/a.py\nold mode 100644\nnew mode 100755\n",
    "hidden file": new_file("checks/secret.py"),
    "file instead of hidden folder": new_file("checks", "../elsewhere", mode="120000"),
    "folder instead of hidden file": new_file("checks/secret.py/x.py"),
    "link to tests": new_file("pkg/here", "../tests", mode="120000"),
    "link outside": new_file("pkg/here", "../../etc/passwd", mode="120000"),
    "absolute link": new_file("pkg/here", "/proc/self/environ", mode="120000"),
    "submodule": new_file("vendored", "Subproject commit 0", mode="160000"),
    "shadowed pytest": new_file("pytest.py"),
    "shadowed framework": new_file("_pytest/__init__.py"),
    "shadowed stdlib": new_file("src/json.py"),
    "quoted name": b'diff --git "a/conftest.p\\171" "b/conftest.p\\171"\nnew file mode 100644\n--- /dev/null\n'
    b'+++ "b/conftest.p\\171"\n@@ -0,0 +1 @@\n+x\n',
    "shadowed pytest without a header of Git's": b"--- /dev/null\n+++ b/pytest.py\n@@ -0,0 +1 @@\n+x = 1\n",
    "moved over the standard library": b"diff --git a/pkg/m.py b/json.py\nsimilarity index 100%\n"
    b"rename from pkg/m.py\nrename to json.py\n",
    "copied over the test framework": b"diff --git a/pkg/m.py b/src/_pytest/__init__.py\nsimilarity index 100%\n"
    b"copy from pkg/m.py\ncopy to src/_pytest/__init__.py\n",
    "start-up code as a package": new_file("sitecustomize/__init__.py"),
    "attributes": new_file(".gitattributes"),
}


@pytest.mark.parametrize("name", TAMPER)
def test_tampering_is_dropped_and_counted(name: str) -> None:
    result = filter_patch(SOURCE + TAMPER[name] + edit("pkg/n.py"), hidden=["checks/secret.py"], existing=["pkg/m.py"])
    assert result.patch == SOURCE + edit("pkg/n.py")
    assert result.tamper == 1
    assert result.kept == (b"pkg/m.py", b"pkg/n.py")


@pytest.mark.parametrize("path", ["tests/test_mine.py", "test_repro.py", "pkg/__pycache__/m.cpython-311.pyc"])
def test_own_tests_and_junk_are_dropped_without_blame(path: str) -> None:
    result = filter_patch(SOURCE + new_file(path))
    assert (result.patch, result.tamper, result.dropped) == (SOURCE, 0, (path.encode(),))


@pytest.mark.parametrize(
    "part",
    [
        new_file("pkg/latest.py"),  # contains "test" but is none
        new_file("contest.py"),
        new_file("pkg/json.py"),  # not top level
        new_file("json/helper.py"),
        new_file("pkg/link", "m.py", mode="120000"),
        b"diff --git a/pkg/e b/pkg/e\nnew file mode 100644\nindex 0000000..e69de29\n",
        b"diff --git a/a b c/x y b/a b c/x y\nold mode 100644\nnew mode 100755\n",
    ],
)
def test_ordinary_changes_stay(part: bytes) -> None:
    assert filter_patch(part + SOURCE, existing=["pkg/m.py"]).patch == part + SOURCE


def test_package_named_like_the_standard_library_may_be_edited() -> None:
    part = new_file("json/__init__.py")
    assert filter_patch(part, existing=["json/tool.py", "json/__init__.py"]).tamper == 0
    assert filter_patch(part, existing=["pkg/m.py"]).tamper == 1


@pytest.mark.parametrize(
    "smuggled",
    [
        b"--- a/conftest.py 2020-01-01 00:00:00 +0000\n+++ b/conftest.py 2020-01-01 00:00:00 +0000\n"
        b"@@ -0,0 +1 @@\n+x\n",
        b"garbage before\n--- a/conftest.py\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n",
        b"diff --git a/x b/x\n--- a/x\n+++ b/x\n@@ -1,5 +1 @@\n-x\n+x\n",
        b"diff --git a/../x b/../x\nnew file mode 100644\n--- /dev/null\n+++ b/../x\n@@ -0,0 +1 @@\n+x\n",
        b"diff --git a/x b/x\nGIT binary patch\nliteral 3\nKcmZ\n",
        b"diff --git a/x b/x\n--- a/x\n+++ b/x\nBinary files differ\n",
        b"diff --git a/x b/x\nold mode 100644\nnew mode 100755",
    ],
)
def test_what_is_not_understood_is_refused(smuggled: bytes) -> None:
    with pytest.raises(PatchError) as caught:
        filter_patch(SOURCE + smuggled)
    assert caught.value.reason == "malformed"


def test_part_without_git_header_is_seen() -> None:
    plain = b"--- a/conftest.py\n+++ b/conftest.py\n@@ -0,0 +1 @@\n+x\n"
    assert filter_patch(SOURCE + plain).patch == SOURCE


PARTS = [SOURCE, b"garbage\n", b"@@ -1 +1 @@\n", b"\n"]
PARTS += [part for name, part in TAMPER.items() if "link" not in name]  # a link's target may be cut to a harmless one


@given(st.lists(st.sampled_from(PARTS), max_size=5), st.data())
def test_no_accepted_patch_touches_a_protected_path_for_git(parts: list[bytes], data: st.DataObject) -> None:
    """`git apply --numstat` is the judge: whatever passes the filter names no protected file."""
    patch = b"".join(parts)
    if patch and data.draw(st.booleans()):  # cut or repeat somewhere
        at = data.draw(st.integers(0, len(patch)))
        patch = patch[:at] + data.draw(st.sampled_from([b"", b"\n", b"+", SOURCE])) + patch[at:]
    try:
        kept = filter_patch(patch, hidden=["checks/secret.py"]).patch
    except PatchError:
        return
    if not kept:
        return
    shown = subprocess.run(["git", "apply", "--numstat", "-z", "-"], input=kept, capture_output=True, cwd="/")
    if shown.returncode == 0:
        touched = {line.split(b"\t")[-1] for line in shown.stdout.split(b"\0") if line}
        assert touched <= {b"pkg/m.py"}


def test_split_agrees_with_git_on_a_real_diff(tmp_path: Path) -> None:
    run = lambda *a: subprocess.run(["git", *a], cwd=tmp_path, check=True, capture_output=True).stdout  # noqa: E731
    run("init", "-q", ".")
    names = ["a b", 'q"uote', "tab\tname", "pkg/dé", "- x", "+++ b", "diff --git a"]
    for i, name in enumerate(names):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(
            b"+++ b/x\n--- a/x\n@@ -1 +1 @@\ndiff --git a/y b/y\n" + bytes([i, 0] * (i % 2) * 40)
        )
    run("add", "-A")
    patch = run("diff", "--cached", "--binary", "--full-index", "--no-renames")
    assert {part.paths for part in split_patch(patch)} == {(name.encode(),) for name in names}
    assert b"".join(part.data for part in split_patch(patch)) == patch
