"""Where images come from: a `docker save` archive, an OCI layout (folder or archive), a daemon, a registry.

A reader gives configurations and layers by name; nothing is believed before its digest was checked (store.py).
"""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, Protocol

from swe_rl.errors import ConfigError, ImageError
from swe_rl.sandbox.oci.image_config import ImageConfig, parse_config, this_platform
from swe_rl.sandbox.oci.names import is_digest
from swe_rl.sandbox.oci.unpack import safe_path

DAEMON, REGISTRY = "docker-daemon:", "docker://"  # as skopeo names them
_MAX_JSON_BYTES = 16 << 20
_NAME_KEYS = ("io.containerd.image.name", "org.opencontainers.image.ref.name")
_INDEX_TYPES = ("image.index", "manifest.list")


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceLayer:
    open: Callable[[], BinaryIO]  # as stored: plain, or compressed with gzip or zstd
    diff_id: str  # digest of the uncompressed archive
    blob_digest: str = ""  # digest as stored, where the source names one


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceImage:
    image_id: str  # hexadecimal
    config: ImageConfig
    layers: tuple[SourceLayer, ...]  # from bottom to top
    names: tuple[str, ...] = ()
    manifest_digest: str = ""


class _Reader(Protocol):
    def has(self, name: str) -> bool: ...

    def open(self, name: str) -> BinaryIO: ...


class _FolderReader:
    def __init__(self, root: Path) -> None:
        self._root = root.resolve()

    def _path(self, name: str) -> Path:
        path = (self._root / safe_path(name)).resolve()
        if not path.is_relative_to(self._root):
            raise ImageError(f"{name!r} leads out of {self._root}")
        return path

    def has(self, name: str) -> bool:
        return self._path(name).is_file()

    def open(self, name: str) -> BinaryIO:
        try:
            return open(self._path(name), "rb")
        except OSError as err:
            raise ImageError(f"{self._root} lacks {name}: {err.strerror}") from err


class _ArchiveReader:
    def __init__(self, path: Path, tar: tarfile.TarFile) -> None:
        self._path, self._tar = path, tar
        self._names = {member.name.removeprefix("./"): member for member in tar}

    def has(self, name: str) -> bool:
        return name in self._names

    def open(self, name: str) -> BinaryIO:
        member = self._names.get(name)
        try:
            found = self._tar.extractfile(member) if member else None  # a link of the archive is followed within it
        except KeyError:
            found = None
        if found is None:
            raise ImageError(f"{self._path} lacks {name}: is it cut short?")
        return found  # type: ignore[return-value]


@contextmanager
def open_source(source: str) -> Iterator[list[SourceImage]]:
    """The images of `source`: a path, docker-daemon:NAME, or docker://NAME (a registry; needs skopeo).

    Raises ImageError for damaged ones, ConfigError when there is no such thing or no way to get it.
    """
    if source.startswith(DAEMON):
        from swe_rl.sandbox.oci.docker_daemon import save_image

        with tempfile.TemporaryDirectory(prefix="swe-rl-image-") as folder:
            archive = Path(folder, "image.tar")
            save_image(source.removeprefix(DAEMON), archive)
            with _open_archive(archive) as images:
                yield images
    elif source.startswith(REGISTRY):
        with tempfile.TemporaryDirectory(prefix="swe-rl-image-") as folder:
            _pull(source, Path(folder))
            images = _read(_FolderReader(Path(folder)), Path(folder))
            yield [replace(image, names=(source.removeprefix(REGISTRY),)) for image in images]
    elif Path(source).is_dir():
        yield _read(_FolderReader(Path(source)), Path(source))
    elif Path(source).is_file():
        with _open_archive(Path(source)) as images:
            yield images
    else:
        raise ConfigError(
            f"there is no {source}: name a `docker save` archive, an OCI layout, {DAEMON}NAME or {REGISTRY}NAME"
        )


@contextmanager
def _open_archive(path: Path) -> Iterator[list[SourceImage]]:
    try:
        with tarfile.open(path, "r:*", encoding="utf-8", errors="surrogateescape") as tar:
            yield _read(_ArchiveReader(path, tar), path)
    except (tarfile.TarError, EOFError) as err:
        raise ImageError(f"{path} is no readable archive: {str(err).splitlines()[0]}") from err


