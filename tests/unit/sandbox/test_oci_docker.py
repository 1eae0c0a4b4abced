"""The same image in a container of a real Docker Engine and in a local sandbox: the same tree."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import oci_images as build
import pytest
from oci_images import Built
from real_parts import require

from swe_rl.errors import ConfigError, ImageError
from swe_rl.sandbox import open_sandbox
from swe_rl.sandbox.oci import default_store
from swe_rl.sandbox.oci.sources import open_source
from swe_rl.types import Limits, SandboxSpec

# Not of the image: what every container gets.
_OURS = "/dev /proc /sys /.dockerenv /etc/hosts /etc/hostname /etc/resolv.conf /etc/mtab"
_PRUNE = " -o ".join(f"-path {path}" for path in _OURS.split())
_LIST = (
    f"find / \\( {_PRUNE} \\) -prune -o -type d -printf 'd %m %p\\n' -o -type l -printf 'l %p %l\\n'"
    " -o -type f -printf 'f %m %n %s %T@ %p\\n' -o -printf '%y %m %p\\n' | sort;"
    f" find / \\( {_PRUNE} \\) -prune -o -type f -print0 | sort -z | xargs -0 sha256sum;"
    " find /app -samefile /app/changed | sort"
)


@pytest.fixture
def engine() -> Iterator[Any]:
    docker = pytest.importorskip("docker")
    try:
        client = docker.from_env(timeout=120)
        client.ping()
    except docker.errors.DockerException as err:
        require(False, f"a Docker Engine ({err})")
    yield client
    client.close()


@pytest.fixture
def saved(engine: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of an image of four layers in the engine."""
    monkeypatch.setenv("SWE_RL_CACHE", str(tmp_path / "cache"))
    tools = build.layer(*build.programs("xargs"))
    built = Built([*build.three_layers(), tools], {"WorkingDir": "/app", "Env": ["PATH=/bin", "GREETING=hi"]})
    name = "swe-rl-tree-test:1"
    with open(built.save(tmp_path / "image.tar", name), "rb") as file:
        engine.images.load(file.read())
    yield name
    engine.images.remove(name, force=True)


async def _local(image: str) -> list[str]:
    limits = Limits(command_s=60.0, output_bytes=2 << 20, memory_bytes=256 << 20)
    async with open_sandbox(SandboxSpec(image=image, limits=limits)) as sandbox:
        result = await sandbox.exec(_LIST)
    assert (result.outcome, result.stderr) == ("ok", b""), result
    return result.stdout.decode().splitlines()


@pytest.mark.parametrize("way", ["archive", "daemon"])
async def test_tree_is_the_same(engine: Any, saved: str, tmp_path: Path, way: str) -> None:
    source = str(tmp_path / "image.tar") if way == "archive" else f"docker-daemon:{saved}"
    with open_source(source) as images:
        default_store().add(images[0])
    output = engine.containers.run(saved, ["sh", "-c", _LIST], network_mode="none", remove=True)
    theirs, ours = output.decode().splitlines(), await _local(saved)
    assert len(ours) > 60
    assert ours == theirs
    names = {line.split(" ", 5)[-1] for line in ours if line.startswith("f ")}
    assert {"/app/changed.other", "/app/dir/third.link", "/app/name with blank\tand tab"} <= names
    assert not {"/app/keep", "/app/sub/inner", "/app/dir/hidden"} & names


def test_image_that_the_daemon_does_not_have(engine: Any) -> None:
    with pytest.raises(ImageError, match="docker pull no-such-image"), open_source("docker-daemon:no-such-image:1"):
        pass


def test_no_daemon_is_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("docker")
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/none.sock")
    with (
        pytest.raises(ConfigError, match="the Docker daemon does not answer") as caught,
        open_source("docker-daemon:x"),
    ):
        pass
    assert "\n" not in str(caught.value)
