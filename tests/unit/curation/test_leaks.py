"""What counts as the answer, and where the scan inside a sandbox finds it."""

from __future__ import annotations

import bz2
import io
import json
import os
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import gate_tasks as built
import pytest

from swe_rl.curation import leaks
from swe_rl.curation.leaks import changed_modules, gold_blocks, tree_leak

SCRIPT = Path(leaks.__file__).parent / "leaks_inside" / "scan.py"
FIXED_LINE = "    return total / len(values)"


def scan(root: Path, *, blocks: dict[str, list[str]] | None = None, copies: tuple[str, ...] = ()) -> dict:
    task = built.make("one")
    wanted = blocks or {block.name: list(block.lines) for block in gold_blocks(task, context=1)}
    request = {"blocks": list(map(list, wanted.items())), "copies": list(copies), "roots": [str(root)], "except": []}
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(SCRIPT)], input=json.dumps(request).encode(), capture_output=True, timeout=60
    )
    assert done.returncode == 0, done.stderr.decode()
    assert not done.stderr
    return json.loads(done.stdout)


def git(where: Path, *args: str, text: str | None = None) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(where), "GIT_CONFIG_NOSYSTEM": "1"}
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
    done = subprocess.run(
        ["git", *who, *args], cwd=where, env=env, check=True, capture_output=True, text=True, input=text
    )
    return done.stdout.strip()


def test_blocks_are_the_repaired_lines_with_neighbours() -> None:
    task = built.make("one")
    (block,) = gold_blocks(task, context=1)
    assert block.name == "pkg/stats.py:5"
    assert block.lines == ("    total = sum(value * value for value in values)", FIXED_LINE, "")
    (whole,) = gold_blocks(task, context=3)
    assert len(whole.lines) == 7
    deletion = replace(
        task, gold_patch=b"--- a/m.py\n+++ b/m.py\n@@ -1,3 +1,2 @@\n before_the_line = 1\n-gone = 2\n after_it = 3\n"
    )
    assert [b.lines for b in gold_blocks(deletion, context=1)] == [("before_the_line = 1", "after_it = 3")]
    in_tests = replace(task, gold_patch=task.gold_patch.replace(b"pkg/stats.py", b"tests/test_stats.py"))
    assert gold_blocks(in_tests, context=1) == []
    assert gold_blocks(replace(task, gold_patch=b"@@ nonsense @@\n"), context=1) == []
    assert gold_blocks(replace(task, gold_patch=b""), context=1) == []
    short = replace(task, gold_patch=b"--- a/m.py\n+++ b/m.py\n@@ -1 +1 @@\n-x = 1\n+x = 2\n")
    assert gold_blocks(short, context=1) == [], "a line like any other"


def test_changed_modules_are_named_below_their_source_root() -> None:
    task = built.make("one")
    assert changed_modules([task]) == ["pkg/stats.py"]
    in_src = replace(task, gold_patch=task.gold_patch.replace(b"pkg/stats.py", b"src/pkg/stats.py"))
    assert changed_modules([task, in_src]) == ["pkg/stats.py"]
    alone = replace(task, gold_patch=task.gold_patch.replace(b"pkg/stats.py", b"stats.py"))
    assert changed_modules([alone]) == [], "a bare name says too little"


def test_the_base_tree_may_not_have_the_answer() -> None:
    assert tree_leak(built.make("one")) == ""
    assert "docs/notes.txt" in tree_leak(built.make("one", tree={"docs/notes.txt": built.FIXED}))
    windows = built.FIXED.replace(b"\n", b"\r\n")
    assert "copy.py" in tree_leak(built.make("one", tree={"copy.py": windows}))
    assert tree_leak(built.make("one", tree={"other.py": FIXED_LINE.encode() + b"\n"})) == "", "one line is no answer"


