from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import tasks_support as helpers

from swe_rl.errors import ConfigError
from swe_rl.tasks import load_tasks, materialize, tree_commit, tree_diff

AWKWARD = {
    "a": b"",
    "a.b": b"x",
    "a-b/c": b"no newline",
    "ab/deep/er/file.py": b"print(1)\n",
    "ab.py": b"\x00\xff binary \n",
    "crlf.txt": b"one\r\ntwo\rthree\x0cfour\n",
    "spa ce/ü.txt": "ü\n".encode(),
    "n" * 200: b"long name\n",
    "same": b"print(1)\n",
}


def git(root, *arguments: str) -> str:
    command = ["git", "-c", f"safe.directory={root}", *arguments]
    return subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout


def awkward_task(tree=AWKWARD):
    return replace(helpers.bare_task("/testbed"), tree=tree, base_commit=tree_commit(tree))


def test_commit_is_the_one_git_makes(tmp_path):
    helpers.write_files(tmp_path, AWKWARD)
    git(tmp_path, "init", "-q", "-b", "main")
    git(tmp_path, "-c", "core.autocrlf=false", "add", "-A")
    tree = git(tmp_path, "write-tree").strip()
    root = materialize(awkward_task(), tmp_path / "cache")
    assert git(root, "rev-parse", "HEAD^{tree}").strip() == tree
    assert git(root, "rev-parse", "HEAD").strip() == tree_commit(AWKWARD)


def test_repository_is_one_clean_commit_and_nothing_else(tmp_path):
    tasks = [*load_tasks("minirepo", split="hard", num_tasks=3, seed=0), awkward_task()]
    for task in tasks:
        root = materialize(task, tmp_path)
        assert git(root, "fsck", "--strict", "--full", "--unreachable", "--no-dangling") == ""
        assert git(root, "rev-list", "--all", "--reflog").split() == [task.base_commit]
        assert git(root, "remote") + git(root, "tag") + git(root, "stash", "list") + git(root, "reflog") == ""
        assert git(root, "for-each-ref", "--format=%(refname)").split() == ["refs/heads/main"]
        assert git(root, "status", "--porcelain", "--ignored") == ""
        assert git(root, "diff", "HEAD") == ""
        files = {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}
        assert {path for path in files if not path.startswith(".git/")} == set(task.tree)
        objects = git(root, "count-objects", "-v").splitlines()
        reachable = git(root, "rev-list", "--objects", "--all").splitlines()
        assert objects[0] == f"count: {len(reachable)}"


def test_an_edit_shows_in_git(tmp_path):
    task = load_tasks("minirepo", split="train", num_tasks=1, seed=0)[0]
    root = materialize(task, tmp_path)
    subprocess.run(["git", "apply", "-"], input=task.gold_patch, cwd=root, check=True)
    assert git(root, "status", "--porcelain") == f" M {task.meta['path']}\n"
    assert len([line for line in git(root, "diff").splitlines() if line.startswith(("+ ", "- "))]) >= 2
    git(root, "commit", "-qam", "fix")
    assert len(git(root, "rev-list", "HEAD").split()) == 2


def test_is_idempotent_and_safe_under_concurrency(tmp_path):
    tasks = load_tasks("minirepo", split="train", num_tasks=6, seed=0) * 8
    with ThreadPoolExecutor(16) as pool:
        roots = list(pool.map(lambda task: materialize(task, tmp_path), tasks))
    assert [root.name for root in roots] == [task.base_commit for task in tasks]
    assert {path.name for path in tmp_path.iterdir()} == {task.base_commit for task in tasks}
    marker = roots[0].stat().st_ino
    assert materialize(tasks[0], tmp_path).stat().st_ino == marker


def test_commit_depends_on_content_alone():
    assert tree_commit(dict(reversed(AWKWARD.items()))) == tree_commit(AWKWARD)
    assert tree_commit(AWKWARD | {"a": b"y"}) != tree_commit(AWKWARD)


@pytest.mark.parametrize("path", ["/a", "../a", "a/../b", "a//b", ".git/config", "a/.git/x", ""])
def test_paths_outside_the_repository_are_refused(path):
    with pytest.raises(ConfigError):
        tree_commit({path: b""})


@pytest.mark.parametrize("tree", [{"a": b"", "a/b": b""}, {"a/b": b"", "a": b""}])
def test_a_path_cannot_be_file_and_directory(tree):
    with pytest.raises(ConfigError, match="both"):
        tree_commit(tree)


def test_a_wrong_base_commit_and_an_empty_tree_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="base_commit"):
        materialize(replace(awkward_task(), base_commit="0" * 40), tmp_path)
    with pytest.raises(ConfigError, match="no files"):
        materialize(replace(awkward_task(), tree={}), tmp_path)


def test_diff_round_trips_through_git_apply(tmp_path):
    old = {"gone": b"x\n", "kept": b"1\n", "edit": b"a\nb\rc\nd", "form": b"a\x0cb\nc\n", "empty": b""}
    new = {
        "kept": b"1\n",
        "edit": b"a\nb\rC\nd\n",
        "form": b"a\x0cb\nd\n",
        "new/file": b"no newline",
        "empty": b"now\n",
    }
    helpers.write_files(tmp_path, old)
    subprocess.run(["git", "apply", "-"], input=tree_diff(old, new), cwd=tmp_path, check=True)
    found = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert found == new
    assert tree_diff(new, new) == b""
