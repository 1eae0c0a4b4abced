"""The container of a sandbox as the Engine API wants it, and the set-up of its supervisor. Pure functions."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.sandbox import wire
from swe_rl.sandbox.base_root import container_environment
from swe_rl.sandbox.docker.door import SOCKET_NAME
from swe_rl.sandbox.docker.engine import Abilities, Image
from swe_rl.sandbox.docker.labels import labels
from swe_rl.sandbox.spec_check import INSIDE, check_spec
from swe_rl.types import SandboxSpec

_PROGRAM = f"{INSIDE}/supervisor"
# Of PID 1 alone, which gives up what it does not need; commands have none. container.c says what each is for.
CAPABILITIES = ("CHOWN", "DAC_OVERRIDE", "FOWNER", "KILL", "SETGID", "SETPCAP", "SETUID")
_DEFAULT_WORKDIR = SandboxSpec().workdir
_SUPERVISOR_BYTES = 16 << 20  # of it and of what it holds for the owner, beside the limit of the commands
_GITCONFIG = (
    "[user]\n\tname = agent\n\temail = agent@localhost\n[safe]\n\tdirectory = *\n"
    "[init]\n\tdefaultBranch = main\n[gc]\n\tauto = 0\n[advice]\n\tdetachedHead = false\n"
)


def check_docker_spec(spec: SandboxSpec) -> None:
    """Raises ConfigError for a spec that no container can honour."""
    if not spec.image:
        raise ConfigError("sandbox.image is empty: sandbox.backend=docker needs the name of an image")
    check_spec(spec)
    for name in (spec.image, spec.workdir, *spec.layers, *itertools.chain(*spec.readonly_mounts)):
        try:
            name.encode()
        except UnicodeEncodeError:  # the engine speaks JSON
            raise ConfigError(f"{name!r} is not UTF-8: no image, directory or mount of a container can be") from None
    if spec.isolation == "none":
        raise ConfigError("sandbox.isolation=none is for sandbox.backend=local: a container is isolated")


def with_workdir(spec: SandboxSpec, image: Image) -> SandboxSpec:
    """The spec with the work directory that counts: without layers and with just the default one, /testbed, where
    images of tasks keep the repository, or else the image's own.

    Raises ConfigError when that lies on a volume, where nothing bounds or counts what is written.
    """
    workdir = os.path.normpath(spec.workdir)
    has_testbed = _DEFAULT_WORKDIR in image.directories
    if not spec.layers and workdir == _DEFAULT_WORKDIR and not has_testbed and image.workdir != "/":
        workdir = image.workdir
    if not spec.layers and workdir in image.directories:
        for volume in image.volumes:
            if (workdir + "/").startswith(os.path.normpath(volume) + "/"):
                raise ConfigError(f"image {spec.image} has its work directory on a VOLUME: build it without {volume}")
    return replace(spec, workdir=workdir)


@dataclass(frozen=True, slots=True, kw_only=True)
class Account:
    """Whom commands run as."""

    uid: int
    gid: int
    name: str
    home: str


AGENT = Account(uid=1000, gid=1000, name="agent", home="/home/agent")


def is_capped(spec: SandboxSpec, image: Image) -> bool:
    """Whether all that commands may write is in memory file systems of limited size, and the rest is read-only. Not
    where the work directory is the image's own: it must be writable, and so lies on the engine's storage."""
    return bool(spec.layers) or spec.workdir not in image.directories


def account(spec: SandboxSpec, image: Image) -> Account:
    """An ordinary user of ours, unless the image brings the work directory: its files are made for the image's user,
    most often root. Without a capability, that is root in name only.

    Raises ConfigError when the image names a user that it does not have.
    """
    if is_capped(spec, image):
        return AGENT
    name, _, group = image.user.partition(":")
    users = [line.split(":") for line in image.passwd.decode(errors="replace").splitlines() if line.count(":") >= 6]
    found = next((user for user in users if name in (user[0], user[2])), None) if name else None
    if found is None and name and not name.isdigit():
        raise ConfigError(f"image {spec.image} runs as {name!r}, who is not in its /etc/passwd")
    uid = int(found[2]) if found else int(name or 0)
    gid = _group_id(spec, image, group) if group else int(found[3]) if found else uid
    home = found[5] if found else "/root" if uid == 0 else "/tmp"
    return Account(uid=uid, gid=gid, name=found[0] if found else name or "root", home=home)


def _group_id(spec: SandboxSpec, image: Image, name: str) -> int:
    if name.isdigit():
        return int(name)
    for line in image.group.decode(errors="replace").splitlines():
        if line.split(":")[0] == name and line.count(":") >= 2:
            return int(line.split(":")[2])
    raise ConfigError(f"image {spec.image} runs as group {name!r}, which is not in its /etc/group")


def tree_size(layers: tuple[str, ...]) -> tuple[int, int]:
    """(bytes in pages, entries) of what the layers put into the work directory, counted without overlaps."""
    found = [_size_of(layer, os.stat(layer).st_ctime_ns) for layer in layers]
    return sum(size for size, _ in found), sum(count for _, count in found)


_sizes: dict[tuple[str, int], tuple[int, int]] = {}


def _size_of(layer: str, changed_ns: int) -> tuple[int, int]:
    """Layers are content-addressed trees that do not change; the time of the directory tells a new one apart."""
    if (layer, changed_ns) not in _sizes:
        size = count = 0
        for folder, folders, files in os.walk(layer):
            count += len(folders) + len(files)
            size += sum(-(-os.lstat(os.path.join(folder, name)).st_size // 4096) * 4096 for name in files)
        _sizes[layer, changed_ns] = (size, count)
    return _sizes[layer, changed_ns]


def container_config(
    spec: SandboxSpec,
    image: Image,
    *,
    nonce: str,
    directory: Path,
    shared: Path,
    program: str,
    auto_remove: bool = True,
    abilities: Abilities,
) -> dict[str, Any]:
    """Body of POST /containers/create. `directory` is the sandbox's own on this machine, `shared` its socket's."""
    host = _limits(spec, image)
    host["CapAdd"] = [*CAPABILITIES, *(["SYS_RESOURCE"] if abilities.spares_supervisor else [])]
    if abilities.has_quota and not is_capped(spec, image):
        host["StorageOpt"] = {"size": str(spec.limits.disk_bytes)}
    host["Mounts"] = _mounts(spec, directory, shared, program)
    host["AutoRemove"] = auto_remove
    return {
        "Image": image.id,
        "Hostname": "sandbox",
        "User": "0:0",
        "WorkingDir": "/",
        "Entrypoint": [_PROGRAM, "container", f"{INSIDE}/shared/{SOCKET_NAME}"],
        "Cmd": [],
        "Env": [f"SWE_RL_NONCE={nonce}"],
        "Labels": labels(spec.limits.lease_s),
        "NetworkDisabled": True,
        "Healthcheck": {"Test": ["NONE"]},
        "HostConfig": host,
    }


def _limits(spec: SandboxSpec, image: Image) -> dict[str, Any]:
    """The part of HostConfig that bounds what commands can do and use."""
    limits = spec.limits
    tree_bytes, tree_entries = tree_size(spec.layers)
    # What lies in memory file systems counts as memory of the container and has its own limit.
    memory = limits.memory_bytes + limits.disk_bytes + tree_bytes + _SUPERVISOR_BYTES
    capped = is_capped(spec, image)
    chosen: dict[str, Any] = {"Runtime": spec.runtime} if spec.runtime else {}
    if limits.cpus:
        most = os.cpu_count() or 1  # the engine refuses more, and less than a hundredth
        chosen["NanoCpus"] = int(max(0.01, min(limits.cpus, most)) * 1e9)
    return {
        **chosen,
        "NetworkMode": "none",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": limits.pids * 2 + 8,  # twice the watched limit: where forks fail first, the cause stays unnamed
        "Memory": memory,
        "MemorySwap": memory,
        "ShmSize": limits.disk_bytes,
        "IpcMode": "private",
        "Tmpfs": _tmpfs(spec, image, tree_bytes, tree_entries, with_workdir=capped),
        "ReadonlyRootfs": capped,  # else the supervisor measures what is written
        "LogConfig": {"Type": "none"},
        "RestartPolicy": {"Name": "no"},
        "Ulimits": [{"Name": "core", "Soft": 0, "Hard": 0}, {"Name": "nofile", "Soft": 4096, "Hard": 4096}],
    }


def _tmpfs(
    spec: SandboxSpec, image: Image, tree_bytes: int, tree_entries: int, *, with_workdir: bool
) -> dict[str, str]:
    disk = spec.limits.disk_bytes

    def options(mode: str, size: int = disk, inodes: int = disk // 4096 + 4096, owner: str = "") -> str:
        return f"rw,exec,nosuid,nodev,mode={mode},size={size},nr_inodes={inodes}{owner}"

    own = f",uid={AGENT.uid},gid={AGENT.gid}"
    places = {place: options("1777") for place in ("/tmp", "/var/tmp", *image.volumes)}
    if with_workdir:
        places[AGENT.home] = options("0755", owner=own)
        places[spec.workdir] = options("0755", disk + tree_bytes, disk // 4096 + 4096 + tree_entries, own)
    return places


def _mounts(spec: SandboxSpec, directory: Path, shared: Path, program: str) -> list[dict[str, Any]]:
    inside = {
        _PROGRAM: program,
        f"{INSIDE}/shared": str(shared),
        "/etc/passwd": str(directory / "passwd"),
        "/etc/group": str(directory / "group"),
        **{_layer_place(i): os.path.abspath(layer) for i, layer in enumerate(spec.layers)},
        **{place: os.path.abspath(source) for source, place in spec.readonly_mounts},
    }
    return [{"Type": "bind", "Source": host, "Target": place, "ReadOnly": True} for place, host in inside.items()]


def _layer_place(i: int) -> str:
    return f"{INSIDE}/layers/{i}"


def write_accounts(image: Image, directory: Path) -> None:
    """The image's users and groups, and the one that commands run as, if it is not there."""
    entries = (
        ("passwd", image.passwd, f"{AGENT.name}:x:{AGENT.uid}:{AGENT.gid}:{AGENT.name}:{AGENT.home}:/bin/sh\n"),
        ("group", image.group, f"{AGENT.name}:x:{AGENT.gid}:\n"),
    )
    for name, content, entry in entries:
        ids = [line.split(b":")[2:3] for line in content.splitlines()]
        if content and not content.endswith(b"\n"):
            content += b"\n"
        if [str(AGENT.uid).encode()] not in ids:
            content += entry.encode()
        path = directory / name
        path.write_bytes(content)
        path.chmod(0o644)


def setup_body(spec: SandboxSpec, image: Image) -> bytes:
    """Body of the SETUP frame for the supervisor of a container; paths are inside."""
    limits, who = spec.limits, account(spec, image)
    variables = container_environment(image.env, spec, user=who.name, home=who.home)
    parts = [
        wire.numbers(
            memory=limits.memory_bytes,
            pids=limits.pids,
            disk=limits.disk_bytes,
            lease_ms=int(limits.lease_s * 1000),
            owner=0,
            flags=0,
        ),
        wire.item(wire.WORKDIR, spec.workdir),
        wire.item(wire.SHELL_PATH, "/bin/bash"),
        wire.item(wire.USER, str(who.uid), str(who.gid)),
    ]
    if who is AGENT:
        parts.append(wire.item(wire.FILE, f"{who.home}/.gitconfig", _GITCONFIG))
    parts += [wire.item(wire.EMPTY, volume) for volume in image.volumes]
    parts += [wire.item(wire.LAYER, _layer_place(i)) for i in range(len(spec.layers))]
    parts += [wire.item(wire.ENV, f"{name}={value}") for name, value in variables.items()]
    return b"".join(parts)
