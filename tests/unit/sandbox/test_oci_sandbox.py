"""A local sandbox whose root is an imported image."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import oci_images as build
import pytest
from oci_images import Built
from real_parts import require

import swe_rl
from swe_rl.errors import ConfigError, ImageError, SandboxError, SandboxUnavailable
from swe_rl.protocols import Sandbox
from swe_rl.sandbox import open_sandbox
from swe_rl.sandbox.oci import default_store
from swe_rl.sandbox.oci.sources import open_source
from swe_rl.types import Limits, SandboxSpec

IS_ROOT = os.geteuid() == 0
LIMITS = Limits(command_s=20.0, disk_bytes=32 << 20, memory_bytes=256 << 20)
Import = Callable[..., str]


@pytest.fixture(scope="module", autouse=True)
def available() -> None:
    async def attempt() -> None:
        async with open_sandbox(SandboxSpec()):
            pass

    try:
        asyncio.run(attempt())
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def put(cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Import:
    """Imports an image into a store of this module; returns its digest."""
    monkeypatch.setenv("SWE_RL_CACHE", str(cache))

    def run(built: Built, name: str = "") -> str:
        with open_source(str(built.save(tmp_path / "image.tar", name))) as images:
            return "sha256:" + default_store().add(images[0]).image_id

    return run


def base(*more: Any, **settings: Any) -> Built:
    layers = [build.base_layer(), *([build.layer(*more)] if more else [])]
    return Built(layers, settings)


def spec(image: str, **fields: Any) -> SandboxSpec:
    return SandboxSpec(**{"image": image, "limits": LIMITS, **fields})


async def out(sandbox: Sandbox, command: str) -> bytes:
    result = await sandbox.exec(command)
    assert result.outcome == "ok", result
    return result.stdout


async def test_tree_is_that_of_the_image(put: Import) -> None:
    async with open_sandbox(spec(put(Built(build.three_layers(), {"WorkingDir": "/app"})))) as sandbox:
        listed = (await out(sandbox, "pwd; find . -printf '%y %m %p %l\\n' | sort")).decode().splitlines()
        assert listed[0] == "/app"
        assert set(listed[1:]) == {
            "d 755 . ",
            "f 755 ./gone ",
            "f 640 ./changed ",
            "f 640 ./changed.other ",
            "f 600 ./changed.link ",
            "d 700 ./dir ",
            "f 644 ./dir/new ",
            "f 644 ./dir/third ",
            "f 644 ./dir/third.link ",
            "l 777 ./to-etc /etc/passwd",
            "d 755 ./becomes-dir ",
            "f 644 ./becomes-dir/y ",
            "f 444 ./becomes-file ",
            "l 777 ./becomes-link keep",
            "f 6755 ./set-id ",
            "f 2711 ./set-id2 ",
            "d 1777 ./sticky ",
            "p 640 ./fifo ",
            "f 644 ./name with blank\tand tab ",
            "f 644 ./été ",
            "d 500 ./empty ",
        }
        assert await out(sandbox, "cat changed changed.link gone; stat -c %h dir/third") == b"after\nbefore\nagain\n2\n"


async def test_user_environment_and_shell(put: Import) -> None:
    settings = {"Env": ["PATH=/bin:/opt", "A=b=c", "OMP_NUM_THREADS=64", "TZ=Europe/Rome"], "User": "app"}
    image = put(base(build.folder("srv"), build.folder("srv/app", mode=0o700), **settings, WorkingDir="/srv/app"))
    async with open_sandbox(spec(image, env={"EXTRA": "1"})) as sandbox:
        assert await out(sandbox, "id -u; id -g; pwd; echo x > f; stat -c %u:%g . f") == (
            b"4242\n4343\n/srv/app\n4242:4343\n4242:4343\n"
        )
        shown = await out(sandbox, 'echo "$PATH $A $OMP_NUM_THREADS $TZ $HOME $SHELL $EXTRA $TMPDIR."')
        assert shown == b"/bin:/opt b=c 1 Europe/Rome /srv/app /bin/bash 1 .\n"
        assert await sandbox.read_file("f") == b"x\n"
        await sandbox.write_file("/srv/new/file", b"1")
        assert await out(sandbox, "cat /srv/new/file") == b"1"


async def test_nothing_said_is_not_root_and_owns_everything(put: Import) -> None:
    image = put(base(build.folder("testbed"), build.entry("testbed/f", b"1\n")))
    async with open_sandbox(spec(image)) as sandbox:
        assert await out(sandbox, "id -u; pwd; echo $HOME; echo 2 >> f; rm /etc/group; echo x > /root/x; cat f") == (
            b"1000\n/testbed\n/root\n1\n2\n"
        )
    async with open_sandbox(spec(image)) as sandbox:  # and of that nothing stays
        assert await out(sandbox, "cat f; ls -A /root; test -e /etc/group") == b"1\n"


def _uids_outside(marker: str) -> list[str]:
    """Of the processes with that argument, as the host sees them."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            if entry.name.isdigit() and marker.encode() in (entry / "cmdline").read_bytes().split(b"\0"):
                found.append((entry / "status").read_text().split("Uid:")[1].split()[0])
        except OSError:
            continue  # it has ended
    return found


