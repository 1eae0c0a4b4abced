"""What only local sandboxes promise, whoever starts them: as root, as root of a container, as an ordinary user."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import sandbox_backends
import sandbox_faults
from real_parts import require
from sandbox_backends import LOCAL_MODES

import swe_rl
from swe_rl.errors import ConfigError, SandboxError, SandboxLost
from swe_rl.protocols import Sandbox
from swe_rl.sandbox import SandboxPool, cgroup, open_sandbox, wire
from swe_rl.sandbox.binary import sandboxd_path
from swe_rl.sandbox.local import LocalSandbox
from swe_rl.sandbox.owner import owner_label
from swe_rl.types import Limits, SandboxSpec

IS_ROOT = os.geteuid() == 0
SPEC = sandbox_faults.SPEC
SCRIPTS = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def available() -> None:
    sandbox_backends.require_mode("local")


@pytest.fixture
async def sandbox(layer: Path) -> AsyncIterator[LocalSandbox]:
    async with await LocalSandbox(replace(SPEC, layers=(str(layer),))).start() as opened:
        yield opened


async def out(sandbox: Sandbox, command: str) -> bytes:
    result = await sandbox.exec(command)
    assert result.outcome == "ok", result
    return result.stdout


def test_every_fault_ends_as_promised_for_an_ordinary_user(tmp_path: Path) -> None:
    """The same table as uid 1000: a child imports all it needs, gives root away, and runs the table."""
    if not IS_ROOT:
        return  # the whole file runs as an ordinary user
    binary = tmp_path / "swe-sandboxd"
    shutil.copy(sandboxd_path(), binary)
    for path in (binary, *tmp_path.parents, tmp_path):
        if path.is_relative_to("/tmp"):
            path.chmod(path.stat().st_mode | 0o055)
    script = [sys.executable, str(SCRIPTS / "sandbox_as_user.py"), str(binary), str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(Path(swe_rl.__file__).parents[1])}
    done = subprocess.run(script, capture_output=True, text=True, timeout=300, env=env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {"uid": 1000, "wrong": [], "layer": "hello\nmore\n", "fork": "forked\n"}


async def test_only_the_listed_parts_of_the_host_are_visible() -> None:
    async with open_sandbox(SPEC) as sandbox:
        for path in ("/etc/shadow", "/var/log", "/run"):
            assert (await sandbox.exec(f"ls -d '{path}'")).exit_code == 2, path
        assert await out(sandbox, "cat /proc/sys/user/max_user_namespaces") == b"0\n"
        assert await out(sandbox, "ls -A /tmp /home/agent /dev/shm /testbed | grep -v :; true") == b"\n\n\n"


@pytest.mark.skipif(not IS_ROOT, reason="a user has one identity outside")
async def test_commands_of_root_are_nobody_outside(sandbox: LocalSandbox) -> None:
    marker = f"31{os.getpid()}"
    task = asyncio.create_task(sandbox.exec(f"exec sleep {marker}", timeout_s=1))
    await asyncio.sleep(0.3)
    uids = [
        (entry / "status").read_text().split("Uid:")[1].split()[0]
        for entry in Path("/proc").iterdir()
        if entry.name.isdigit() and marker.encode() in (entry / "cmdline").read_bytes().split(b"\0")
    ]
    await task
    assert uids == ["65521"]


async def test_python_of_the_owner_runs_inside() -> None:
    async with open_sandbox(SPEC) as sandbox:
        code = "import sys, ssl, sqlite3; print(sys.version_info[:3], sys.base_prefix)"
        version = await out(sandbox, f"python3 -c '{code}'")
    assert version.decode() == f"{tuple(sys.version_info[:3])} {sys.base_prefix}\n"


def _ours(marker: str) -> list[str]:
    """Processes, and mounts and cgroups of any process, that carry the marker."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker in (entry / "cmdline").read_bytes().decode(errors="replace"):
                found.append(entry.name)
        except OSError:
            continue
    return found