def _pull(source: str, folder: Path) -> None:
    tool = shutil.which("skopeo")
    if not tool:
        raise ConfigError("images of a registry are fetched by skopeo, which is not installed: apt-get install skopeo")
    done = subprocess.run([tool, "copy", "--quiet", source, f"oci:{folder}:image"], capture_output=True, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ImageError(f"skopeo could not fetch {source}: {lines[-1]}")


def _read(reader: _Reader, where: Path) -> list[SourceImage]:
    if reader.has("manifest.json"):
        images = list(_docker_images(reader))
    elif reader.has("index.json"):
        images = list(_oci_images(reader))
    else:
        raise ImageError(f"{where} holds no image: neither manifest.json (docker save) nor index.json (OCI layout)")
    if not images:
        raise ImageError(f"{where} holds no image for this machine")
    return images


def _json(reader: _Reader, name: str, *, digest: str = "") -> tuple[Any, bytes]:
    with reader.open(name) as file:
        data = file.read(_MAX_JSON_BYTES + 1)
    if len(data) > _MAX_JSON_BYTES:
        raise ImageError(f"{name} has more than {_MAX_JSON_BYTES} bytes")
    found = "sha256:" + hashlib.sha256(data).hexdigest()
    if digest and found != digest:
        raise ImageError(f"{name} is damaged: its digest is {found}, not {digest}")
    try:
        return json.loads(data), data
    except (ValueError, RecursionError) as err:
        raise ImageError(f"{name} is not JSON: {err}") from err


def _docker_images(reader: _Reader) -> Iterator[SourceImage]:
    manifests, _ = _json(reader, "manifest.json")
    try:
        for entry in manifests:
            name = str(entry["Config"])
            stem = name.removesuffix(".json").rpartition("/")[2]
            digest = f"sha256:{stem}" if is_digest(f"sha256:{stem}") else ""
            _, data = _json(reader, name, digest=digest)
            config = parse_config(data)
            layers = tuple(map(str, entry["Layers"]))
            yield SourceImage(
                image_id=hashlib.sha256(data).hexdigest(),
                config=config,
                layers=_layers(reader, layers, config, [""] * len(layers)),
                names=tuple(map(str, entry.get("RepoTags") or ())),
            )
    except (KeyError, TypeError, AttributeError) as err:
        raise ImageError(f"manifest.json is malformed: {type(err).__name__}: {err}") from err


def _layers(
    reader: _Reader, names: Sequence[str], config: ImageConfig, blobs: Sequence[str]
) -> tuple[SourceLayer, ...]:
    if len(names) != len(config.diff_ids):
        raise ImageError(f"the manifest lists {len(names)} layers, the configuration {len(config.diff_ids)}")

    def opener(name: str) -> Callable[[], BinaryIO]:
        return lambda: reader.open(name)

    return tuple(
        SourceLayer(open=opener(name), diff_id=diff_id, blob_digest=blob)
        for name, diff_id, blob in zip(names, config.diff_ids, blobs, strict=True)
    )


def _oci_images(reader: _Reader) -> Iterator[SourceImage]:
    index, _ = _json(reader, "index.json")
    try:
        for name, digest in _manifests(reader, index, depth=0):
            manifest, _ = _json(reader, _blob(digest), digest=digest)
            config_digest = str(manifest["config"]["digest"])
            _, data = _json(reader, _blob(config_digest), digest=config_digest)
            config = parse_config(data)
            blobs = [str(layer["digest"]) for layer in manifest["layers"]]
            yield SourceImage(
                image_id=config_digest.removeprefix("sha256:"),
                config=config,
                layers=_layers(reader, [_blob(blob) for blob in blobs], config, blobs),
                names=(name,) if name else (),
                manifest_digest=digest,
            )
    except (KeyError, TypeError, AttributeError) as err:
        raise ImageError(f"the index is malformed: {type(err).__name__}: {err}") from err


def _manifests(reader: _Reader, index: Mapping[str, Any], *, depth: int) -> Iterator[tuple[str, str]]:
    """(name or "", digest) of each image for this machine; an index may hold further ones."""
    if depth > 3:
        raise ImageError("indexes lie in each other more than three deep")
    for entry in index["manifests"]:
        annotations = entry.get("annotations") or {}
        platform = entry.get("platform") or {}
        if annotations.get("vnd.docker.reference.type") or not _is_ours(platform):
            continue
        name = next((str(annotations[key]) for key in _NAME_KEYS if annotations.get(key)), "")
        digest = str(entry["digest"])
        if any(kind in str(entry.get("mediaType")) for kind in _INDEX_TYPES):
            inner, _ = _json(reader, _blob(digest), digest=digest)
            for inner_name, inner_digest in _manifests(reader, inner, depth=depth + 1):
                yield inner_name or name, inner_digest
        else:
            yield name, digest


def _is_ours(platform: Mapping[str, Any]) -> bool:
    system, machine = this_platform()
    return platform.get("os", system) == system and platform.get("architecture", machine) == machine


def _blob(digest: str) -> str:
    if not is_digest(digest):
        raise ImageError(f"{digest[:80]!r} is no sha256 digest")
    return f"blobs/sha256/{digest.removeprefix('sha256:')}"
