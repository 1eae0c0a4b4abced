"""Hostile images, hostile code at the socket, and an owner in a bad place."""

from __future__ import annotations

import array
import asyncio
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import sandbox_backends
import sandbox_faults

from swe_rl.errors import ConfigError, SandboxError, SandboxUnavailable
from swe_rl.sandbox import open_sandbox, wire
from swe_rl.sandbox.docker import DockerSandbox, Engine, reap_containers
from swe_rl.sandbox.docker import sandbox as docker_sandbox
from swe_rl.sandbox.docker.door import PREFIX
from swe_rl.sandbox.docker.labels import OWNER_LABEL
from swe_rl.sandbox.owner import OwnerLease, is_alive

SPEC = replace(sandbox_faults.SPEC, backend="docker", image=sandbox_backends.IMAGE)
Maker = Callable[..., str]


@pytest.fixture(autouse=True)
def available() -> None:
    sandbox_backends.require_mode("docker")


@pytest.fixture
def make() -> Iterator[Maker]:
    """Makes an image that goes away after the test."""
    import docker_images

    client, names = Engine.shared()._api, []

    def one(name: str, **how: Any) -> str:
        names.append(f"swe-rl-test-{name}")
        return docker_images.make_image(client, names[-1], applets=docker_images.APPLETS, **how)

    yield one
    for name in names:
        client.remove_image(name, force=True)


@pytest.fixture
async def sandbox(layer: Path) -> AsyncIterator[DockerSandbox]:
    async with await DockerSandbox(replace(SPEC, layers=(str(layer),))).start() as opened:
        yield opened


# ---- images ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["nosuch", "UPPER CASE", "a" * 300, "../x", "-x", "\udcff", "a\0b"])
async def test_names_of_no_image(name: str) -> None:
    """No retry cures them."""
    with pytest.raises((SandboxUnavailable, ConfigError)) as err:
        await DockerSandbox(replace(SPEC, image=name)).start()
    assert "image" in str(err.value)


async def test_an_image_without_a_shell(layer: Path) -> None:
    """Said at the start, not by each command."""
    import io
    import tarfile

    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("nothing"), io.BytesIO())
    Engine.shared()._api.import_image_from_data(stream.getvalue(), repository="swe-rl-test-empty")
    try:
        with pytest.raises(SandboxError, match="/bin/sh"):
            await DockerSandbox(replace(SPEC, image="swe-rl-test-empty", layers=(str(layer),))).start()
    finally:
        Engine.shared()._api.remove_image("swe-rl-test-empty", force=True)


async def test_volumes_of_an_image_have_a_size(make: Maker, layer: Path) -> None:
    """The engine would put them on its storage, where nothing bounds them."""
    image = make("volume", changes=["VOLUME /data"])
    async with open_sandbox(replace(SPEC, image=image, layers=(str(layer),))) as sandbox:
        result = await sandbox.exec("dd if=/dev/zero of=/data/big bs=1M count=64")
        assert result.outcome == "disk_full", result
    image = make("volume-workdir", files={"testbed/readme": b"hello\n"}, changes=["VOLUME /testbed"])
    with pytest.raises(ConfigError, match="VOLUME"):
        await DockerSandbox(replace(SPEC, image=image)).start()


async def test_nothing_is_too_deep_to_be_measured(make: Maker) -> None:
    """A tree that no walk gets to the end of has no known size: that is as good as a full disk."""
    image = make("deep", files={"testbed/readme": b"hello\n"}, changes=["WORKDIR /testbed"])
    deep = "i=0; while [ $i -lt 300 ]; do mkdir d && cd d; i=$((i + 1)); done"
    async with open_sandbox(replace(SPEC, image=image)) as sandbox:
        result = await sandbox.exec(f"{deep}; dd if=/dev/zero of=big bs=1M count=64; sleep 15")
        assert result.outcome == "disk_full", result
        assert (await sandbox.exec("rm -r d; echo well")).stdout == b"well\n"


