"""What the engine is told: pure functions, no engine needed."""

from __future__ import annotations

import re
import struct
from dataclasses import replace
from pathlib import Path

import pytest

import swe_rl.sandbox.docker
from swe_rl.config.sandbox import SandboxConfig, validate_sandbox
from swe_rl.errors import ConfigError, SandboxUnavailable
from swe_rl.sandbox import wire
from swe_rl.sandbox.docker import container
from swe_rl.sandbox.docker.enforcement import gaps
from swe_rl.sandbox.docker.engine import Abilities, Engine, Image
from swe_rl.types import Limits, SandboxSpec

IMAGE = Image(
    id="sha256:1",
    env={"PATH": "/opt/bin:/bin", "LANG": "de_DE.UTF-8", "HOME": "/elsewhere", "OMP_NUM_THREADS": "64"},
    passwd=b"root:x:0:0:root:/root:/bin/sh\napp:x:33:44:app:/srv/app:/bin/sh",
    group=b"",
    user="",
    workdir="/",
    directories=frozenset(),
    volumes=(),
)
NONE = Abilities(spares_supervisor=False, has_quota=False)
ALL = Abilities(spares_supervisor=True, has_quota=True)
LIMITS = Limits(memory_bytes=100 << 20, disk_bytes=8 << 20, pids=20, lease_s=90)
SPEC = SandboxSpec(backend="docker", image="x", limits=LIMITS)


@pytest.fixture
def layer(tmp_path: Path) -> Path:
    tree = tmp_path / "tree"
    (tree / "a").mkdir(parents=True)
    (tree / "a" / "one").write_bytes(b"x")
    (tree / "two").write_bytes(bytes(4097))
    return tree


def config(spec: SandboxSpec, image: Image = IMAGE, abilities: Abilities = NONE) -> dict[str, object]:
    return container.container_config(
        spec,
        image,
        nonce="n" * 64,
        directory=Path("/d"),
        shared=Path("/d/shared"),
        program="/p",
        abilities=abilities,
    )


def test_limits_and_rights(layer: Path) -> None:
    host = config(replace(SPEC, layers=(str(layer),)))["HostConfig"]
    assert isinstance(host, dict)
    assert (host["NetworkMode"], host["CapDrop"], host["SecurityOpt"]) == ("none", ["ALL"], ["no-new-privileges"])
    assert set(host["CapAdd"]) == {"CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID"}
    assert host["Memory"] == host["MemorySwap"] == (100 + 8 + 16 << 20) + 3 * 4096  # the tree takes three pages
    assert host["PidsLimit"] == 48
    assert host["AutoRemove"]
    assert host["ReadonlyRootfs"]
    assert f"size={(8 << 20) + 3 * 4096},nr_inodes={2048 + 4096 + 3},uid=1000" in host["Tmpfs"]["/testbed"]
    assert set(host["Tmpfs"]) == {"/tmp", "/var/tmp", "/home/agent", "/testbed"}
    assert all(mount["ReadOnly"] for mount in host["Mounts"])


def test_processors_and_another_runtime_when_asked_for() -> None:
    plain = config(SPEC)["HostConfig"]
    assert isinstance(plain, dict)
    assert not {"Runtime", "NanoCpus"} & set(plain)
    host = config(replace(SPEC, runtime="runsc", limits=replace(LIMITS, cpus=0.5)))["HostConfig"]
    assert isinstance(host, dict)
    assert (host["Runtime"], host["NanoCpus"]) == ("runsc", 500_000_000)


def test_a_tree_that_grew_is_measured_again(layer: Path) -> None:
    assert container.tree_size((str(layer),)) == (3 * 4096, 3)
    (layer / "three").write_bytes(b"")
    assert container.tree_size((str(layer), str(layer))) == (6 * 4096, 8)


def test_what_the_engine_can_grant_is_used(layer: Path) -> None:
    image = replace(IMAGE, directories=frozenset({"/testbed"}))
    host = config(SPEC, image, ALL)["HostConfig"]
    assert isinstance(host, dict)
    assert "SYS_RESOURCE" in host["CapAdd"]
    assert host["StorageOpt"] == {"size": str(8 << 20)}
    capped = config(replace(SPEC, layers=(str(layer),)), image, ALL)["HostConfig"]
    assert isinstance(capped, dict)
    assert "StorageOpt" not in capped  # nothing can be written to the storage


