"""Containers as sandboxes: images, trees, disk, trouble of the engine, and what is left when an owner dies."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import sandbox_backends
import sandbox_faults
from real_parts import require
from sandbox_backends import IMAGE

from swe_rl.errors import ConfigError, SandboxError
from swe_rl.sandbox import open_sandbox
from swe_rl.sandbox.docker import DockerSandbox, Engine, reap_containers
from swe_rl.sandbox.docker.door import PREFIX
from swe_rl.sandbox.docker.labels import DEADLINE_LABEL, NAMESPACE_LABEL, OWNER_LABEL, labels
from swe_rl.sandbox.owner import is_alive
from swe_rl.types import SandboxSpec

SPEC = replace(sandbox_faults.SPEC, backend="docker", image=IMAGE)
SCRIPTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def available() -> None:
    sandbox_backends.require_mode("docker")


@pytest.fixture
def tiny() -> Iterator[str]:
    """An image of nothing but a shell, with a repository of root's at /testbed."""
    import docker_images

    name = "swe-rl-test-tiny"
    files = {"testbed/readme": b"hello\n", "testbed/pkg/a.py": b"A = 1\n"}
    changes = ["ENV GREETING=hi", "WORKDIR /testbed"]
    client = Engine.shared()._api
    yield docker_images.make_image(client, name, applets=docker_images.APPLETS, files=files, changes=changes)
    client.remove_image(name, force=True)


@pytest.fixture
def bare_shell() -> Iterator[str]:
    import docker_images

    client = Engine.shared()._api
    yield docker_images.make_image(client, "swe-rl-test-shell")
    client.remove_image("swe-rl-test-shell", force=True)


def containers_of(label: str) -> list[str]:
    found = Engine.shared().containers(OWNER_LABEL)
    return [container["Id"] for container in found if container["Labels"][OWNER_LABEL] == label]


# ---- images and trees ------------------------------------------------------------------------------------------


async def test_an_image_with_nothing_but_a_shell(bare_shell: str, layer: Path) -> None:
    async with open_sandbox(replace(SPEC, image=bare_shell, layers=(str(layer),))) as sandbox:
        result = await sandbox.exec('read line < readme; echo "$line"; echo changed > readme; echo $PWD; exit 4')
        assert (result.exit_code, result.stdout) == (4, b"hello\n/testbed\n")
        await sandbox.write_file("new/file", b"x")
        async with await sandbox.fork() as other:
            assert await other.read_file("readme") == b"changed\n"
            assert await other.read_file("new/file") == b"x"
        assert (await sandbox.exec("while :; do :; done", timeout_s=0.5)).outcome == "timeout"


async def test_an_image_that_brings_its_repository(tiny: str) -> None:
    """Its user's files are writable although that user is root; nothing else gives rights."""
    async with open_sandbox(replace(SPEC, image=tiny)) as sandbox:
        result = await sandbox.exec("cat readme; echo more >> readme; rm pkg/a.py; pwd; echo $GREETING $HOME; id -u")
        assert result.stdout == b"hello\n/testbed\nhi /root\n0\n"
        assert b"CapEff:\t0000000000000000" in (await sandbox.exec("cat /proc/self/status")).stdout
        assert (await sandbox.exec("kill -9 1; kill -15 1; echo alive")).stdout == b"alive\n"
        assert (await sandbox.exec("cat /proc/1/environ")).exit_code == 1
        async with await sandbox.fork() as other:
            assert (await other.exec("cat readme; ls pkg")).stdout == b"hello\nmore\n"
            await other.write_file("readme", b"")
        assert await sandbox.read_file("readme") == b"hello\nmore\n"


async def test_root_in_name_cannot_lead_the_supervisor_to_another_socket(tiny: str) -> None:
    """The directory above the mount can be moved there; the supervisor does not go by its name."""
    async with open_sandbox(replace(SPEC, image=tiny)) as sandbox:
        assert isinstance(sandbox, DockerSandbox)
        assert (await sandbox.exec("mv /.swe-rl /moved && mkdir -p /.swe-rl/shared && echo done")).stdout == b"done\n"
        assert sandbox._channel is not None
        sandbox._channel._sock.shutdown(socket.SHUT_RDWR)
        assert (await sandbox.exec("ls /moved")).stdout == b"shared\nsupervisor\n"
        assert sandbox.reconnects == 1