async def test_the_group_that_an_image_names(make: Maker) -> None:
    accounts = {
        "etc/passwd": b"root:x:0:0::/root:/bin/sh\napp:x:1234:1234::/srv/app:/bin/sh\n",
        "etc/group": b"root:x:0:\nstaff:x:4321:\n",
        "testbed/readme": b"hello\n",
    }
    image = make("group", files=accounts, changes=["USER app:staff"])
    async with open_sandbox(replace(SPEC, image=image)) as sandbox:
        assert (await sandbox.exec("id -u; id -g")).stdout == b"1234\n4321\n"
    image = make("no-group", files=accounts, changes=["USER app:nobody"])
    with pytest.raises(ConfigError, match="nobody"):
        await DockerSandbox(replace(SPEC, image=image)).start()


async def test_where_the_repository_of_an_image_is(make: Maker) -> None:
    """As on the other backend: /testbed if the image has it, else what it says is its own."""
    both = make("both", files={"testbed/readme": b"hello\n", "app/x": b"x"}, changes=["WORKDIR /app"])
    own = make("own", files={"app/x": b"x"}, changes=["WORKDIR /app"])
    for image, place in ((both, b"/testbed\n"), (own, b"/app\n")):
        async with open_sandbox(replace(SPEC, image=image)) as sandbox:
            assert (await sandbox.exec("pwd")).stdout == place


async def test_accounts_of_no_end(make: Maker, layer: Path) -> None:
    image = make("accounts", files={"etc/passwd": b"x" * (8 << 20)})
    with pytest.raises(ConfigError, match="/etc/passwd"):
        await DockerSandbox(replace(SPEC, image=image, layers=(str(layer),))).start()


# ---- the socket ------------------------------------------------------------------------------------------------


async def test_strangers_cannot_hand_us_descriptors(sandbox: DockerSandbox) -> None:
    """Root in name may connect; what it sends along must not fill this process's table."""
    assert sandbox._door is not None
    before = len(os.listdir("/proc/self/fd"))
    with socket.socket(socket.AF_UNIX) as caller, open("/dev/null") as null:
        caller.setblocking(False)
        await asyncio.get_running_loop().sock_connect(caller, str(sandbox._door.shared / "owner"))
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [null.fileno()] * 4))]
        for _ in range(20):
            try:
                caller.sendmsg([wire.frame(wire.HELLO, 0, bytes(96))[:1]], rights)
            except OSError:
                break
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
        assert len(os.listdir("/proc/self/fd")) <= before + 3  # both ends, and /dev/null


async def test_strangers_cannot_hand_us_memory(sandbox: DockerSandbox) -> None:
    """The greeting has one size: who announces another is sent away before it is read."""
    assert sandbox._door is not None
    with socket.socket(socket.AF_UNIX) as caller:
        caller.setblocking(False)
        await asyncio.get_running_loop().sock_connect(caller, str(sandbox._door.shared / "owner"))
        caller.send(wire.frame(wire.HELLO, 0, bytes(8 << 20))[:2000])
        await asyncio.sleep(0.1)
        with pytest.raises((BrokenPipeError, ConnectionResetError)):
            caller.send(bytes(1))
    assert (await sandbox.exec("echo well")).stdout == b"well\n"


# ---- starting and ending ---------------------------------------------------------------------------------------


