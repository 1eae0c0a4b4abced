"""The threat model in the docstring of sandbox/local.py, line by line, on the base root and on an image."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import shutil
import socket
import stat
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path

import oci_images as build
import pytest
from oci_images import Built
from real_parts import require

from swe_rl.errors import SandboxError, SandboxLost, SandboxUnavailable
from swe_rl.protocols import Sandbox
from swe_rl.sandbox import local, open_sandbox
from swe_rl.sandbox.oci import default_store
from swe_rl.sandbox.oci.sources import open_source
from swe_rl.types import Limits, SandboxSpec

LIMITS = Limits(command_s=20.0, memory_bytes=96 << 20, pids=48, disk_bytes=16 << 20, output_kill_bytes=8 << 20)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """One image for the whole file, in a store of its own."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWE_RL_CACHE", str(folder))
        set_id = build.entry("app/set-id", Path(_real("id")).read_bytes(), mode=0o4755)
        layer = build.layer(*build.programs(*build.TOOLS, "unshare"), build.folder("app"), set_id)
        with open_source(str(Built([layer]).save(folder / "image.tar", "threats:1"))) as images:
            default_store().add(images[0])
        yield folder


def _real(name: str) -> str:
    found = shutil.which(name)
    assert found
    return os.path.realpath(found)


@pytest.fixture(params=["", "threats:1"], ids=["base root", "image"])
def spec(request: pytest.FixtureRequest) -> SandboxSpec:
    return SandboxSpec(image=request.param, limits=LIMITS)


@pytest.fixture
async def sandbox(spec: SandboxSpec) -> AsyncIterator[Sandbox]:
    try:
        async with open_sandbox(spec) as opened:
            yield opened
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")


async def out(sandbox: Sandbox, command: str) -> str:
    result = await sandbox.exec(command)
    assert result.outcome == "ok", result
    return result.stdout.decode()


async def refused(sandbox: Sandbox, *commands: str) -> None:
    for command in commands:
        result = await sandbox.exec(command)
        assert result.outcome == "nonzero", (command, result)
        assert result.exit_code not in (126, 127), (command, result)  # it was there, and failed


def test_every_line_of_the_threat_model_has_its_test() -> None:
    named = re.findall(r"\[(\w+)\]$", local.__doc__ or "", re.MULTILINE)
    assert len(named) == len(set(named)) == 18
    assert [name for name in named if f"test_{name}" not in globals()] == []