@pytest.mark.parametrize("user", ["root", "0:0", "0:50"])
async def test_root_of_an_image_has_no_rights(put: Import, user: str) -> None:
    async with open_sandbox(spec(put(base(User=user)))) as sandbox:
        found = await out(
            sandbox, "id -u; grep -E '^(CapEff|CapBnd|NoNewPrivs)' /proc/self/status; touch /etc/x; echo on"
        )
        assert found.split() == [
            b"0", b"CapEff:", b"0000000000000000", b"CapBnd:", b"0000000000000000", b"NoNewPrivs:", b"1", b"on",
        ]  # fmt: skip
        assert (await sandbox.exec("mount -t tmpfs none /tmp || mknod /tmp/d c 1 1")).exit_code != 0
        result = await sandbox.exec("kill -9 1; kill -STOP 1; cat /proc/1/environ /proc/1/mem; echo > /proc/sys/vm/x")
        assert (result.outcome, result.stdout) == ("nonzero", b"")
        assert await out(sandbox, "echo alive") == b"alive\n"
        if IS_ROOT:
            marker = f"41{os.getpid()}"
            task = asyncio.create_task(sandbox.exec(f"exec sleep {marker}", timeout_s=1))
            await asyncio.sleep(0.3)
            uids = _uids_outside(marker)
            await task
            assert uids == ["65521"]


