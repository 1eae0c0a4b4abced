"""What every local sandbox promises, whoever starts it: as root, as root of a container, as an ordinary user."""

from __future__ import annotations

import asyncio
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
import sandbox_faults
from real_parts import require

import swe_rl
from swe_rl.errors import ConfigError, SandboxError, SandboxLost, SandboxUnavailable
from swe_rl.protocols import Sandbox
from swe_rl.sandbox import SandboxPool, cgroup, open_sandbox, wire
from swe_rl.sandbox.binary import sandboxd_path
from swe_rl.sandbox.local import LocalSandbox
from swe_rl.sandbox.owner import owner_label
from swe_rl.types import Limits, SandboxSpec

IS_ROOT = os.geteuid() == 0
MODES = {
    "default": {},  # root: real mounts and id-mapped layers; a user: user namespace
    "no cgroup": {"use_cgroup": False},
    "container root": {"flags": wire.FLAG_USERNS, "use_cgroup": False},  # what root without CAP_SYS_ADMIN gets
    "no id map": {"flags": wire.FLAG_NO_IDMAP},
}
SPEC = sandbox_faults.SPEC
SCRIPTS = Path(__file__).parent


@pytest.fixture(scope="module", autouse=True)
def available() -> None:
    async def attempt() -> None:
        async with open_sandbox(SandboxSpec()):
            pass

    try:
        asyncio.run(attempt())
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    tree = tmp_path / "layer"
    (tree / "pkg").mkdir(parents=True)
    (tree / "pkg" / "a.py").write_text("A = 1\n")
    (tree / "pkg" / "b.py").write_text("B = 2\n")
    (tree / "readme").write_text("hello\n")
    return tree


@pytest.fixture
async def sandbox(layer: Path) -> AsyncIterator[LocalSandbox]:
    async with await LocalSandbox(replace(SPEC, layers=(str(layer),))).start() as opened:
        yield opened


async def out(sandbox: Sandbox, command: str) -> bytes:
    result = await sandbox.exec(command)
    assert result.outcome == "ok", result
    return result.stdout


# ---- faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["default", "no cgroup", "container root"])
async def test_every_fault_ends_as_promised(mode: str) -> None:
    wrong = []
    async with await LocalSandbox(SPEC, **MODES[mode]).start() as sandbox:
        for fault in sandbox_faults.FAULTS:
            wrong.append(await sandbox_faults.check(sandbox, fault))
    assert not any(wrong), "\n".join(filter(None, wrong))


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


# ---- isolation -------------------------------------------------------------------------------------------------


async def test_nothing_of_the_host_is_visible_and_secrets_stay_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "hidden_test.py"
    secret.write_text("answer")
    monkeypatch.setenv("API_KEY", "hunter2")
    async with open_sandbox(SPEC) as sandbox:
        hidden = [secret, Path(__file__), Path.home() / ".ssh", Path("/etc/shadow"), Path("/var/log"), Path("/run")]
        for path in hidden:
            assert (await sandbox.exec(f"ls -d '{path}'")).exit_code == 2, path
        assert b"hunter2" not in await out(sandbox, "env; cat /proc/self/environ; set")
        assert await out(sandbox, "cat /proc/sys/user/max_user_namespaces") == b"0\n"
        assert await out(sandbox, "ls -A /tmp /home/agent /dev/shm /testbed | grep -v :; true") == b"\n\n\n"
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file(str(secret))