async def test_host_files(sandbox: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("answer")
    for path in (tmp_path / "secret", Path(__file__), Path.home() / ".cache", "/var/log", "/etc/shadow", "/boot"):
        assert (await sandbox.exec(f"cat '{path}' || ls '{path}/x'")).stdout == b""
    assert "answer" not in await out(sandbox, "cat /proc/self/mountinfo /proc/mounts; ls /")
    await refused(sandbox, "touch /proc/1/root/x", "cd /proc/1/cwd", "ls /proc/1/root/")


async def test_secrets(monkeypatch: pytest.MonkeyPatch, spec: SandboxSpec) -> None:
    for name in ("API_KEY", "AWS_SECRET_ACCESS_KEY", "https_proxy", "HF_TOKEN", "WANDB_API_KEY"):
        monkeypatch.setenv(name, "hunter2")
    async with open_sandbox(spec) as sandbox:
        assert "hunter2" not in await out(
            sandbox, "env; set; cat /proc/self/environ; cat /proc/[0-9]*/environ 2>/dev/null; true"
        )


async def test_set_id(sandbox: Sandbox, spec: SandboxSpec) -> None:
    mine = (await out(sandbox, "id -u")).strip()
    await out(sandbox, "cat /bin/id > x; chmod 6755 x")
    assert (await out(sandbox, "./x -u")).strip() == mine
    if spec.image:
        assert (
            await out(sandbox, "stat -c %a /app/set-id; /app/set-id -u; /app/set-id -r -u") == f"4755\n{mine}\n{mine}\n"
        )


async def test_root(sandbox: Sandbox) -> None:
    status = await out(sandbox, "grep -E '^(Cap|NoNewPrivs)' /proc/self/status")
    assert set(re.findall(r"Cap\w+:\t(\w+)", status)) == {"0" * 16}
    assert "NoNewPrivs:\t1" in status
    marker = f"51{os.getpid()}"
    task = asyncio.create_task(sandbox.exec(f"exec sleep {marker}", timeout_s=1))
    await asyncio.sleep(0.4)
    owners = set()
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                owners.add(entry.stat().st_uid)
        except OSError:
            continue
    await task
    assert owners == {65521 if os.geteuid() == 0 else os.geteuid()}


async def test_kernel(sandbox: Sandbox, spec: SandboxSpec) -> None:
    await refused(
        sandbox,
        "echo 1 > /proc/sys/vm/drop_caches",
        "echo c > /proc/sysrq-trigger",
        "echo x > /proc/sys/kernel/core_pattern",
        "mount -t tmpfs none /tmp",
        "mount -o remount,rw /",
        "ls /sys/kernel",
    )
    if spec.image or os.uname().machine != "x86_64":
        return  # no interpreter in the image
    calls = {
        "bpf": 321,
        "perf_event_open": 298,
        "keyctl": 250,
        "add_key": 248,
        "userfaultfd": 323,
        "io_uring_setup": 425,
    }
    code = (
        "import ctypes; c = ctypes.CDLL(None, use_errno=True)\n"
        f"for name, number in {calls}.items():\n"
        "    if c.syscall(number, 0, 0, 0, 0, 0) != -1 or ctypes.get_errno() not in (1, 38): print(name)"
    )
    assert await out(sandbox, f'python3 -I -c "{code}"') == ""


async def test_nesting(sandbox: Sandbox) -> None:
    await refused(sandbox, "unshare -U true", "unshare -m true", "unshare -n true", "unshare -Ur mount -t tmpfs n /tmp")
    assert await out(sandbox, "cat /proc/sys/user/max_user_namespaces") == "0\n"


async def test_devices(sandbox: Sandbox) -> None:
    await refused(sandbox, "mknod d b 8 0", "mknod d c 1 1", "cat /dev/mem", "cat /dev/kmsg", "ls /dev/sda /dev/vda")
    nodes = 'for f in /dev/* /dev/*/*; do if [ -c "$f" ] || [ -b "$f" ]; then echo "$f"; fi; done'
    found = set((await out(sandbox, nodes)).split()) - {"/dev/ptmx", "/dev/stdin"}  # links
    named = {f"/dev/{name}" for name in ("null", "zero", "full", "random", "urandom", "tty")}
    assert found - {path for path in found if path.startswith(("/dev/pts/", "/dev/fd"))} == named


async def test_network(sandbox: Sandbox) -> None:
    await refused(sandbox, "exec 3<>/dev/tcp/1.1.1.1/53", "exec 3<>/dev/tcp/169.254.169.254/80")
    assert (await out(sandbox, "cat /proc/net/dev")).count(":") == 1
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(f"\0swe-rl-threat-{os.getpid()}")
        server.listen()
        assert "swe-rl-threat" not in await out(sandbox, "cat /proc/net/unix")
    with socket.create_server(("127.0.0.1", 0)) as server:
        await refused(sandbox, f"exec 3<>/dev/tcp/127.0.0.1/{server.getsockname()[1]}")


async def test_egress(spec: SandboxSpec) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listed, socket.create_server(("127.0.0.1", 0)) as other:
        ports = [server.getsockname()[1] for server in (listed, other)]
        ask = "exec 3<>/dev/tcp/127.0.0.1/3128; printf 'CONNECT {} HTTP/1.1\\r\\n\\r\\n' >&3; read -r x <&3; echo $x"
        async with open_sandbox(replace(spec, egress=(f"127.0.0.1:{ports[0]}",))) as sandbox:
            assert " 200 " in await out(sandbox, ask.format(f"127.0.0.1:{ports[0]}"))
            for place in (f"127.0.0.1:{ports[1]}", f"localhost:{ports[0]}", f"127.1:{ports[0]}", "1.1.1.1:53"):
                assert (await out(sandbox, ask.format(place))).split()[1] in ("403", "400")
            await refused(sandbox, *(f"exec 3<>/dev/tcp/127.0.0.1/{port}" for port in ports))
            assert (await out(sandbox, "cat /proc/net/dev")).count(":") == 1
        other.settimeout(0)
        with pytest.raises(BlockingIOError):
            other.accept()


async def test_neighbours(sandbox: Sandbox, spec: SandboxSpec) -> None:
    async with open_sandbox(spec) as other:
        await out(other, "echo secret > /tmp/x; echo secret > /dev/shm/x; (sleep 1000 &)")
        assert await out(sandbox, "cat /tmp/x /dev/shm/x 2>/dev/null; set -- /proc/[0-9]*; echo $#") == "2\n"
        await refused(sandbox, f"kill -0 {os.getpid()}")
        await sandbox.exec("kill -9 -1")
        assert "sleep" in await out(other, "cat /proc/[0-9]*/comm")


async def test_supervisor(sandbox: Sandbox) -> None:
    for signal in ("KILL", "TERM", "STOP", "SEGV", "HUP"):
        await sandbox.exec(f"kill -{signal} 1")
    await refused(
        sandbox,
        "cat /proc/1/mem",
        "cat /proc/1/environ",
        "readlink /proc/1/fd/3",
        "readlink /proc/1/exe",
        "cat /proc/1/maps",
    )
    assert await out(sandbox, "echo alive") == "alive\n"


async def test_descriptors(sandbox: Sandbox) -> None:
    assert (await out(sandbox, "ls /proc/self/fd")).split() == ["0", "1", "2", "3"]  # 3 is the directory it lists
    assert await out(sandbox, "readlink /proc/self/fd/0") == "/dev/null\n"
    long = "readlink /proc/self/fd/*; true #" + "x" * 200_000  # comes as a file, by a descriptor of its own
    assert "socket" not in await out(sandbox, long)


async def test_hiding(sandbox: Sandbox) -> None:
    result = await sandbox.exec(
        "(setsid bash -c 'trap \"\" TERM HUP; (sleep 1001 &); sleep 1002' &) ; exec sleep 1003", timeout_s=0.5
    )
    assert result.outcome == "timeout"
    for _ in range(100):
        if not await sandbox.ping():  # type: ignore[attr-defined]
            break
        await asyncio.sleep(0.02)
    assert await out(sandbox, "cat /proc/[0-9]*/comm | grep -c sleep; true") == "0\n"


FULL = "dd if=/dev/zero of={0}/big bs=1M count=100"
EXHAUSTION = {
    "bomb() { bomb | bomb & }; bomb": "pids_limit",
    FULL.format("/tmp"): "disk_full",
    f"rm /tmp/big; {FULL.format('/dev/shm')}": "disk_full",
    "rm -f /dev/shm/big; mkdir /tmp/i; for i in $(seq 20000); do : > /tmp/i/$i || exit 1; done": "disk_full",
    "rm -rf /tmp/i; head -c 100000000 /dev/zero": "output_limit",
    "head -c 100000000 /dev/zero >&2": "output_limit",
    "while :; do :; done": "timeout",
    'x=x; while :; do x="$x$x$x$x"; done': "oom",
}


async def test_exhaustion(sandbox: Sandbox) -> None:
    for command, outcome in EXHAUSTION.items():
        result = await sandbox.exec(command, timeout_s=1.0 if outcome == "timeout" else 20.0)
        assert result.outcome == outcome, (command, result)
        again = "rm -rf /tmp/big /dev/shm/big /tmp/i; echo on > /tmp/x; cat /tmp/x"
        assert await out(sandbox, again) == "on\n"
    limits = "grep -E '^Max (open files|core file size|locked memory)' /proc/self/limits"
    shown = {tuple(re.split(r"  +", line)[:2]) for line in (await out(sandbox, limits)).splitlines()}
    assert shown == {
        ("Max open files", "4096"),
        ("Max core file size", "1"),
        ("Max locked memory", "65536"),
    }


async def test_threads(sandbox: Sandbox, spec: SandboxSpec) -> None:
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "PYTHON_CPU_COUNT", "NUMEXPR_NUM_THREADS",
             "RAYON_NUM_THREADS", "GOMAXPROCS", "PYTEST_XDIST_AUTO_NUM_WORKERS")  # fmt: skip
    assert await out(sandbox, f"echo {' '.join('$' + name for name in names)}") == " ".join("1" for _ in names) + "\n"
    async with open_sandbox(replace(spec, env={"OMP_NUM_THREADS": "3"})) as other:  # a task may say otherwise
        assert await out(other, "echo $OMP_NUM_THREADS") == "3\n"


