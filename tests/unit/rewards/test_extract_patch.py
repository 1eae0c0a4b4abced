"""The patch is the difference of bytes and modes, whatever the agent did to Git."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from host_sandbox import HostSandbox

from swe_rl.errors import PatchError, SandboxError
from swe_rl.rewards import extract_patch
from swe_rl.rewards.patch import CLEAN_ENV
from swe_rl.testing import exec_result
from swe_rl.types import ExecResult

BASE = {
    b"pkg/mod.py": b"def f(x):\n    return x\n",
    b"pkg/crlf.txt": b"one\r\ntwo\r\n",
    b"pkg/bin.dat": bytes(range(256)) * 3,
    b"pkg/run.sh": b"#!/bin/sh\n",
    b"pkg/gone.py": b"x = 1\n",
    b"pkg/no_newline.txt": b"a\nb",
    b".gitattributes": b"*.txt text=auto\n*.py filter=evil diff=evil\n",
}


def git(where: Path, *args: str) -> str:
    env = {"PATH": os.environ["PATH"], "HOME": str(where), "GIT_CONFIG_NOSYSTEM": "1"}
    who = ("-c", "user.name=t", "-c", "user.email=t@t", "-c", "core.autocrlf=false")
    return subprocess.run(["git", *who, *args], cwd=where, env=env, check=True, capture_output=True, text=True).stdout


def write_base(where: Path) -> str:
    """The base tree stored byte for byte, as materialised tasks are, and its commit id."""
    for name, data in BASE.items():
        path = where / os.fsdecode(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    git(where, "init", "-q", ".")
    (where / ".git/info/attributes").write_text("* -text -filter -diff\n")
    git(where, "add", "-A")
    git(where, "commit", "-qm", "base")
    return git(where, "rev-parse", "HEAD").strip()


@pytest.fixture
def repo(tmp_path: Path) -> tuple[Path, str]:
    where = tmp_path / "testbed"
    where.mkdir()
    return where, write_base(where)


class NoGit(HostSandbox):
    """Its commands find everything but git."""

    def __init__(self, bin_dir: Path) -> None:
        super().__init__()
        bin_dir.mkdir()
        for name in ("sh", "bash", "env", "mktemp", "mkdir", "rm", "head"):
            (bin_dir / name).symlink_to(shutil.which(name) or "")
        self.path = bin_dir

    async def exec(self, command: str, **options: Any) -> ExecResult:
        command = command.replace("/usr/local/bin:/usr/bin:/bin:$PATH", str(self.path))
        return await super().exec(command, **options)


async def test_no_git_is_the_machines_failure(repo: tuple[Path, str], tmp_path: Path) -> None:
    where, base = repo
    tree = {os.fsdecode(name): data for name, data in BASE.items()}
    with pytest.raises(SandboxError, match="git"):
        await extract_patch(NoGit(tmp_path / "bin"), workdir=str(where), base_commit=base, base_tree=tree)


async def test_git_is_found_where_the_sandbox_has_it() -> None:
    """As in /opt or a conda prefix: the sandbox's own PATH is searched, too."""
    script = f"PATH=/somewhere:$PATH; {CLEAN_ENV} sh -c 'echo \"$PATH\"'"
    seen = (await HostSandbox().exec(script)).stdout
    assert seen.startswith(b"/usr/local/bin:/usr/bin:/bin:/somewhere:")


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (exec_result("", exit_code=137, outcome="timeout"), SandboxError),
        (exec_result("", exit_code=126, stderr="sandbox: cannot start a process\n"), SandboxError),
        (exec_result("", exit_code=126, stderr="sandbox: process limit reached\n"), PatchError),
        (exec_result("", exit_code=126, stderr="sandbox: too many commands and background jobs\n"), PatchError),
        (exec_result("", exit_code=137, outcome="oom"), PatchError),
    ],
)
async def test_whose_failure(answer: ExecResult, error: type[Exception]) -> None:
    class Answers(HostSandbox):
        async def exec(self, command: str, **options: Any) -> ExecResult:
            return answer

    with pytest.raises(error):
        await extract_patch(Answers())


