"""What an image says about itself, and what of it a sandbox takes: environment, work directory, user, shell.

The entry point is kept and shown, but not run: commands start the way `docker exec` starts them. Images of tasks use it
to keep a container alive or to greet, and its output would be in the output of every command.
"""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from swe_rl.errors import ImageError
from swe_rl.sandbox.oci import lookup
from swe_rl.sandbox.oci.names import is_digest

DEFAULT_ID = 1000  # uid and gid of commands where the image names no user
MAX_LAYERS = 128  # their short names fill the one page of options that mount(2) takes
_MAX_ID = 65533  # 65534 is what a user namespace shows for everybody else
_NUMBER = re.compile(r"[0-9]{1,10}")  # str.isdigit takes digits that int does not, and int any number of them
MAX_ENV = 400  # variables, and bytes of all of them: csrc/sandboxd/frame.h and execve(2) take little more
MAX_ENV_BYTES = 96 << 10
_OURS = ("proc", "dev", ".scratch")  # csrc/sandboxd/rootfs.c mounts over them
_SHELLS = ("/bin/bash", "/usr/bin/bash", "/bin/sh", "/usr/bin/sh")
_MACHINES = {"x86_64": "amd64", "aarch64": "arm64", "riscv64": "riscv64"}


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    """The parts of an image's configuration file that are used."""

    diff_ids: tuple[str, ...]  # digests of the uncompressed layers, from bottom to top
    env: tuple[str, ...]  # NAME=value
    workdir: str
    user: str  # as written: "", name, uid, name:group, uid:gid
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """An imported image."""

    image_id: str  # sha256 of its configuration, hexadecimal
    manifest_digest: str  # "sha256:..." where it came with one, else ""
    layers: tuple[str, ...]  # names in the store, from bottom to top
    env: tuple[str, ...]
    workdir: str  # "/" if the image says nothing
    user: str  # as the image has it, "" if it says nothing
    uid: int  # of commands, inside
    gid: int
    home: str
    shell: str
    has_testbed: bool  # whether there is a /testbed, where task images keep the repository
    entrypoint: tuple[str, ...]
    cmd: tuple[str, ...]
    size_bytes: int  # of the files in all layers
    notes: tuple[str, ...] = ()  # what could not be taken over: device nodes, attributes, the entry point

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Image:
        """Raises ValueError, KeyError or TypeError for a record of another version."""
        values: dict[str, Any] = json.loads(text)
        lists = {name: tuple(value) for name, value in values.items() if isinstance(value, list)}
        return cls(**{**values, **lists})


def parse_config(data: bytes) -> ImageConfig:
    """Reads an image's configuration (OCI image-spec, "Image Configuration"; docker's is the same where it matters).

    Raises ImageError when it is malformed, or made for another machine.
    """
    try:
        document = json.loads(data)
        settings: Mapping[str, Any] = document.get("config") or {}
        diff_ids = tuple(map(str, document["rootfs"]["diff_ids"]))
        found = ImageConfig(
            diff_ids=diff_ids,
            env=_texts(settings.get("Env")),
            workdir=str(settings.get("WorkingDir") or ""),
            user=str(settings.get("User") or ""),
            entrypoint=_texts(settings.get("Entrypoint")),
            cmd=_texts(settings.get("Cmd")),
        )
        system, machine = document.get("os") or "linux", document.get("architecture") or ""
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as err:
        raise ImageError(f"the configuration of the image is malformed: {type(err).__name__}: {err}") from err
    _check(found, str(system), str(machine))
    return found


def _texts(value: object) -> tuple[str, ...]:
    if value is None:
        return ()
    if isinstance(value, str):
        return ("/bin/sh", "-c", value)
    if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
        raise TypeError(f"a list of texts is needed, not {str(value)[:80]!r}")
    return tuple(value)


def this_platform() -> tuple[str, str]:
    """Operating system and architecture of this machine, as images name them."""
    return "linux", _MACHINES.get(platform.machine(), platform.machine())