def test_sigkill_of_the_owner_leaves_nothing(layer: Path) -> None:
    """Commands, daemons, launchers, supervisors, mounts, cgroups: gone within two seconds."""
    script = [sys.executable, str(SCRIPTS / "sandbox_owner.py"), str(layer)]
    owner = subprocess.Popen(script, stdout=subprocess.PIPE, stdin=subprocess.PIPE)
    assert owner.stdout is not None
    label = owner.stdout.readline().decode().strip()  # "PID-START"
    mounts = len(Path("/proc/self/mountinfo").read_text().splitlines())
    marker = f"7{owner.pid}"
    assert len(_ours(f"owner={label}")) == 6  # three launchers and supervisors
    assert len([pid for pid in _ours(marker) if pid != str(owner.pid)]) >= 6
    groups = Path(found[0]) if (found := cgroup.parent()) else None
    if groups:
        assert len(list(groups.glob(f"{cgroup.PREFIX}{label}-*"))) == 3
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        left = _ours(f"owner={label}") + _ours(marker)
        left += [p.name for p in groups.glob(f"{cgroup.PREFIX}{label}-*")] if groups else []
        if not left:
            break
        time.sleep(0.05)
    assert left == []
    assert len(Path("/proc/self/mountinfo").read_text().splitlines()) == mounts
    owner.stdout.close()
    assert owner.stdin is not None
    owner.stdin.close()


async def test_sigkill_of_the_launcher_ends_the_sandbox(sandbox: LocalSandbox) -> None:
    task = asyncio.create_task(sandbox.exec("sleep 100"))
    await asyncio.sleep(0.2)
    os.kill(sandbox._launcher, signal.SIGKILL)
    with pytest.raises(SandboxLost):
        await asyncio.wait_for(task, 2)
    if found := cgroup.parent():
        await asyncio.sleep(0.5)
        assert not list(Path(found[0]).glob(f"{cgroup.PREFIX}{owner_label()}-*"))


async def test_failure_to_start_is_typed_and_leaves_nothing(layer: Path) -> None:
    with pytest.raises(SandboxError, match="not a directory"):
        await LocalSandbox(replace(SPEC, layers=(str(layer / "nope"),))).start()
    with pytest.raises(SandboxError, match="nowhere"):
        await LocalSandbox(replace(SPEC, readonly_mounts=(("/nowhere", "/x"),))).start()
    for bad in (replace(SPEC, workdir="relative"), replace(SPEC, workdir="/")):
        with pytest.raises(ConfigError):
            async with open_sandbox(bad):
                pass
    with pytest.raises(ConfigError, match="backend"):
        async with open_sandbox(replace(SPEC, backend="chroot")):  # type: ignore[arg-type]
            pass
    assert _ours(f"owner={os.getpid()}-") == []


def test_machine_without_user_namespaces_is_told_why_and_what_to_do() -> None:
    """Inside a user namespace that allows no further ones, root of it included."""
    code = (
        "import asyncio, sys\nfrom swe_rl.sandbox import open_sandbox\nfrom swe_rl.types import SandboxSpec\n"
        "async def go():\n    async with open_sandbox(SandboxSpec()): pass\n"
        "try:\n    asyncio.run(go())\nexcept Exception as err:\n    print(type(err).__name__, err)\n"
    )
    sandboxd_path()
    inner = f"echo 0 > /proc/sys/user/max_user_namespaces && exec {sys.executable} -c '{code}'"
    done = subprocess.run(["unshare", "-Ur", "sh", "-c", inner], capture_output=True, text=True, timeout=60)
    require(done.returncode == 0, f"unshare -Ur ({done.stderr.strip()})")
    assert done.stdout.startswith("SandboxUnavailable this machine allows no sandbox (new "), done.stdout + done.stderr
    assert "sandbox.isolation=none" in done.stdout
    assert done.stdout.count("\n") == 1


async def test_pool_bounds_how_many_are_alive() -> None:
    pool = SandboxPool(3)
    alive = peak = 0

    async def use() -> bytes:
        nonlocal alive, peak
        async with pool.lease(SPEC) as sandbox:
            alive += 1
            peak = max(peak, alive)
            text = await out(sandbox, "sleep 0.05; echo x")
            alive -= 1
            return text

    assert await asyncio.gather(*(use() for _ in range(10))) == [b"x\n"] * 10
    assert peak == 3
    with pytest.raises(ConfigError):
        SandboxPool(0)


@pytest.mark.parametrize("mode", LOCAL_MODES)
async def test_installed_packages_are_not_visible(mode: str) -> None:
    """They may hold the repair of a task, and this package says how grading works."""
    sandbox = await LocalSandbox(SPEC, **LOCAL_MODES[mode]).start()
    async with sandbox:
        found = await out(
            sandbox,
            f"for root in /usr /usr/local {sys.base_prefix}; do"
            "  find $root/lib*/python*/*-packages -mindepth 1 2>/dev/null; done; echo end",
        )
        assert found == b"end\n"
        assert (
            await out(sandbox, "python3 -c 'import pip' 2>&1 | tail -n 1")
            == b"ModuleNotFoundError: No module named 'pip'\n"
        )
        assert await out(sandbox, "python3 -c 'import json, site; print(json.dumps(1))'") == b"1\n"