def snapshot(where: Path) -> dict[bytes, tuple[str, bytes]]:
    """Path -> (kind, content) of everything outside .git."""
    seen = {}
    root = os.fsencode(where)
    for folder, dirs, files in os.walk(root):
        dirs[:] = [d for d in dirs if d not in (b".git", b"__pycache__", b".pytest_cache")]
        for name in (*files, *(d for d in dirs if os.path.islink(os.path.join(folder, d)))):
            full = os.path.join(folder, name)
            key = os.path.relpath(full, root)
            if os.path.islink(full):
                seen[key] = ("link", os.readlink(full))
            else:
                kind = "exec" if os.stat(full).st_mode & 0o100 else "file"
                seen[key] = (kind, Path(os.fsdecode(full)).read_bytes())
    return seen


def apply_to_fresh_base(tmp_path: Path, patch: bytes) -> dict[bytes, tuple[str, bytes]]:
    fresh = tmp_path / "fresh"
    fresh.mkdir()
    write_base(fresh)
    (fresh / ".git/info/attributes").write_text("* -text -filter\n")
    if patch:
        subprocess.run(["git", "apply", "--whitespace=nowarn", "-"], cwd=fresh, input=patch, check=True)
    return snapshot(fresh)


def edit_everything(where: Path) -> None:
    (where / "pkg/mod.py").write_bytes(b"def f(x):\n    return x + 1\n")
    (where / "pkg/crlf.txt").write_bytes(b"one\r\nTWO\r\nthree\n")
    (where / "pkg/bin.dat").write_bytes(bytes(reversed(range(256))) * 5)
    (where / "pkg/run.sh").chmod(0o755)
    (where / "pkg/gone.py").unlink()
    (where / "pkg/no_newline.txt").write_bytes(b"a\nc")
    (where / "new").mkdir()
    (where / 'new/with space and " quote\n.py').write_bytes(b"y = 2\n")
    (where / "new/empty").write_bytes(b"")
    (where / "-rf").write_bytes(b"dash\n")
    Path(os.fsdecode(os.fsencode(where) + b"/new/caf\xe9\xff.py")).write_bytes(b"latin = 1\n")
    (where / "new/link").symlink_to("../pkg/mod.py")
    (where / "new/cr\rname").write_bytes(b"\r\r\n\x00")


async def test_round_trip_of_every_kind_of_change(repo: tuple[Path, str], tmp_path: Path) -> None:
    where, base = repo
    edit_everything(where)
    sandbox = HostSandbox()
    patch = await extract_patch(sandbox, workdir=str(where), base_commit=base)
    assert sandbox.num_execs == 1
    assert apply_to_fresh_base(tmp_path, patch) == snapshot(where)


async def test_no_change_is_no_bytes_and_junk_is_ignored(repo: tuple[Path, str]) -> None:
    where, base = repo
    (where / "pkg/__pycache__").mkdir()
    (where / "pkg/__pycache__/mod.cpython-311.pyc").write_bytes(b"\x00")
    (where / ".pytest_cache").mkdir()
    (where / ".pytest_cache/v").write_bytes(b"1")
    (where / "stray.pyc").write_bytes(b"\x00")
    assert await extract_patch(HostSandbox(), workdir=str(where), base_commit=base) == b""