def _check(config: ImageConfig, system: str, machine: str) -> None:
    here = this_platform()
    if system != here[0] or (machine and machine != here[1]):
        raise ImageError(f"the image is for {system}/{machine}, this machine is {here[0]}/{here[1]}")
    if not config.diff_ids or len(config.diff_ids) > MAX_LAYERS:
        raise ImageError(f"the image has {len(config.diff_ids)} layers: 1 to {MAX_LAYERS} are supported")
    for digest in config.diff_ids:
        if not is_digest(digest):
            raise ImageError(f"the image names a layer {digest[:80]!r}, which is no sha256 digest")
    for text in (*config.env, config.workdir, config.user, *config.entrypoint, *config.cmd):
        if "\0" in text or not _is_text(text):
            raise ImageError(f"the configuration of the image contains {ascii(text)[:80]}, which is no text")
    size = sum(len(text.encode()) for text in config.env)
    if len(config.env) > MAX_ENV or size > MAX_ENV_BYTES:
        raise ImageError(
            f"the image sets {len(config.env)} environment variables of {size} bytes: "
            f"at most {MAX_ENV} of {MAX_ENV_BYTES} bytes are supported"
        )
    if len(config.workdir.encode()) >= 4096:
        raise ImageError(f"the image has a work directory of {len(config.workdir.encode())} bytes: at most 4095")


def _is_text(text: str) -> bool:
    """Not if it has half of a character, which JSON can spell and nothing can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def make_image(
    config: ImageConfig,
    *,
    image_id: str,
    manifest_digest: str,
    layers: Sequence[tuple[str, Path]],
    size_bytes: int,
    notes: Sequence[str],
) -> Image:
    """`layers`: name and directory, from bottom to top. Raises ImageError when there is no shell in the image, no place
    for /proc and /dev, or its user is not in its /etc/passwd."""
    stack = [path for _, path in reversed(layers)]
    shell = next((path for path in _SHELLS if lookup.resolve(stack, path) is not None), "")
    if not shell:
        raise ImageError("the image has no shell: commands need /bin/bash or /bin/sh in it")
    for path in _OURS:
        found = lookup.find(stack, path)
        if found is not None and (found.is_symlink() or not found.is_dir()):
            raise ImageError(f"the image has a link or a file at /{path}, where a sandbox mounts its own")
    uid, gid, home = _user(stack, config.user)
    kept = list(dict.fromkeys(notes))
    if config.entrypoint and Path(config.entrypoint[0]).name not in ("sh", "bash"):
        kept.append(f"entry point not run: {' '.join(config.entrypoint)}")
    testbed = lookup.resolve(stack, "testbed")
    return Image(
        image_id=image_id,
        manifest_digest=manifest_digest,
        layers=tuple(name for name, _ in layers),
        env=config.env,
        workdir="/" + config.workdir.strip("/"),
        user=config.user,
        uid=uid,
        gid=gid,
        home=home,
        shell=shell,
        has_testbed=testbed is not None and testbed.is_dir(),
        entrypoint=config.entrypoint,
        cmd=config.cmd,
        size_bytes=size_bytes,
        notes=tuple(kept),
    )


def _user(stack: Sequence[Path], text: str) -> tuple[int, int, str]:
    """uid, gid and home of commands. Nothing said means an image made for root: an ordinary id then, which owns all
    files, in root's home."""
    users, groups = _table(stack, "etc/passwd"), _table(stack, "etc/group")
    if not text:
        root = next((row for row in users if len(row) > 5 and row[2] == "0"), None)
        return DEFAULT_ID, DEFAULT_ID, _home(root)
    name, _, group = text.partition(":")
    row = next((row for row in users if len(row) > 5 and name and name in (row[0], _digits(row[2]))), None)
    if row is None and not _digits(name):
        raise ImageError(f"the image runs as user {name[:40]!r}, who is not in its /etc/passwd")
    uid = _id(row[2] if row else name)
    gid = _id(row[3] if row else "0")
    if group:
        found = next((row for row in groups if len(row) > 2 and group == row[0]), None)
        if found is None and not _digits(group):
            raise ImageError(f"the image runs as group {group[:40]!r}, which is not in its /etc/group")
        gid = _id(found[2] if found else group)
    return uid, gid, _home(row)


def _home(row: Sequence[str] | None) -> str:
    return row[5] if row and row[5].startswith("/") and "\0" not in row[5] else "/"


def _digits(text: str) -> str:
    """`text` if it is a number, else "", which is no id and no name."""
    return text if _NUMBER.fullmatch(text) else ""


def _id(text: str) -> int:
    if not _digits(text) or int(text) > _MAX_ID:
        raise ImageError(f"the image runs as id {text[:40]!r}: 0 to {_MAX_ID} are supported")
    return int(text)


def _table(stack: Sequence[Path], path: str) -> list[list[str]]:
    """Rows of a file such as /etc/passwd; none if there is no such file."""
    found = lookup.resolve(stack, path)
    if found is None or not found.is_file() or found.stat().st_size > 1 << 20:
        return []
    return [line.split(":") for line in found.read_text(errors="replace").splitlines() if line]