@pytest.mark.parametrize("call", ["socket.socketpair", "spawn", "os.pidfd_open", "socket.send_fds"])
async def test_a_machine_short_of_descriptors_is_sandbox_trouble(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EMFILE, EAGAIN, ENOMEM while starting: another attempt may do, so it must not end the run. Nothing leaks."""

    def fail(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    before = set(os.listdir("/proc/self/fd"))
    with monkeypatch.context() as patch:
        patch.setattr(f"swe_rl.sandbox.local.{call}", fail)
        with pytest.raises(SandboxError, match="Too many open files"):
            async with open_sandbox(SPEC):
                pass
    assert set(os.listdir("/proc/self/fd")) == before
    async with open_sandbox(SPEC) as sandbox:
        assert await out(sandbox, "echo x") == b"x\n"


async def test_isolation_none_refuses_what_it_cannot_show(layer: Path) -> None:
    spec = SandboxSpec(readonly_mounts=((str(layer), "/opt/x"),), isolation="none")
    with pytest.raises(ConfigError, match="namespaces"):
        async with open_sandbox(spec):
            pass
    gone = SandboxSpec(layers=(str(layer / "nothing"),), isolation="none")
    with pytest.warns(UserWarning, match="UNPROTECTED"), pytest.raises(SandboxError, match="copied"):
        async with open_sandbox(gone):
            pass


async def test_isolation_none_works_and_warns(layer: Path) -> None:
    limits = Limits(command_s=5, output_bytes=1000, output_kill_bytes=1 << 20)
    spec = SandboxSpec(layers=(str(layer),), isolation="none", limits=limits)
    with pytest.warns(UserWarning, match="UNPROTECTED"):
        await _use_without_isolation(spec)
    assert (layer / "readme").read_text() == "hello\n"


async def _use_without_isolation(spec: SandboxSpec) -> None:
    async with open_sandbox(spec) as sandbox:
        assert await out(sandbox, "cat readme; echo x >> readme; echo $HOME | grep -c swe-rl-bare") == b"hello\n1\n"
        assert (await sandbox.exec("sleep 100 & sleep 100", timeout_s=0.3)).outcome == "timeout"
        assert (await sandbox.exec("yes")).outcome == "output_limit"
        assert (await sandbox.exec("kill -9 $$")).exit_code == 137
        assert (await sandbox.exec("cat", stdin=b"in")).stdout == b"in"
        await sandbox.write_file("/testbed/n/x", b"1")
        lost = await sandbox.exec("true", cwd="none")
        assert (lost.exit_code, lost.outcome) == (126, "nonzero")
        other = await sandbox.fork()
        assert await other.read_file("n/x") == b"1"
        await other.close()
        root = Path(sandbox._root)  # type: ignore[attr-defined]
    assert not root.exists()


@pytest.mark.parametrize("flags", [0, wire.FLAG_USERNS])
async def test_fork_leaves_no_process_descriptor_or_memory_behind(layer: Path, flags: int) -> None:
    spec = SandboxSpec(layers=(str(layer),), limits=Limits(disk_bytes=61 << 20))
    async with await LocalSandbox(spec, flags=flags).start() as sandbox:
        await out(sandbox, "echo x > file; head -c 20M /dev/zero > big")
        async with await sandbox.fork() as other:
            held = []
            for launcher in (sandbox._launcher, other._launcher):
                while len(supervisors := _children(launcher)) > 1:  # the process that copied is waited for
                    await asyncio.sleep(0.01)
                assert _children(supervisors[0]) == []
                held.append({device for pid in (launcher, *supervisors) for device in _tmpfs_of(pid, 61 << 20)})
            assert list(map(len, held)) == [1, 1], "a fork holds the files of the sandbox that it was made from"
            assert held[0] != held[1]


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _tmpfs_of(pid: int, size: int) -> set[int]:
    """Device numbers of the file systems of that size that the process has descriptors in."""
    found = set()
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # a socket, or closed meanwhile
            info = os.statvfs(path)
            if info.f_blocks * info.f_frsize == size:
                found.add(path.stat().st_dev)
    return found


async def test_fork_that_does_not_fit_says_why(layer: Path) -> None:
    """Hard links become files of their own, as wherever an overlay copies them."""
    spec = SandboxSpec(layers=(str(layer),), limits=Limits(disk_bytes=8 << 20))
    async with open_sandbox(spec) as sandbox:
        await out(sandbox, "head -c 3M /dev/zero > a; ln a b; ln a c")
        with pytest.raises(SandboxError, match="copy of the upper directory: No space left"):
            await sandbox.fork()  # type: ignore[attr-defined]
        assert await out(sandbox, "ls") != b""