async def test_disk_on_the_storage_of_the_engine_is_measured(tiny: str) -> None:
    async with open_sandbox(replace(SPEC, image=tiny)) as sandbox:
        start = time.monotonic()
        result = await sandbox.exec("dd if=/dev/zero of=/testbed/big bs=1M count=3000; sleep 10; echo never")
        assert result.outcome == "disk_full"
        assert time.monotonic() - start < 10
        assert (await sandbox.exec("rm /testbed/big && echo freed")).stdout == b"freed\n"
        small = await sandbox.exec("mkdir /var; dd if=/dev/zero of=/var/small bs=1M count=2 2>&-; sleep 1; echo x")
        assert (small.outcome, small.stdout) == ("ok", b"x\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes device nodes")
async def test_layers_are_stacked_with_their_deletions(layer: Path) -> None:
    top = layer.parent / "top"
    (top / "pkg").mkdir(parents=True)
    (top / "new").mkdir()
    (top / "new" / "file").write_text("new\n")
    os.mknod(top / "pkg" / "a.py", 0o020000, 0)  # a whiteout
    os.symlink("new/file", top / "readme")  # in place of a file
    async with open_sandbox(replace(SPEC, layers=(str(top), str(layer)))) as sandbox:
        assert (await sandbox.exec("ls pkg new; cat readme; readlink readme")).stdout == (
            b"new:\nfile\n\npkg:\nb.py\nnew\nnew/file\n"
        )
    assert (layer / "pkg" / "a.py").exists()


async def test_layers_and_mounts_are_read_only(layer: Path) -> None:
    spec = replace(SPEC, layers=(str(layer),), readonly_mounts=((str(layer), "/opt/tools"),))
    async with open_sandbox(spec) as sandbox:
        for place in ("/opt/tools/x", "/.swe-rl/layers/0/x", "/.swe-rl/x", "/etc/passwd", "/usr/x"):
            assert (await sandbox.exec(f"echo x > {place}")).exit_code == 1, place
        assert (await sandbox.exec("id -un; echo $HOME")).stdout == b"agent\n/home/agent\n"
    assert sorted(path.name for path in layer.iterdir()) == ["pkg", "readme"]


# ---- trouble of the engine -------------------------------------------------------------------------------------