async def test_host_file_behind_a_planted_link_is_not_written(tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    async with open_sandbox(SPEC) as sandbox:
        await out(sandbox, f"ln -s {target} link; ln -s /usr/bin/env env")
        with pytest.raises(FileNotFoundError):
            await sandbox.write_file("link", b"x")
        with pytest.raises(OSError, match="Read-only"):
            await sandbox.write_file("env", b"x")
        with pytest.raises(OSError, match="Read-only"):
            await sandbox.write_file("/etc/passwd", b"x")
    assert target.read_text() == "untouched"


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


async def test_two_sandboxes_do_not_see_each_other() -> None:
    async with open_sandbox(SPEC) as one, open_sandbox(SPEC) as two:
        await out(one, "echo secret > /tmp/x; echo secret > /dev/shm/x; (sleep 100 &)")
        assert (await two.exec("cat /tmp/x /dev/shm/x")).stdout == b""
        assert b"sleep" not in await out(two, "ps -e")


# ---- overlay, files, fork --------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
async def test_overlay_hides_changes_from_the_layer(layer: Path, mode: str) -> None:
    top = layer.parent / "top"
    top.mkdir(mode=0o700)  # what tempfile makes
    (top / "readme").write_text("upper\n")
    spec = replace(SPEC, layers=(str(top), str(layer)))
    async with await LocalSandbox(spec, **MODES[mode]).start() as sandbox:
        assert await out(sandbox, "cat readme pkg/a.py; echo more >> pkg/a.py; cat pkg/a.py") == (
            b"upper\nA = 1\nA = 1\nmore\n"
        )
        await out(sandbox, "rm -r pkg && mkdir pkg && touch pkg/new && chmod 600 readme")
        assert await out(sandbox, "ls pkg; stat -c '%u %g' readme pkg/new") == b"new\n1000 1000\n1000 1000\n"
    assert sorted(p.name for p in (layer / "pkg").iterdir()) == ["a.py", "b.py"]
    assert (layer / "pkg" / "a.py").read_text() == "A = 1\n"


async def test_readonly_mounts_are_readable_and_not_writable(layer: Path) -> None:
    spec = replace(
        SPEC, layers=(str(layer),), readonly_mounts=((str(layer), "/opt/tools"), (str(layer), "/testbed/in"))
    )
    async with open_sandbox(spec) as sandbox:
        assert await out(sandbox, "cat /opt/tools/readme in/readme") == b"hello\nhello\n"
        assert (await sandbox.exec("echo x > /opt/tools/readme || echo x > in/readme")).exit_code == 1


async def test_git_works_on_a_tree_of_another_owner(layer: Path) -> None:
    subprocess.run(["git", "init", "-q", str(layer)], check=True)
    async with open_sandbox(replace(SPEC, layers=(str(layer),))) as sandbox:
        await out(sandbox, "git add -A && git commit -qm base && echo x >> readme")
        assert await out(sandbox, "git status --short; git log --format=%an") == b" M readme\nagent\n"


async def test_files_round_trip_bytes_and_names(sandbox: LocalSandbox) -> None:
    big = bytes(range(256)) * (20 * 4096)  # 20 MiB
    roomy = replace(SPEC, limits=replace(SPEC.limits, disk_bytes=64 << 20))
    async with open_sandbox(roomy) as other:
        await other.write_file("deep/er/big.bin", big)
        assert await other.read_file("/testbed/deep/er/big.bin") == big
        piped = await other.exec("sha256sum -", stdin=big)
        assert piped.stdout == await out(other, "sha256sum - < deep/er/big.bin")
    for name in ("-rf", "new\nline", "\udcff\udcfe", "blank quote' \" $x", "é"):
        await sandbox.write_file(name, name.encode("utf-8", "surrogateescape"))
        assert await sandbox.read_file(name) == name.encode("utf-8", "surrogateescape")
    listed = (await out(sandbox, "printf '%s\\0' *")).split(b"\0")
    assert {b"-rf", b"new\nline", b"\xff\xfe", b"pkg"} <= set(listed)
    await sandbox.write_file("empty", b"")
    assert await sandbox.read_file("empty") == b""


async def test_file_errors_are_those_of_open(sandbox: LocalSandbox) -> None:
    await out(sandbox, "mkfifo fifo; echo x > locked; chmod 000 locked; ln -s /dev/zero zero")
    for path, error in [("nothing", FileNotFoundError), ("pkg", IsADirectoryError), ("locked", PermissionError)]:
        with pytest.raises(error):
            await sandbox.read_file(path)
    for path in ("fifo", "zero", "", "a\0b"):  # would block, would never end, are no names
        with pytest.raises(OSError, match=r"(Invalid argument|No such file)"):
            await sandbox.read_file(path)
    with pytest.raises(OSError, match="No space"):
        await sandbox.write_file("big", bytes(sandbox_faults.LIMITS.disk_bytes + 1))
    with pytest.raises(NotADirectoryError):
        await sandbox.write_file("readme/x", b"")


async def test_fork_copies_what_was_written_and_then_both_go_their_way(sandbox: LocalSandbox) -> None:
    await out(sandbox, "rm -r pkg; mkdir pkg; echo c > pkg/c; rm readme; ln -s pkg/c link; mkfifo fifo; chmod 711 pkg")
    await out(sandbox, "touch -d @1000000000 pkg/c; (sleep 100 &)")
    other = await sandbox.fork()
    async with other:
        assert await out(other, "ls; ls pkg; cat link; stat -c '%Y %u' pkg/c; stat -c %a pkg; test -p fifo") == (
            b"fifo\nlink\npkg\nc\nc\n1000000000 1000\n711\n"
        )
        assert await other.ping() == 0  # processes are not copied
        await out(other, "echo changed > pkg/c; touch only_here")
        third = await other.fork()
        async with third:
            assert await out(third, "cat pkg/c; ls only_here") == b"changed\nonly_here\n"
    assert await out(sandbox, "cat pkg/c; ls") == b"c\nfifo\nlink\npkg\n"


# ---- commands --------------------------------------------------------------------------------------------------


async def test_concurrent_commands_do_not_wait_for_each_other(sandbox: LocalSandbox) -> None:
    start = time.monotonic()
    results = await asyncio.gather(*(sandbox.exec(f"sleep 0.5; echo {i}") for i in range(8)))
    assert [r.stdout for r in results] == [b"%d\n" % i for i in range(8)]
    assert time.monotonic() - start < 3


async def test_timeout_of_one_command_spares_the_others_and_background_jobs(sandbox: LocalSandbox) -> None:
    await out(sandbox, "(sleep 100 &)")
    long, short = await asyncio.gather(
        sandbox.exec("sleep 1.2; echo done"), sandbox.exec("(setsid sleep 99 &); sleep 98", timeout_s=0.4)
    )
    assert (long.outcome, long.stdout, short.outcome) == ("ok", b"done\n", "timeout")
    assert await out(sandbox, "pgrep -a sleep | cut -d' ' -f2-") == b"sleep 100\n"


async def test_cancelled_command_is_killed(sandbox: LocalSandbox) -> None:
    task = asyncio.create_task(sandbox.exec("(setsid sleep 100 &); sleep 100"))
    await asyncio.sleep(0.3)
    assert await sandbox.ping() >= 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if not await sandbox.ping():
            break
        await asyncio.sleep(0.02)
    assert await sandbox.ping() == 0
    assert await out(sandbox, "echo usable") == b"usable\n"


async def test_background_job_survives_without_losing_its_pipe(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec("(for i in 1 2 3 4 5 6; do sleep 0.1; echo tick; done; touch finished) & echo go")
    assert result.outcome == "ok"
    assert result.stdout.startswith(b"go\n")
    await asyncio.sleep(1.2)
    assert await out(sandbox, "ls finished") == b"finished\n"


async def test_head_tail_and_totals_of_long_output(sandbox: LocalSandbox) -> None:
    result = await sandbox.exec("seq 100000; seq 5 >&2")
    whole = b"".join(b"%d\n" % i for i in range(1, 100001))
    keep = sandbox_faults.LIMITS.output_bytes
    marker = b"\n[... %d bytes omitted ...]\n" % (len(whole) - keep)
    assert result.stdout == whole[: keep // 2] + marker + whole[-keep // 2 :]
    assert (result.stdout_bytes, result.stderr, result.stderr_bytes) == (len(whole), b"1\n2\n3\n4\n5\n", 10)


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049, 4095, 4096, 4097, 6143, 6144, 6145, 10000])
async def test_output_around_the_bound(sandbox: LocalSandbox, size: int) -> None:
    text = (b"%07d\n" * (size // 8 + 1) % tuple(range(size // 8 + 1)))[:size]
    result = await sandbox.exec("cat", stdin=text)
    kept = text if size <= 4096 else text[:2048] + b"\n[... %d bytes omitted ...]\n" % (size - 4096) + text[-2048:]
    assert (result.stdout, result.stdout_bytes) == (kept, size)


async def test_stdin_cwd_and_environment(layer: Path) -> None:
    spec = replace(SPEC, layers=(str(layer),), env={"GREETING": "hi there", "PATH": "/usr/bin:/bin"})
    async with open_sandbox(spec) as sandbox:
        assert (await sandbox.exec("cat; pwd", stdin=b"in\0put\n", cwd="pkg")).stdout == b"in\0put\n/testbed/pkg\n"
        assert (await sandbox.exec("pwd", cwd="/usr")).stdout == b"/usr\n"
        missing = await sandbox.exec("pwd", cwd="nowhere")
        assert (missing.exit_code, missing.outcome) == (126, "nonzero")
        assert b"nowhere" in missing.stderr
        assert await out(sandbox, 'echo "$GREETING $HOME $PATH"') == b"hi there /home/agent /usr/bin:/bin\n"


async def test_python_of_the_owner_runs_inside() -> None:
    async with open_sandbox(SPEC) as sandbox:
        code = "import sys, ssl, sqlite3; print(sys.version_info[:3], sys.base_prefix)"
        version = await out(sandbox, f"python3 -c '{code}'")
    assert version.decode() == f"{tuple(sys.version_info[:3])} {sys.base_prefix}\n"


async def test_too_many_commands_are_refused_not_lost(sandbox: LocalSandbox) -> None:
    roomy = replace(SPEC, limits=replace(SPEC.limits, pids=400))
    async with open_sandbox(roomy) as other:
        results = await asyncio.gather(*(other.exec("sleep 1", stdin=b"") for _ in range(70)))
    assert {r.outcome for r in results} == {"ok", "nonzero"}
    assert sum(r.outcome == "ok" for r in results) == 64


# ---- life and death --------------------------------------------------------------------------------------------


async def test_lease_ends_the_sandbox() -> None:
    spec = replace(SPEC, limits=replace(SPEC.limits, lease_s=0.5))
    async with open_sandbox(spec) as sandbox:
        with pytest.raises(SandboxLost, match="lease"):
            await sandbox.exec("sleep 100")
        with pytest.raises(SandboxLost, match="lease"):
            await sandbox.exec("true")


async def test_close_while_a_command_runs_and_twice(sandbox: LocalSandbox) -> None:
    task = asyncio.create_task(sandbox.exec("sleep 100"))
    await asyncio.sleep(0.2)
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await task
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await sandbox.exec("true")


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
    for bad in (replace(SPEC, image="debian"), replace(SPEC, workdir="relative"), replace(SPEC, workdir="/")):
        with pytest.raises(ConfigError):
            async with open_sandbox(bad):
                pass
    with pytest.raises(ConfigError, match="backend"):
        async with open_sandbox(replace(SPEC, backend="docker")):
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


@pytest.mark.parametrize("mode", MODES)
async def test_installed_packages_are_not_visible(mode: str) -> None:
    """They may hold the repair of a task, and this package says how grading works."""
    sandbox = await LocalSandbox(SPEC, **MODES[mode]).start()
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
