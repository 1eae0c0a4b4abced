"""An image of somebody else's, with history, hidden tests and caches: nothing of the answer is left for the agent."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from real_parts import require

from swe_rl.errors import SandboxError
from swe_rl.rewards import extract_patch
from swe_rl.sandbox import open_sandbox
from swe_rl.tasks.environment import prepare_sandbox
from swe_rl.types import Limits, SandboxSpec, Task

BUGGY = "def area(width, height):\n    return width + height\n"
FIXED = "def area(width, height):\n    return width * height\n"
SECRET = "return width * height"
FILES = {
    "shapes/__init__.py": "",
    "shapes/flat.py": BUGGY,
    "generated.lock": "kept although ignored\n",
    "crlf.txt": "a\r\nb\r\n",
    ".gitignore": "*.lock\n*.egg-info\nbuild/\n",
    ".gitattributes": "*.txt text=auto\n*.py filter=evil\n",
    "name with space\tand tab.txt": "x\n",
}


def task(**changes) -> Task:
    values = {
        "task_id": "image/one",
        "source": "unit",
        "split": "train",
        "repo": "shapes",
        "base_commit": "f" * 40,
        "problem_statement": "",
        "fail_to_pass": (),
        "pass_to_pass": (),
        "gold_patch": b"",
        "hidden_paths": ("/hidden_tests", "r2e_tests", "run_tests.sh"),
    }
    return Task(**{**values, **changes})


def git(where: Path, *args: str, text: str | None = None) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(where), "GIT_CONFIG_NOSYSTEM": "1"}
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "init.defaultBranch=main")
    done = subprocess.run(
        ["git", *who, *args], cwd=where, env=env, check=True, capture_output=True, text=True, input=text
    )
    return done.stdout.strip()


@pytest.fixture
def image(tmp_path: Path) -> SandboxSpec:
    """A workspace as images have it: the base checked out, the fix in everything that Git can keep."""
    repo = tmp_path / "repo"
    for name, content in FILES.items():
        (repo / name).parent.mkdir(parents=True, exist_ok=True)
        (repo / name).write_bytes(content.encode())
    git(repo, "init", "-q", ".")
    git(repo, "config", "filter.evil.clean", "sed s/+/-/")
    git(repo, "config", "filter.evil.smudge", "cat")
    git(repo, "add", "-A", "-f")
    git(repo, "commit", "-qm", "base")
    (repo / "shapes/flat.py").write_text(FIXED)
    git(repo, "commit", "-qam", "fix")
    git(repo, "tag", "-a", "v2", "-m", SECRET)
    git(repo, "notes", "add", "-m", SECRET)
    git(repo, "remote", "add", "origin", "https://example.invalid/shapes")
    git(repo, "update-ref", "refs/remotes/origin/main", "HEAD")
    git(repo, "update-ref", "refs/pull/7/head", "HEAD")
    git(repo, "replace", "HEAD~1", "HEAD")
    (repo / "shapes/flat.py").write_text(FIXED + "# stashed\n")
    git(repo, "stash")
    git(repo, "hash-object", "-w", "--stdin", text=FIXED + "# dangling\n")
    git(repo, "--no-replace-objects", "reset", "-q", "--hard", "HEAD~1")
    git(repo, "repack", "-adkq")
    (repo / "shapes/flat.py").write_text(BUGGY)  # the evil filter is nobody's wish
    (repo / "r2e_tests").mkdir()
    (repo / "r2e_tests/test_1.py").write_text("hidden")
    (repo / "run_tests.sh").write_text("pytest r2e_tests")
    (repo / "shapes/__pycache__").mkdir()
    (repo / "shapes/__pycache__/flat.cpython-311.pyc").write_text(SECRET)
    (repo / "leftover.txt").write_text("untracked, and part of what the agent is given\n")
    nested = repo / "vendored"
    nested.mkdir()
    git(nested, "init", "-q", ".")
    (nested / "n.py").write_text("n = 1\n")
    return SandboxSpec(layers=(str(repo),), limits=Limits(memory_bytes=512 << 20, disk_bytes=64 << 20))


@pytest.fixture(autouse=True)
async def _sandboxes() -> None:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxError as err:
        require(False, f"a local sandbox ({err})")


LOOKS = (  # everything an agent might try in the workspace; each must print nothing
    f"git log --all -p | grep -F '{SECRET}'",
    f"git log --all --reflog -p | grep -F '{SECRET}'",
    "git reflog",
    "git stash list",
    "git notes list",
    "git tag",
    "git remote",
    "git replace -l",
    "git fsck --unreachable --dangling --no-reflogs 2>/dev/null",
    "git for-each-ref | grep -v refs/heads/main",
    f"git cat-file --batch-all-objects --batch | grep -aF '{SECRET}'",
    f"git grep -F '{SECRET}' $(git rev-list --all)",
    "find .git -name '*.pack' -o -name packed-refs -o -path '.git/logs/*' -o -name '*_HEAD'",
    "find / -path /proc -prune -o -path '*r2e_tests*' -print -o -name run_tests.sh -print 2>/dev/null",
    "find . -name '*.pyc' -o -name __pycache__",
    f"grep -raF '{SECRET}' / --exclude-dir=proc --exclude-dir=sys --exclude-dir=dev --exclude-dir=usr 2>/dev/null",
    "ls -A ~/.cache /var/cache/pip 2>/dev/null",
    "git status --porcelain",
    "find . -mindepth 2 -name .git",
)


async def test_nothing_of_the_answer_is_left(image: SandboxSpec) -> None:
    async with open_sandbox(image) as sandbox:
        before = await sandbox.exec(f"git log --all -p | grep -cF '{SECRET}'", cwd="/testbed")
        assert int(before.stdout) > 0, "the image of this test hides nothing"
        await sandbox.exec("mkdir -p ~/.cache/pip /hidden_tests && echo x > ~/.cache/pip/x", cwd="/")
        await prepare_sandbox(sandbox, task())
        for command in LOOKS:
            seen = await sandbox.exec(command, cwd="/testbed")
            assert seen.stdout.strip() == b"", (command, seen.stdout)
        count = await sandbox.exec("git rev-list --all --count; git log --format='%an %ad' --date=iso", cwd="/testbed")
        assert count.stdout.split(b"\n")[:2] == [b"1", b"base 2000-01-01 00:00:00 +0000"]


async def test_the_files_stay_what_they_were_and_patches_are_taken_against_them(image: SandboxSpec) -> None:
    async with open_sandbox(image) as sandbox:
        await prepare_sandbox(sandbox, task())
        for name, content in FILES.items():
            assert await sandbox.read_file(f"/testbed/{name}") == content.encode(), name
        assert await extract_patch(sandbox) == b""
        await sandbox.exec(
            "sed -i 's/+ height/* height/' shapes/flat.py && echo changed > generated.lock && rm leftover.txt"
        )
        patch = await extract_patch(sandbox)
    assert b"+    return width * height\n" in patch
    assert b"generated.lock" in patch, "a tracked file is looked at although it is ignored"
    assert b"deleted file mode 100644\n" in patch
    assert b"leftover.txt" in patch


async def test_the_same_image_gives_the_same_commit(image: SandboxSpec) -> None:
    commits = []
    for _ in range(2):
        async with open_sandbox(image) as sandbox:
            await prepare_sandbox(sandbox, task())
            commits.append((await sandbox.exec("git rev-parse HEAD", cwd="/testbed")).stdout)
    assert commits[0] == commits[1] != b""


async def test_set_up_comes_first_and_what_fails_is_the_machines(image: SandboxSpec) -> None:
    async with open_sandbox(image) as sandbox:
        await prepare_sandbox(sandbox, task(setup_cmd="echo made > made.txt"))
        assert (await sandbox.exec("git ls-files made.txt", cwd="/testbed")).stdout == b"made.txt\n"
        with pytest.raises(SandboxError, match="its setup_cmd failed"):
            await prepare_sandbox(sandbox, task(setup_cmd="echo oh >&2; exit 3"))
        with pytest.raises(SandboxError, match="no such workdir"):
            await prepare_sandbox(sandbox, task(workdir="/nowhere"))


async def test_a_tree_of_ours_is_left_alone(image: SandboxSpec) -> None:
    async with open_sandbox(image) as sandbox:
        await prepare_sandbox(sandbox, task(tree={"a": b""}, setup_cmd="exit 1"))
        assert (await sandbox.exec("git tag", cwd="/testbed")).stdout == b"v2\n"