async def test_docker_engine_trouble_is_typed(layer: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def trouble(spec: SandboxSpec) -> str:
        with pytest.raises(SandboxError) as caught:
            async with open_sandbox(spec):
                pass
        assert "\n" not in str(caught.value)
        return f"{type(caught.value).__name__}: {caught.value}"

    missing = await trouble(replace(SPEC, image="swe-rl-no-such-image"))
    assert missing.startswith("SandboxUnavailable: no such image: swe-rl-no-such-image")
    assert missing.endswith("pull or build it first")
    mount = replace(SPEC, readonly_mounts=(("/nowhere", "/x"),))
    assert (await trouble(mount)).startswith("SandboxError: the Docker Engine could not create a container")
    assert "not a directory" in await trouble(replace(SPEC, layers=(str(layer / "nope"),)))
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert "SandboxUnavailable: no Docker Engine answers" in await trouble(SPEC)
    monkeypatch.setenv("DOCKER_HOST", "tcp://10.0.0.1:2375")
    assert "not an engine of this machine" in await trouble(SPEC)


async def test_specs_that_no_container_can_honour() -> None:
    for bad in (replace(SPEC, image=""), replace(SPEC, isolation="none"), replace(SPEC, workdir="relative")):
        with pytest.raises(ConfigError):
            async with open_sandbox(bad):
                pass


async def test_cancelled_start_leaves_no_container(layer: Path) -> None:
    for delay in (0.0, 0.01, 0.03, 0.1, 0.2):
        sandbox = DockerSandbox(replace(SPEC, layers=(str(layer),)))
        task = asyncio.create_task(sandbox.start())
        await asyncio.sleep(delay)
        if task.cancel():
            with pytest.raises(asyncio.CancelledError):
                await task
        await sandbox.close()  # a fast machine may have been ready
        names = [name for found in Engine.shared()._api.containers(all=True) for name in found["Names"]]
        assert f"/{sandbox._name}" not in names


# ---- what is left ----------------------------------------------------------------------------------------------


def test_sigkill_of_the_owner_leaves_no_container(layer: Path) -> None:
    """The supervisors see that nobody listens for them any more; the engine removes what ended."""
    script = [sys.executable, str(SCRIPTS / "docker_owner.py"), IMAGE, str(layer)]
    with subprocess.Popen(script, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as owner:
        assert owner.stdout is not None
        label = owner.stdout.readline().decode().strip()
        assert len(containers_of(label)) == 2
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    deadline = time.monotonic() + 10
    while containers_of(label) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert containers_of(label) == []
    reap_containers(is_alive)
    assert not [path for path in Path("/tmp").glob(f"{PREFIX}*-{label}-*")]


def test_reaper_removes_what_the_dead_and_the_late_left() -> None:
    api = Engine.shared()._api
    living = labels(600.0)
    cases = {
        "dead": {**living, OWNER_LABEL: "1-1"},
        "late": {**living, DEADLINE_LABEL: "1"},
        "elsewhere": {**living, OWNER_LABEL: "1-1", NAMESPACE_LABEL: "1"},
        "living": living,
    }
    ids = {
        name: api.create_container_from_config({"Image": IMAGE, "Cmd": ["true"], "Labels": case})["Id"]
        for name, case in cases.items()
    }
    try:
        assert reap_containers(is_alive) >= 2  # this engine may have leftovers of others
        left = {found["Id"] for found in Engine.shared().containers(OWNER_LABEL)}
        assert {name for name, id in ids.items() if id in left} == {"elsewhere", "living"}
    finally:
        for id in ids.values():
            Engine.shared().remove(id)


def test_reaper_without_an_engine_finds_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    assert reap_containers(is_alive) == 0


async def test_lease_ends_a_container(layer: Path) -> None:
    spec = replace(SPEC, limits=replace(SPEC.limits, lease_s=1.0))
    sandbox = await DockerSandbox(spec).start()
    try:
        await asyncio.sleep(2.5)
        names = [name for found in Engine.shared()._api.containers(all=True) for name in found["Names"]]
        assert f"/{sandbox._name}" not in names
    finally:
        await sandbox.close()


# ---- an engine that restarts -----------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0, reason="only root starts an engine")
@pytest.mark.parametrize("live", [True, False], ids=["live-restore", "containers end"])
async def test_engine_restarts_under_a_sandbox(
    tmp_path: Path, layer: Path, monkeypatch: pytest.MonkeyPatch, live: bool
) -> None:
    """With live-restore a command does not even notice. Without, the sandbox is lost, and the next one starts."""
    import docker_engine
    import docker_images

    require(docker_engine.is_installed(), "dockerd")
    async with docker_engine.running(tmp_path, live_restore=live) as private:
        monkeypatch.setenv("DOCKER_HOST", private.host)
        image = docker_images.make_image(Engine.shared()._api, "tiny", applets=docker_images.APPLETS)
        spec = replace(SPEC, image=image, layers=(str(layer),))
        async with open_sandbox(spec) as sandbox:
            task = asyncio.create_task(sandbox.exec("sleep 8; echo done", timeout_s=60))
            await asyncio.sleep(0.3)
            stopping = asyncio.create_task(private.stop())
            if live:
                assert (await sandbox.exec("echo while it is down")).stdout == b"while it is down\n"
                await stopping
                start = asyncio.create_task(DockerSandbox(spec).start())  # waits for the engine
                await private.start()
                async with await start as other:
                    assert (await other.exec("echo new")).stdout == b"new\n"
                assert (await task).stdout == b"done\n"
            else:
                with pytest.raises(SandboxError):
                    await task
                await stopping
                await private.start()
        async with open_sandbox(spec) as other:
            assert (await other.exec("cat readme")).stdout == b"hello\n"
        left = Engine.shared().containers(OWNER_LABEL)
        assert left == []