async def test_layers_of_a_task_lie_over_the_image(put: Import, tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    tree.mkdir()
    (tree / "code").write_text("1\n")
    image = put(base(build.folder("testbed"), build.entry("testbed/old"), WorkingDir="/elsewhere"))
    async with open_sandbox(spec(image, layers=(str(tree),))) as sandbox:
        assert await out(sandbox, "pwd; ls; echo 2 >> code; touch /root/x; cat code; stat -c %u code") == (
            b"/testbed\ncode\n1\n2\n1000\n"
        )
        other = await sandbox.fork()
        async with other:
            assert await out(other, "cat code; ls -A /root") == b"1\n2\n"
    assert (tree / "code").read_text() == "1\n"


async def test_fork_copies_all_that_was_written_to_an_image(put: Import) -> None:
    image = put(base(build.folder("d"), build.entry("d/f"), WorkingDir="/d"))
    async with open_sandbox(spec(image)) as sandbox:
        await out(sandbox, "rm f; echo 1 > g; touch /etc/new; rm -r /srv 2>/dev/null; rm -r /var && mkdir /var")
        other = await sandbox.fork()
        async with other:
            assert await out(other, "pwd; ls; cat g; ls /etc/new; echo 2 > g; ls /var") == b"/d\ng\n1\n/etc/new\n"
        assert await out(sandbox, "cat g") == b"1\n"


async def test_work_directory(put: Import) -> None:
    own = put(base(WorkingDir="/made/on/demand"))
    async with open_sandbox(spec(own)) as sandbox:
        assert await out(sandbox, "pwd; touch f; ls") == b"/made/on/demand\nf\n"
    async with open_sandbox(spec(own, workdir="/var")) as sandbox:
        assert await out(sandbox, "pwd") == b"/var\n"
    async with open_sandbox(spec(put(base()))) as sandbox:
        assert await out(sandbox, "pwd; touch /f") == b"/\n"
    for bad in ({"workdir": "relative"}, {"workdir": "/proc"}, {"workdir": "/", "layers": ("/usr",)}):
        with pytest.raises(ConfigError, match="workdir"):
            async with open_sandbox(spec(own, **bad)):
                pass


async def test_what_every_container_has(put: Import) -> None:
    image = put(base(build.entry("etc/hosts", b"of the image\n"), build.entry("etc/resolv.conf", b"kept\n")))
    async with open_sandbox(spec(image)) as sandbox:
        assert await out(sandbox, "head -n 1 /etc/hosts; cat /etc/resolv.conf /etc/hostname") == (
            b"127.0.0.1 localhost sandbox\nkept\nsandbox\n"
        )
        assert await out(sandbox, "echo x > /dev/null; head -c 2 /dev/zero; readlink /dev/fd; echo 1 > /dev/shm/x") == (
            b"\0\0/proc/self/fd\n"
        )
        assert await out(sandbox, "cat /proc/self/comm; ls -A /sys; grep -c scratch /proc/self/mountinfo; true") == (
            b"cat\n0\n"
        )
        assert (await sandbox.exec("ls -A / | grep scratch")).exit_code == 1


async def test_limits_hold_over_an_image(put: Import) -> None:
    image = put(base())
    async with open_sandbox(spec(image)) as sandbox:
        assert (await sandbox.exec("dd if=/dev/zero of=/big bs=1M count=100 2>/dev/null")).outcome == "disk_full"
        assert (await sandbox.exec("rm /big; sleep 100", timeout_s=0.3)).outcome == "timeout"
        assert (await sandbox.exec("bomb() { bomb | bomb & }; bomb")).outcome == "pids_limit"
        assert await out(sandbox, "echo x > /big; cat /big") == b"x\n"


HOSTILE = {
    "etc": [build.symlink("etc", "/etc")],
    "proc": [build.symlink("proc", "/etc")],
    "dev": [build.symlink("dev", "/tmp")],
    "relative dev": [build.symlink("dev", "../../../../tmp")],
    "workdir": [build.symlink("testbed", "/root")],
    "scratch": [build.symlink(".scratch", "/tmp")],
    "hosts": [build.folder("etc"), build.symlink("etc/hosts", "/etc/swe-rl-must-not-appear")],
    "proc as a file": [build.entry("proc", b"x")],
}


@pytest.mark.parametrize("case", HOSTILE)
async def test_links_of_an_image_do_not_reach_the_host(
    put: Import, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mount points of ours that the image made into links: they lead somewhere within it, or the start fails."""
    tree = tmp_path / "tree"
    tree.mkdir()
    taken = {path for info, _ in HOSTILE[case] for path in [info.name]}
    kept = [
        (i, d)
        for i, d in build.programs(*build.TOOLS)
        if not any(i.name == t or i.name.startswith(t + "/") for t in taken)
    ]
    before = {place: sorted(os.listdir(place)) for place in ("/etc", "/", "/root") if os.access(place, os.R_OK)}
    if case in ("proc", "dev", "relative dev", "scratch", "proc as a file"):
        with pytest.raises(ImageError, match=r"a link or a file at /"):
            put(Built([build.layer(*kept, *HOSTILE[case])]))
        monkeypatch.setattr("swe_rl.sandbox.oci.image_config._OURS", ())  # the launcher must not rely on that
    image = put(Built([build.layer(*kept, *HOSTILE[case])]))
    with contextlib.suppress(SandboxError):
        async with open_sandbox(spec(image, layers=(str(tree),))) as sandbox:
            await sandbox.exec("touch /testbed/x /tmp/x /etc/x")
    assert {place: sorted(os.listdir(place)) for place in before} == before


async def test_many_layers(put: Import) -> None:
    layers = [build.base_layer()]
    layers += [
        build.layer(build.folder("n"), build.entry(f"n/{i}", b"%d" % i), build.entry("last", b"%d" % i))
        for i in range(127)
    ]
    async with open_sandbox(spec(put(Built(layers)))) as sandbox:
        assert await out(sandbox, "ls /n | grep -c .; cat /last") == b"127\n126"


async def test_missing_image_is_one_line(put: Import) -> None:
    with pytest.raises(ImageError) as caught:
        async with open_sandbox(SandboxSpec(image="no/such:1")):
            pass
    assert str(caught.value) == "image 'no/such:1' is not imported: swe-rl sandbox import no/such:1"


async def test_image_without_isolation_is_refused() -> None:
    with pytest.raises(ConfigError, match="cannot enter the image x:1: use namespaces"):
        async with open_sandbox(SandboxSpec(image="x:1", isolation="none")):
            pass


async def test_names_move_with_the_next_import(put: Import) -> None:
    put(base(build.entry("v", b"1"), WorkingDir="/tmp"), "moving:1")
    async with open_sandbox(spec("moving:1")) as sandbox:
        assert await out(sandbox, "cat /v") == b"1"
    put(base(build.entry("v", b"2"), WorkingDir="/tmp"), "moving:1")
    async with open_sandbox(spec("moving:1")) as sandbox:
        assert await out(sandbox, "cat /v") == b"2"


async def test_nothing_of_the_host_is_visible(put: Import, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("API_KEY", "hunter2")
    async with open_sandbox(spec(put(base()))) as sandbox:
        for path in (sys.base_prefix, Path(__file__), Path.home() / ".cache", Path(swe_rl.__file__)):
            assert (await sandbox.exec(f"ls -d '{path}'")).exit_code == 2, path
        assert b"hunter2" not in await out(sandbox, "env; cat /proc/self/environ")
        assert b"SWE_RL" not in await out(sandbox, "env; cat /proc/self/mountinfo")


_AS_USER = """
import asyncio, functools, os, sys
from pathlib import Path
import oci_images as build
from swe_rl.sandbox import base_root, launch, open_sandbox
import swe_rl.sandbox.local
from swe_rl.sandbox.oci import default_store, gc
from swe_rl.sandbox.oci.sources import open_source
from swe_rl.types import SandboxSpec
folder = Path(sys.argv[2])
os.chown(folder, 1000, 1000)
three = build.Built(build.three_layers(), {"User": "app", "WorkingDir": "/app"}).save(folder / "image.tar")
os.setgroups([]); os.setresgid(1000, 1000, 1000); os.setresuid(1000, 1000, 1000)
launch.sandboxd_path = functools.cache(lambda: sys.argv[1])
os.environ["SWE_RL_CACHE"] = str(folder / "cache")
with open_source(str(three)) as images:
    image = default_store().add(images[0])
async def go():
    async with open_sandbox(SandboxSpec(image="test:1")) as sandbox:
        done = await sandbox.exec(
            "id -u; pwd; ls -A dir becomes-dir; cat changed; stat -c %a:%u set-id empty; rm keep gone; rm -r sticky;"
            "echo new > gone; chmod 700 empty; touch empty/x; ls /etc/passwd")
        print(done.stdout.decode(), done.stderr.decode())
        other = await sandbox.fork()
        print((await other.exec("cat gone; ls empty; ls sticky 2>/dev/null")).stdout.decode())
        await other.close()
asyncio.run(go())
print(gc.collect(default_store()).kept_in_use, len(default_store().images()))
"""


@pytest.fixture
def open_dir() -> Iterator[Path]:
    """A directory that every user may enter, which pytest's own are not whenever another pytest starts."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o755)
    yield path
    shutil.rmtree(path)


@pytest.mark.skipif(not IS_ROOT, reason="the whole file runs as an ordinary user")
def test_an_ordinary_user_imports_and_opens(open_dir: Path) -> None:
    from swe_rl.sandbox.binary import sandboxd_path

    binary, home = open_dir / "swe-sandboxd", open_dir / "home"
    home.mkdir()
    shutil.copy(sandboxd_path(), binary)
    binary.chmod(0o755)
    root = Path(swe_rl.__file__).parents[1]
    env = {**os.environ, "PYTHONPATH": f"{root}:{Path(__file__).parent}"}
    done = subprocess.run(
        [sys.executable, "-c", _AS_USER, str(binary), str(home)], capture_output=True, text=True, timeout=120, env=env
    )
    assert done.returncode == 0, done.stderr
    assert (
        done.stdout.split()
        == (
            "4242 /app becomes-dir: y dir: new third third.link after 6755:4242 500:4242 /etc/passwd "
            "rm: cannot remove 'keep': No such file or directory new x 0 1"
        ).split()
    )
