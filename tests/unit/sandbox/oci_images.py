"""Builds container images byte by byte: layers, `docker save` archives, OCI layouts. No daemon, no registry."""

from __future__ import annotations

import functools
import gzip
import hashlib
import io
import json
import os
import platform
import shutil
import subprocess
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ARCHITECTURE = {"x86_64": "amd64", "aarch64": "arm64"}.get(platform.machine(), platform.machine())
MTIME = 1_600_000_000


def entry(name: str, data: bytes = b"", *, mode: int = 0o644, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    """A regular file."""
    info = tarfile.TarInfo(name)
    info.size, info.mode, info.mtime = len(data), mode, MTIME
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def folder(name: str, *, mode: int = 0o755, **fields: Any) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, mode=mode, type=tarfile.DIRTYPE, **fields)


def symlink(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, mode=0o777, type=tarfile.SYMTYPE, linkname=target)


def hardlink(name: str, target: str, *, mode: int = 0o644) -> tuple[tarfile.TarInfo, bytes]:
    return entry(name, mode=mode, type=tarfile.LNKTYPE, linkname=target)


def whiteout(path: str) -> tuple[tarfile.TarInfo, bytes]:
    parent, _, name = path.rpartition("/")
    return entry(f"{parent}/.wh.{name}" if parent else f".wh.{name}")


def opaque(path: str) -> tuple[tarfile.TarInfo, bytes]:
    return entry(f"{path}/.wh..wh..opq")