@pytest.mark.parametrize("how", ["staged", "committed", "amended_root", "renamed", "config", "replace", "hidden_bits"])
async def test_git_state_of_the_agent_does_not_matter(repo: tuple[Path, str], tmp_path: Path, how: str) -> None:
    where, base = repo
    edit_everything(where)
    if how in ("staged", "committed", "amended_root"):
        (where / ".git/info/attributes").write_text("* -filter\n")
        git(where, "add", "-A")
    if how == "committed":
        git(where, "commit", "-qm", "fix")
        git(where, "checkout", "-qb", "other")
    if how == "amended_root":
        git(where, "commit", "-q", "--amend", "-m", "new root")
    if how == "renamed":
        (where / "pkg/mod.py").rename(where / "pkg/module.py")
    if how == "config":
        for key, value in {
            "core.hooksPath": "/nonexistent",
            "core.fileMode": "false",
            "core.symlinks": "false",
            "core.worktree": "/tmp",
            "core.autocrlf": "true",
            "core.attributesFile": "/dev/zero",
            "core.excludesFile": "/etc/passwd",
            "diff.external": "false",
            "diff.noprefix": "true",
            "diff.evil.command": "false",
            "diff.evil.textconv": "false",
            "filter.evil.clean": "cat /dev/null",
            "filter.evil.required": "true",
            "core.fsmonitor": "false",
        }.items():
            git(where, "config", key, value)
        (where / ".git/info/exclude").write_text("*\n")
    if how == "replace":
        tree = git(where, "rev-parse", "HEAD^{tree}").strip()
        other = git(where, "commit-tree", tree, "-m", "other").strip()
        git(where, "replace", "HEAD", other)
    if how == "hidden_bits":
        git(where, "update-index", "--assume-unchanged", "pkg/mod.py")
        git(where, "update-index", "--skip-worktree", "pkg/crlf.txt")
    before = {p: p.read_bytes() for p in (where / ".git").rglob("*") if p.is_file()}
    patch = await extract_patch(HostSandbox(), workdir=str(where), base_commit=base)
    assert apply_to_fresh_base(tmp_path, patch) == snapshot(where)
    assert {p: p.read_bytes() for p in (where / ".git").rglob("*") if p.is_file()} == before


async def test_nested_repositories_keep_their_files(repo: tuple[Path, str], tmp_path: Path) -> None:
    where, base = repo
    for name in ("plain", "committed"):
        inner = where / name
        inner.mkdir()
        git(inner, "init", "-q", ".")
        (inner / "a.py").write_bytes(b"a = 1\n")
        if name == "committed":
            git(inner, "add", "-A")
            git(inner, "commit", "-qm", "inner")
    patch = await extract_patch(HostSandbox(), workdir=str(where), base_commit=base)
    assert apply_to_fresh_base(tmp_path, patch) == snapshot(where)


async def test_deleted_git_directory_needs_the_base_tree(repo: tuple[Path, str], tmp_path: Path) -> None:
    where, base = repo
    (where / "pkg/mod.py").write_bytes(b"def f(x):\n    return -x\n")
    subprocess.run(["rm", "-rf", str(where / ".git")], check=True)
    tree = {name.decode(): data for name, data in BASE.items()}
    patch = await extract_patch(HostSandbox(), workdir=str(where), base_commit=base, base_tree=tree)
    assert apply_to_fresh_base(tmp_path, patch) == snapshot(where)
    with pytest.raises(PatchError) as caught:
        await extract_patch(HostSandbox(), workdir=str(where), base_commit=base)
    assert caught.value.reason == "no_base"


async def test_root_commit_is_found_without_an_id(repo: tuple[Path, str]) -> None:
    where, base = repo
    (where / "pkg/mod.py").write_bytes(b"x = 0\n")
    git(where, "commit", "-qam", "second")
    patch = await extract_patch(HostSandbox(), workdir=str(where))
    assert patch == await extract_patch(HostSandbox(), workdir=str(where), base_commit=base) != b""


@pytest.mark.parametrize("size", [10, 8 << 10, 100_000])
async def test_large_patches_are_complete_or_refused(repo: tuple[Path, str], size: int) -> None:
    where, base = repo
    (where / "big.txt").write_bytes(b"x" * size + b"\n")
    sandbox = HostSandbox(output_bytes=4 << 10)
    patch = await extract_patch(sandbox, workdir=str(where), base_commit=base, max_bytes=1 << 20)
    assert b"+" + b"x" * size + b"\n" in patch
    with pytest.raises(PatchError) as caught:
        await extract_patch(sandbox, workdir=str(where), base_commit=base, max_bytes=len(patch) - 1)
    assert caught.value.reason == "too_large"


async def test_missing_workdir_is_typed(tmp_path: Path) -> None:
    with pytest.raises(PatchError) as caught:
        await extract_patch(HostSandbox(), workdir=str(tmp_path / "nowhere"))
    assert caught.value.reason == "no_workdir"
