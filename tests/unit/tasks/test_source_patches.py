"""Reading and reversing of diffs, against git."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from swe_rl.tasks.sources.patch_paths import file_changes, hidden_test_files
from swe_rl.tasks.sources.reverse_patch import NotReversible, reverse_patch

OLD = {
    "a.py": b"one\ntwo\nthree\nfour\nfive\nsix\nseven\neight\nnine\nten\n",
    "no_newline.txt": b"last line",
    "gone.py": b"x = 1\n-- a/fake header\n++ b/fake header\n",
    "moved/from.py": b"".join(b"line %d\n" % n for n in range(30)),
    "script.sh": b"#!/bin/sh\n",
    "crlf.txt": b"a\r\nb\r\nc\r\n",
    "empty.txt": b"",
    "with space.py": b"v = 1\n",
    "\u00fcml\u00e4ut.py": b"w = 1\n",
}
NEW = {
    "a.py": b"one\nTWO\nthree\nfour\nfive\nsix\nseven\neight\nnine and a half\nten\neleven\n",
    "no_newline.txt": b"last line\nand one more without",
    "fresh.py": b"y = 2\n",
    "moved/to.py": b"".join(b"line %d\n" % n for n in range(29)) + b"changed\n",
    "script.sh": b"#!/bin/sh\n",
    "crlf.txt": b"a\r\nB\r\nc\r\n",
    "now_empty.txt": b"",
    "with space.py": b"v = 2\n",
    "\u00fcml\u00e4ut.py": b"w = 2\n",
}


def git(folder: Path, *arguments: str, **options) -> bytes:
    environment = {**os.environ, "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_CONFIG_SYSTEM": "/dev/null"}
    command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", "-c", "core.autocrlf=false", *arguments]
    return subprocess.run(command, cwd=folder, check=True, capture_output=True, env=environment, **options).stdout


@pytest.fixture(scope="module")
def repository(tmp_path_factory) -> Path:
    """HEAD~1 has OLD, HEAD has NEW (with script.sh made executable)."""
    folder = tmp_path_factory.mktemp("repository")
    git(folder, "init", "-q")
    for files in (OLD, NEW):
        for path in folder.rglob("*"):
            if path.is_file() and ".git" not in path.parts:
                path.unlink()
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_bytes(content)
        if files is NEW:
            (folder / "script.sh").chmod(0o755)
        git(folder, "add", "-A")
        git(folder, "commit", "-qm", "c")
    return folder


@pytest.mark.parametrize("options", [(), ("-M",), ("-U0",), ("--no-prefix",), ("-c", "core.quotePath=false")])
def test_the_reverse_takes_the_new_tree_to_the_old_one(repository, tmp_path, options):
    config = list(options) if options[:1] == ("-c",) else []
    flags = [] if config else list(options)
    diff = git(repository, *config, "diff", "--full-index", *flags, "HEAD~1", "HEAD")
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    apply = ["apply", "--whitespace=nowarn", "--index", *(["--unidiff-zero"] if "-U0" in options else [])]
    apply += ["-p0"] if "--no-prefix" in options else []
    git(copy, *apply, "-", input=reverse_patch(diff))
    assert git(copy, "write-tree").strip() == git(repository, "rev-parse", "HEAD~1^{tree}").strip()


def test_reversing_twice_applies_like_the_patch_itself(repository, tmp_path):
    diff = git(repository, "diff", "--full-index", "-M", "HEAD~1", "HEAD")
    copy = tmp_path / "copy"
    git(tmp_path, "clone", "-q", str(repository), str(copy))
    git(copy, "checkout", "-q", "HEAD~1")
    git(copy, "apply", "--index", "--whitespace=nowarn", "-", input=reverse_patch(reverse_patch(diff)))
    assert git(copy, "write-tree").strip() == git(repository, "rev-parse", "HEAD^{tree}").strip()


def test_changes_are_those_that_git_counts(repository):
    diff = git(repository, "diff", "-M", "HEAD~1", "HEAD")
    counted = {}
    for line in git(repository, "diff", "-M", "-z", "--numstat", "HEAD~1", "HEAD").decode().split("\0"):
        parts = line.split("\t")
        if len(parts) == 3 and parts[2]:
            counted[parts[2]] = (int(parts[0]), int(parts[1]))
    ours = {change.path: (change.added, change.removed) for change in file_changes(diff)}
    assert {name: ours[name] for name in counted} == counted
    by_path = {change.path: change for change in file_changes(diff)}
    assert by_path["gone.py"].new_path is None
    assert by_path["fresh.py"].old_path is None
    assert by_path["moved/to.py"].old_path == "moved/from.py"
    assert {"\u00fcml\u00e4ut.py", "with space.py", "script.sh", "now_empty.txt"} <= set(by_path)


def test_diffs_without_git_headers():
    plain = (
        b"--- a/x.py\t2020-01-01\n+++ b/x.py\n@@ -1 +1 @@\n-a\n+b\n--- a/y.py\n+++ b/y.py\n@@ -1,2 +1 @@\n-- a/z\n c\n"
    )
    assert [(c.path, c.added, c.removed) for c in file_changes(plain)] == [("x.py", 1, 1), ("y.py", 0, 1)]
    assert file_changes(b"no diff\n") == []
    assert file_changes(b"") == []


def test_test_files_are_those_left_behind_without_data(repository):
    patch = b"".join(
        b"diff --git a/%s b/%s\n--- a/%s\n+++ %s\n@@ -1 +1 @@\n-a\n+b\n" % (name, name, name, new)
        for name, new in ((b"tests/t.py", b"b/tests/t.py"), (b"tests/d.json", b"b/tests/d.json"),
                          (b"tests/old.py", b"/dev/null"), (b"README.md", b"b/README.md"))
    )  # fmt: skip
    assert hidden_test_files(patch) == ("tests/t.py",)


@pytest.mark.parametrize(
    ("patch", "message"),
    [
        (b"", "changes nothing"),
        (b"words\n", "changes nothing"),
        (b"diff --git a/x b/x\nGIT binary patch\nliteral 0\n", "binary"),
        (b"diff --git a/x b/x\nBinary files a/x and b/x differ\n", "binary"),
        (b"diff --git a/x b/y\ncopy from x\ncopy to y\n", "copied"),
        (b"--- a/x\n+++ b/x\n@@ -1,3 +1,3 @@\n a\n", "shorter than its header|none of blank"),
        (b"--- a/x\n+++ b/x\n@@ -1,2 +1,2 @@\n a\n?b\n", "none of blank"),
    ],
)
def test_what_cannot_be_reversed(patch, message):
    with pytest.raises(NotReversible, match=message):
        reverse_patch(patch)