async def test_lease(spec: SandboxSpec) -> None:
    async with open_sandbox(replace(spec, limits=replace(LIMITS, lease_s=0.5))) as sandbox:
        with pytest.raises(SandboxLost, match="lease"):
            await sandbox.exec("sleep 100")


async def test_leftovers(spec: SandboxSpec, cache: Path) -> None:
    mounts = Path("/proc/self/mountinfo").read_text()
    before = sorted(path for path in cache.rglob("*") if path.is_file() and "use" not in path.parts)
    async with open_sandbox(spec) as sandbox:
        await sandbox.exec("touch /tmp/mark /root/mark mark; rm -rf /bin/ls /etc/passwd; chmod 000 /tmp")
    async with open_sandbox(spec) as sandbox:
        assert (
            await out(sandbox, "ls /tmp/mark /root/mark mark 2>/dev/null; ls -d /bin/ls /etc/passwd")
            == "/bin/ls\n/etc/passwd\n"
        )
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert sorted(path for path in cache.rglob("*") if path.is_file() and "use" not in path.parts) == before


async def test_image_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.mkdir()
    kept = [part for part in build.programs(*build.TOOLS) if not part[0].name.startswith(("etc", "srv"))]
    links = [
        build.symlink("etc", str(victim)),
        build.symlink("srv", str(victim)),
        build.symlink("testbed", str(victim)),
    ]
    with open_source(str(Built([build.layer(*kept, *links)]).save(tmp_path / "image.tar", "links:1"))) as images:
        default_store().add(images[0])
    tree = tmp_path / "tree"
    tree.mkdir()
    with contextlib.suppress(SandboxError):  # /etc leads nowhere within the image: no place for /etc/hosts
        async with open_sandbox(SandboxSpec(image="links:1", limits=LIMITS)) as sandbox:
            await sandbox.exec("touch /srv/x")
    assert list(victim.iterdir()) == []
    assert stat.S_ISDIR(victim.stat().st_mode)