async def test_a_supervisor_that_ends_at_once_is_noticed_at_once(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = docker_sandbox.container_config

    def without_nonce(*args: Any, **named: Any) -> dict[str, Any]:
        return {**real(*args, **named), "Env": ["SWE_RL_NONCE=short"]}

    monkeypatch.setattr(docker_sandbox, "container_config", without_nonce)
    start = time.monotonic()
    with pytest.raises(SandboxError, match="ended before"):
        await DockerSandbox(replace(SPEC, layers=(str(layer),))).start()
    assert time.monotonic() - start < 30


async def test_a_cancelled_close_can_be_repeated(layer: Path) -> None:
    sandbox = await DockerSandbox(replace(SPEC, layers=(str(layer),))).start()
    closing = asyncio.create_task(sandbox.close())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    await sandbox.close()
    names = [name for found in Engine.shared()._api.containers(all=True) for name in found["Names"]]
    assert f"/{sandbox._name}" not in names


async def test_every_container_says_whose_it_is(layer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that look into an image: an owner may be killed while they are there."""
    engine = Engine(Engine.shared().host)
    made: list[dict[str, Any]] = []
    real = engine._api.create_container_from_config

    def note(config: dict[str, Any], **named: Any) -> Any:
        made.append(config)
        return real(config, **named)

    monkeypatch.setattr(engine._api, "create_container_from_config", note)
    monkeypatch.setattr(Engine, "shared", staticmethod(lambda: engine))
    lease = OwnerLease.acquire("run-7")
    try:
        async with open_sandbox(replace(SPEC, layers=(str(layer),))):
            pass
    finally:
        lease.release()
    assert len(made) == 4  # a look inside, two trials, the sandbox
    assert all(OWNER_LABEL in config["Labels"] for config in made)
    assert all(config["Labels"]["swe-rl.run"] == "run-7" for config in made)


async def test_a_jump_of_the_clock_ends_nothing(sandbox: DockerSandbox, monkeypatch: pytest.MonkeyPatch) -> None:
    later = time.time() + 1e6
    monkeypatch.setattr(time, "time", lambda: later)
    reap_containers(is_alive)
    assert (await sandbox.exec("echo on")).stdout == b"on\n"


def test_reaper_spares_sockets_of_other_process_namespaces(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Owners in containers that share this directory for temporary files have pids that mean nothing here."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ours = os.stat("/proc/self/ns/pid").st_ino
    elsewhere, dead = tmp_path / f"{PREFIX}{ours + 1}-1-1-abc", tmp_path / f"{PREFIX}{ours}-1-1-abc"
    elsewhere.mkdir()
    dead.mkdir()
    reap_containers(is_alive)
    assert elsewhere.exists()
    assert not dead.exists()


# ---- code inside -----------------------------------------------------------------------------------------------


async def test_links_that_change_while_files_are_read(sandbox: DockerSandbox) -> None:
    """A read has a command's rights, whatever its path becomes meanwhile."""
    swap = "while :; do ln -sfn /etc/hostname x; ln -sfn /proc/1/environ x; rm -f x; echo fine > x; done"
    await sandbox.exec(f"({swap}) >/dev/null 2>&1 & true")
    assert sandbox._door is not None
    for _ in range(200):
        try:
            assert sandbox._door._nonce not in await sandbox.read_file("x")
        except OSError:
            continue


async def test_a_fork_follows_no_link_that_changes(sandbox: DockerSandbox) -> None:
    """The copying supervisor may read all of its container; a link must not lead it to its own secrets."""
    swap = "while :; do ln -sfn /proc/self/environ x; rm -f x; mkdir x; rmdir x; echo fine > x; rm -f x; done"
    await sandbox.exec(f"({swap}) >/dev/null 2>&1 & true")
    for _ in range(3):
        async with await sandbox.fork() as other:
            assert other._door is not None
            found = await other.exec("cat x 2>/dev/null; true")
            assert other._door._nonce not in found.stdout


async def test_sixteen_at_once_and_eight_commands_in_each(layer: Path) -> None:
    spec = replace(SPEC, layers=(str(layer),))
    boxes = [DockerSandbox(spec) for _ in range(16)]
    try:
        await asyncio.gather(*(box.start() for box in boxes))
        results = await asyncio.gather(*(box.exec(f"echo {i}") for box in boxes for i in range(8)))
        assert [result.stdout for result in results] == [b"%d\n" % i for _ in boxes for i in range(8)]
    finally:
        await asyncio.gather(*(box.close() for box in boxes))