def test_a_scan_of_files_and_archives(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_bytes(built.FIXED)
    (tmp_path / "buggy.py").write_bytes(built.BUGGY)
    (tmp_path / "elf").write_bytes(b"\x7fELF" + built.FIXED)
    (tmp_path / "link.py").symlink_to("plain.py")
    (tmp_path / "dangling").symlink_to("/nowhere")
    os.mkfifo(tmp_path / "pipe")
    wheel = io.BytesIO()
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as bundle:
        bundle.writestr("pkg/other.py", built.FIXED)
    (tmp_path / "w.whl").write_bytes(wheel.getvalue())
    (tmp_path / "cached.body").write_bytes(b"cc=4,\x88\xa8response" + wheel.getvalue())
    for suffix, mode in (("tar", "w"), ("tgz", "w:gz"), ("tar.xz", "w:xz")):
        with tarfile.open(tmp_path / f"sdist.{suffix}", mode) as tar:
            info = tarfile.TarInfo("pkg-2/pkg/other.py")
            info.size = len(built.FIXED)
            tar.addfile(info, io.BytesIO(built.FIXED))
    (tmp_path / "damaged.zip").write_bytes(b"PK\x03\x04" + bytes(50))
    (tmp_path / "alone.bz2").write_bytes(bz2.compress(b"x"))
    answer = scan(tmp_path)
    found = {os.path.relpath(where, tmp_path) for _, where in answer["hits"]}
    assert found == {
        "plain.py",
        "w.whl!/pkg/other.py",
        "cached.body!/pkg/other.py",
        "sdist.tar",  # not compressed: it can be read as it is
        "sdist.tar!/pkg-2/pkg/other.py",
        "sdist.tgz!/pkg-2/pkg/other.py",
        "sdist.tar.xz!/pkg-2/pkg/other.py",
    }
    assert {name for name, _ in answer["hits"]} == {"pkg/stats.py:5"}
    assert answer["history"] == []


def test_copies_are_found_by_their_place(tmp_path: Path) -> None:
    for name in (
        "site-packages/pkg/stats.py",
        "b/pkg/__pycache__/stats.cpython-311.pyc",
        "c/pkg/stats.pyc",
        "d/notpkg/stats.py",
        "e/pkg/stats_more.py",
        "f/pkg/__pycache__/statsx.cpython-311.pyc",
    ):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_bytes(b"")
    found = {os.path.relpath(path, tmp_path)[0] for path in scan(tmp_path, copies=("pkg/stats.py",))["copies"]}
    assert found == {"s", "b", "c"}
    assert scan(tmp_path)["copies"] == []


HISTORY = {
    "two commits": (lambda repo: commit(repo, built.FIXED) and commit(repo, built.BUGGY), "commits"),
    "a tag": (lambda repo: git(repo, "tag", "v2"), "refs"),
    "a branch": (lambda repo: git(repo, "branch", "fix"), "branches"),
    "a remote": (lambda repo: git(repo, "remote", "add", "origin", "https://example.invalid/x"), "remotes"),
    "notes": (lambda repo: git(repo, "notes", "add", "-m", "the fix"), "refs"),
    "a reset": (lambda repo: commit(repo, built.FIXED) and git(repo, "reset", "-q", "--hard", "HEAD~1"), "a reflog"),
    "a loose object": (
        lambda repo: git(repo, "hash-object", "-w", "--stdin", text=built.FIXED.decode()),
        "unreachable",
    ),
    "a stash": (lambda repo: edit(repo, built.FIXED) and git(repo, "stash"), "refs"),
}


def edit(repo: Path, data: bytes) -> bool:
    return bool((repo / "stats.py").write_bytes(data))


def commit(repo: Path, data: bytes) -> bool:
    edit(repo, data)
    git(repo, "add", "-A")
    git(repo, "commit", "-qm", "x")
    return True


@pytest.fixture
def repo(tmp_path: Path) -> Path:
    where = tmp_path / "repo"
    where.mkdir()
    git(where, "init", "-q", ".")
    git(where, "config", "core.logAllRefUpdates", "false")
    commit(where, built.BUGGY)
    return where


def test_one_commit_is_no_history(repo: Path) -> None:
    answer = scan(repo)
    assert (answer["hits"], answer["history"]) == ([], [])


@pytest.mark.parametrize("name", HISTORY)
@pytest.mark.parametrize("packed", [False, True])
def test_what_git_keeps_is_found(repo: Path, name: str, packed: bool) -> None:
    act, word = HISTORY[name]
    if name == "a reset":
        git(repo, "config", "core.logAllRefUpdates", "true")
    assert act(repo) is not None
    if packed:
        git(repo, "repack", "-adkq")
        git(repo, "pack-refs", "--all")
    answer = scan(repo)
    assert any(word in line for line in answer["history"]), answer["history"]
    keeps = name in ("two commits", "a reset", "a loose object", "a stash")
    assert bool(answer["hits"]) == keeps
    assert all(where.endswith(".git objects") for _, where in answer["hits"])