def test_what_cannot_be_kept_is_named_with_a_cure() -> None:
    whole = {"MemoryLimit": True, "SwapLimit": True, "PidsLimit": True, "SecurityOptions": ["name=seccomp"]}
    assert gaps(whole, ALL) == []
    assert [text.split()[0] for text, _ in gaps({}, NONE)] == ["memory", "swap", "processes", "the", "only", "a"]
    assert all(cure for _, cure in gaps({}, NONE))


def test_an_images_own_work_directory() -> None:
    image = replace(IMAGE, workdir="/repo", directories=frozenset({"/repo"}))
    spec = container.with_workdir(SPEC, image)
    assert spec.workdir == "/repo"
    host = config(spec, image)["HostConfig"]
    assert isinstance(host, dict)
    assert not host["ReadonlyRootfs"]
    assert set(host["Tmpfs"]) == {"/tmp", "/var/tmp"}
    assert container.with_workdir(replace(SPEC, workdir="/other"), image).workdir == "/other"
    assert container.with_workdir(replace(SPEC, layers=("/x",)), image).workdir == "/testbed"


@pytest.mark.parametrize(
    ("user", "want"),
    [
        ("", (0, 0, "root", "/root")),
        ("app", (33, 44, "app", "/srv/app")),
        ("33:7", (33, 7, "app", "/srv/app")),
        ("5000", (5000, 5000, "5000", "/tmp")),
    ],
)
def test_commands_of_an_image_with_a_repository_run_as_its_user(user: str, want: tuple[int, int, str, str]) -> None:
    image = replace(IMAGE, user=user, directories=frozenset({"/testbed"}))
    who = container.account(SPEC, image)
    assert (who.uid, who.gid, who.name, who.home) == want
    assert container.account(SPEC, replace(image, directories=frozenset())) == container.AGENT
    assert container.account(replace(SPEC, layers=("/x",)), image) == container.AGENT


def test_a_user_that_the_image_does_not_have() -> None:
    with pytest.raises(ConfigError, match="'nobody-here'"):
        container.account(SPEC, replace(IMAGE, user="nobody-here", directories=frozenset({"/testbed"})))


def test_setup_of_the_supervisor() -> None:
    body = container.setup_body(replace(SPEC, layers=("/l",), env={"GREETING": "hi"}), IMAGE)
    assert struct.unpack_from("<6Q", body) == (100 << 20, 20, 8 << 20, 90_000, 0, 0)
    for item in (
        wire.item(wire.WORKDIR, "/testbed"),
        wire.item(wire.LAYER, "/.swe-rl/layers/0"),
        wire.item(wire.USER, "1000", "1000"),
        wire.item(wire.ENV, "PATH=/opt/bin:/bin"),
        wire.item(wire.ENV, "LANG=de_DE.UTF-8"),
        wire.item(wire.ENV, "HOME=/home/agent"),
        wire.item(wire.ENV, "OMP_NUM_THREADS=1"),
        wire.item(wire.ENV, "GREETING=hi"),
    ):
        assert body.count(item) == 1


def test_accounts_gain_the_agent_and_keep_the_rest(tmp_path: Path) -> None:
    container.write_accounts(IMAGE, tmp_path)
    assert (tmp_path / "passwd").read_bytes() == IMAGE.passwd + b"\nagent:x:1000:1000:agent:/home/agent:/bin/sh\n"
    assert (tmp_path / "group").read_bytes() == b"agent:x:1000:\n"
    taken = replace(IMAGE, passwd=b"somebody:x:1000:1000::/srv/somebody:/bin/sh\n")
    container.write_accounts(taken, tmp_path)
    assert (tmp_path / "passwd").read_bytes() == taken.passwd


def test_an_engine_elsewhere_is_refused() -> None:
    with pytest.raises(SandboxUnavailable, match="cannot call back"):
        Engine("ssh://user@host")


def test_every_line_of_the_threat_model_names_a_test() -> None:
    text = swe_rl.sandbox.docker.__doc__ or ""
    names = set(re.findall(r"test_\w+", text))
    suites = Path(__file__).parents[2].joinpath("contracts").glob("test_*.py")
    known = set(re.findall(r"def (test_\w+)", "".join(path.read_text() for path in suites)))
    assert len(names) > 12
    assert names <= known


def test_configuration() -> None:
    validate_sandbox(SandboxConfig(backend="docker", image="x", daemon_calls=3))
    with pytest.raises(ConfigError, match=r"sandbox\.runtime=runsc does nothing for sandbox\.backend=local"):
        validate_sandbox(SandboxConfig(runtime="runsc"))
    with pytest.raises(ConfigError, match=r"sandbox\.isolation=none"):
        validate_sandbox(SandboxConfig(backend="docker", isolation="none"))