def layer(*entries: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """An uncompressed layer."""
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for info, data in entries:
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def digest(data: bytes) -> str:
    return "sha256:" + hashlib.sha256(data).hexdigest()


@dataclass
class Built:
    """An image in memory."""

    layers: Sequence[bytes]
    settings: dict[str, Any] = field(default_factory=dict)  # Env, WorkingDir, User, Entrypoint, Cmd
    architecture: str = ARCHITECTURE

    @property
    def config(self) -> bytes:
        document = {
            "architecture": self.architecture,
            "os": "linux",
            "config": self.settings,
            "rootfs": {"type": "layers", "diff_ids": [digest(data) for data in self.layers]},
            "history": [{"created": "2020-01-01T00:00:00Z", "created_by": "test"} for _ in self.layers],
            "created": "2020-01-01T00:00:00Z",
        }
        return json.dumps(document, sort_keys=True).encode()

    @property
    def image_id(self) -> str:
        return hashlib.sha256(self.config).hexdigest()

    def save(self, path: Path, name: str = "test:1") -> Path:
        """A `docker save` archive."""
        members: dict[str, bytes] = {f"{self.image_id}.json": self.config}
        names = []
        for data in self.layers:
            names.append(f"{digest(data)[7:]}/layer.tar")
            members[names[-1]] = data
        manifest = [{"Config": f"{self.image_id}.json", "RepoTags": [name] if name else None, "Layers": names}]
        members["manifest.json"] = json.dumps(manifest).encode()
        with tarfile.open(path, "w") as tar:
            for member, data in members.items():
                info = tarfile.TarInfo(member)
                info.size = len(data)
                tar.addfile(info, io.BytesIO(data))
        return path

    def layout(self, path: Path, name: str = "test:1", *, compress: Any = gzip.compress, nested: bool = False) -> Path:
        """An OCI layout with compressed layers."""
        blobs = path / "blobs" / "sha256"
        blobs.mkdir(parents=True)

        def put(data: bytes) -> dict[str, Any]:
            (blobs / digest(data)[7:]).write_bytes(data)
            return {"digest": digest(data), "size": len(data)}

        config, layers = put(self.config), [put(compress(data)) for data in self.layers]
        manifest = put(json.dumps({"schemaVersion": 2, "config": config, "layers": layers}).encode())
        manifest["mediaType"] = "application/vnd.oci.image.manifest.v1+json"
        manifest["annotations"] = {"org.opencontainers.image.ref.name": name}
        entries = [manifest]
        if nested:
            other = {**manifest, "platform": {"os": "linux", "architecture": "vax"}}
            mine = {**manifest, "platform": {"os": "linux", "architecture": self.architecture}}
            inner = put(json.dumps({"manifests": [other, mine]}).encode())
            entries = [{**inner, "mediaType": "application/vnd.oci.image.index.v1+json"}]
        (path / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": entries}))
        (path / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        return path


def _libraries(program: str) -> list[str]:
    done = subprocess.run(["ldd", program], capture_output=True, text=True)
    words = [word for line in done.stdout.splitlines() for word in line.split() if word.startswith("/")]
    return list(dict.fromkeys(words))


@functools.cache
def programs(*names: str) -> tuple[tuple[tarfile.TarInfo, bytes], ...]:
    """Entries with programs of this machine in /bin, the libraries they need, and the usual directories."""
    files: dict[str, str] = {}
    for name in names:
        found = shutil.which(name)
        assert found, name
        files[f"bin/{name}"] = os.path.realpath(found)
        files.update({path.lstrip("/"): os.path.realpath(path) for path in _libraries(found)})
    parents = {"/".join(path.split("/")[:depth]) for path in files for depth in range(1, path.count("/") + 1)}
    folders = sorted(parents | {"etc", "root", "usr", "proc", "sys", "dev", "var"})
    entries = [folder("tmp", mode=0o1777), *(folder(path) for path in folders)]
    entries += [entry(path, Path(real).read_bytes(), mode=0o755) for path, real in sorted(files.items())]
    entries.append(entry("etc/passwd", b"root:x:0:0:root:/root:/bin/sh\napp:x:4242:4343:App:/srv/app:/bin/sh\n"))
    entries.append(entry("etc/group", b"root:x:0:\napp:x:4343:\nstaff:x:50:\n"))
    return tuple(entries)


TOOLS = ("sh", "bash", "ls", "cat", "stat", "id", "find", "sha256sum", "mkdir", "rm", "ln", "touch", "chmod", "env",
         "sort", "mv", "sleep", "readlink", "grep", "head", "dd", "seq", "mount", "mknod")  # fmt: skip


def base_layer() -> bytes:
    """A root with a shell and the tools above."""
    return layer(*programs(*TOOLS))


def three_layers() -> list[bytes]:
    """Whiteouts, opaque directories, replaced kinds, hard links and set-id bits over a base."""
    one = layer(
        *programs(*TOOLS),
        folder("app", mode=0o750),
        entry("app/keep", b"keep\n"),
        entry("app/gone", b"gone\n"),
        entry("app/changed", b"before\n", mode=0o600),
        hardlink("app/changed.link", "app/changed", mode=0o600),
        folder("app/dir"),
        entry("app/dir/hidden", b"hidden\n"),
        folder("app/sub"),
        entry("app/sub/inner", b"inner\n"),
        symlink("app/to-etc", "/etc/passwd"),
        entry("app/becomes-dir", b"file\n"),
        folder("app/becomes-file"),
        entry("app/becomes-file/x", b"x\n"),
        folder("app/becomes-link"),
        entry("app/set-id", b"#!/bin/sh\n", mode=0o6755),
        entry("app/set-id2", b"x", mode=0o2711),
        folder("app/sticky", mode=0o1777),
        entry("app/fifo", mode=0o640, type=tarfile.FIFOTYPE),
    )
    two = layer(
        folder("app", mode=0o755),
        whiteout("app/gone"),
        folder("app/dir", mode=0o711),
        opaque("app/dir"),
        entry("app/dir/new", b"new\n"),
        entry("app/changed", b"after\n", mode=0o640),
        hardlink("app/changed.other", "app/changed", mode=0o640),
        whiteout("app/becomes-dir"),
        folder("app/becomes-dir"),
        entry("app/becomes-dir/y", b"y\n"),
        whiteout("app/becomes-file"),
        entry("app/becomes-file", b"now a file\n", mode=0o444),
        whiteout("app/becomes-link"),
        symlink("app/becomes-link", "keep"),
        entry("app/name with blank\tand tab", b"t\n"),
        entry("app/\u00e9t\u00e9", b"summer\n"),
    )
    three = layer(
        folder("app", mode=0o755),
        whiteout("app/sub"),
        entry("app/gone", b"again\n", mode=0o755),
        folder("app/dir", mode=0o700),
        entry("app/dir/third", b"third\n"),
        hardlink("app/dir/third.link", "app/dir/third"),
        whiteout("app/keep"),
        folder("app/empty", mode=0o500),
    )
    return [one, two, three]


def merged(paths: Iterable[str]) -> set[str]:
    """Names below app/ of three_layers(), for comparison."""
    return {path for path in paths if path.startswith("app")}
