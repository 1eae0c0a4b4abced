"""The imported images of one user: unpacked layers, shared and content-addressed, and records that refer to them.

    layers/NAME        the files of one layer, a lower directory of overlayfs; NAME: start of its chain id
    layers/NAME.json   what it was made from
    images/ID.json     an image: its layers and configuration; modified when it was last opened
    names/NAME         the id behind a name
    use/OWNER/ID       a living process has opened it (OWNER: machine and process)
    staging/OWNER-*    work in progress; of a dead owner: garbage
    etc/               files that every sandbox of an image gets

Everything appears by rename, complete, and layers only after their digest was found right: a process that is killed
leaves nothing but staging. Importers and openers hold `lock` shared, gc.py holds it alone. The store is closed to other
users, since a layer may hold set-id programs. Its files belong to the id that commands have outside: an unprivileged
one where root imports, else the importer's own; so an overlay needs no further mapping.
"""

from __future__ import annotations

import errno
import fcntl
import functools
import hashlib
import json
import os
import shutil
import tempfile
import urllib.parse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from swe_rl.errors import ConfigError, ImageError, SandboxError
from swe_rl.sandbox.cache_dir import cache_dir
from swe_rl.sandbox.oci.image_config import Image, make_image
from swe_rl.sandbox.oci.machine import flush, machine_label, owner_of_files, remove_tree
from swe_rl.sandbox.oci.names import digest_prefix, normal_name
from swe_rl.sandbox.oci.sources import SourceImage, SourceLayer
from swe_rl.sandbox.oci.streams import DigestReader, uncompressed
from swe_rl.sandbox.oci.unpack import unpack_layer
from swe_rl.sandbox.owner import owner_label

_NAME_DIGITS = 24  # 96 bits; 128 of them fit into the options of mount(2)
KEPT_FREE_BYTES = 1 << 30  # of the disk: an image must not fill what runs and their checkpoints write to
_SHARED_FILES = {"hosts": "127.0.0.1 localhost sandbox\n::1 localhost\n", "hostname": "sandbox\n"}
_FOLDERS = ("layers", "images", "names", "use", "staging", "etc")


def default_store() -> ImageStore:
    """The store in the cache directory."""
    return _store_at(str((cache_dir() / "images").absolute()))


@functools.lru_cache(maxsize=16)
def _store_at(root: str) -> ImageStore:
    return ImageStore(Path(root))


@dataclass(frozen=True, slots=True)
class _Layer:
    name: str
    path: Path
    size_bytes: int
    notes: tuple[str, ...]


class ImageStore:
    """Images below `root`, which is made if need be. `owner`: see owner_of_files."""

    def __init__(self, root: Path, *, owner: tuple[int, int] | None = None) -> None:
        self.root = root
        self.owner = owner or owner_of_files()
        self._opened: dict[tuple[int, str], None] = {}  # (pid, image id) that `open` has marked as used
        self._records: dict[str, tuple[int, Image]] = {}

    # ---- reading --------------------------------------------------------------------------------------------

    def find(self, reference: str) -> Image:
        """The image of that name or digest. Raises ImageError, with the cure, when it was not imported."""
        image_id = self._id_of(reference)
        if image_id is None:
            raise ImageError(f"image {reference!r} is not imported: swe-rl sandbox import {reference}")
        return self.read(image_id)

    def _id_of(self, reference: str) -> str | None:
        digits = digest_prefix(reference)
        if digits:
            found = [path.stem for path in self._dir("images").glob(f"{digits}*.json")]
            if not found and len(digits) == 64:  # of a manifest
                found = [i.image_id for i in self.images() if i.manifest_digest == f"sha256:{digits}"]
            if len(found) > 1:
                raise ImageError(f"{reference} is the start of {len(found)} images: give more digits")
            if found:
                return found[0]
        try:
            return self._name_file(normal_name(reference)).read_text().strip()
        except FileNotFoundError:
            return None

    def read(self, image_id: str) -> Image:
        """The image with that id; raises ImageError when its record is gone or of another version."""
        path = self._dir("images") / f"{image_id}.json"
        try:
            stamp = path.stat().st_ino  # a record is replaced, never rewritten
            known = self._records.get(image_id)
            if known is None or known[0] != stamp:
                known = self._records[image_id] = (stamp, Image.from_json(path.read_text()))
            return known[1]
        except (OSError, ValueError, KeyError, TypeError) as err:
            raise ImageError(f"image {image_id[:12]} cannot be read ({type(err).__name__}): import it again") from err

    def images(self) -> list[Image]:
        """All images, the most recently used first."""
        paths = sorted(self._dir("images").glob("*.json"), key=_mtime, reverse=True)
        return [self.read(path.stem) for path in paths]

    def names(self) -> dict[str, str]:
        """Image id of each name."""
        return {
            urllib.parse.unquote(path.name): path.read_text().strip()
            for path in sorted(self._dir("names").glob("*"))
            if not path.name.startswith(".")
        }

    def forget_name(self, name: str) -> None:
        """The image keeps its layers and stays known by its digest."""
        self._name_file(name).unlink(missing_ok=True)

    def layer_paths(self, image: Image) -> list[Path]:
        """Directories of its layers, from top to bottom."""
        return [self._dir("layers") / name for name in reversed(image.layers)]

    def file(self, name: str) -> Path:
        """One of the files that every sandbox of an image gets in /etc."""
        return self._dir("etc") / name

    def open(self, reference: str, *, as_root: bool | None = None) -> Image:
        """As `find`, and the image is kept while this process lives. Raises ImageError also when it is damaged or its
        files belong to somebody else than `owner_of_files(as_root=...)`."""
        image = self.find(reference)
        key = (os.getpid(), image.image_id)
        path = self._dir("images") / f"{image.image_id}.json"
        if key not in self._opened:
            self._check_owner(owner_of_files(as_root=as_root)[0])
            with self.locked(fcntl.LOCK_SH):
                missing = [layer.name for layer in self.layer_paths(image) if not layer.is_dir()]
                if missing or not path.exists():
                    raise ImageError(f"image {reference!r} is incomplete: swe-rl sandbox import {reference}")
                mark = self._dir("use") / f"{machine_label(os.getpid())}~{owner_label()}"
                mark.mkdir(exist_ok=True)
                (mark / image.image_id).touch()
            self._opened[key] = None
        try:
            os.utime(path)
        except OSError as err:
            raise ImageError(f"image {reference!r} was removed: swe-rl sandbox import {reference}") from err
        return image

    def _check_owner(self, wanted: int) -> None:
        found = self._dir("layers").stat().st_uid
        if found != wanted:
            raise ImageError(
                f"the images in {self.root} belong to uid {found}, sandboxes of this process need {wanted}: "
                "set SWE_RL_CACHE to a directory of your own and import again"
            )

    # ---- importing ------------------------------------------------------------------------------------------

    def add(
        self, source: SourceImage, names: Sequence[str] = (), report: Callable[[str], None] = lambda _line: None
    ) -> Image:
        """Unpacks the layers that are not here yet, then records the image under `names` (or those it came with).

        Idempotent and safe beside other importers. Raises ImageError for a damaged image, SandboxError when the machine
        fails (disk full).
        """
        wanted = [normal_name(name) for name in (names or source.names)]
        try:
            self._prepare()
            with self.locked(fcntl.LOCK_SH):
                return self._add(source, wanted, report)
        except OSError as err:
            cure = ": swe-rl sandbox gc" if err.errno in (errno.ENOSPC, errno.EDQUOT) else ""
            raise SandboxError(f"the image cannot be stored in {self.root}: {err}{cure}") from err

    def _add(self, source: SourceImage, names: Sequence[str], report: Callable[[str], None]) -> Image:
        layers: list[_Layer] = []
        chain = ""
        for number, layer in enumerate(source.layers, 1):
            chain = layer.diff_id if not chain else _digest(f"{chain} {layer.diff_id}")
            below = [made.path for made in reversed(layers)]
            try:
                layers.append(self._layer(layer, chain, below))
            except ImageError as err:
                raise ImageError(f"layer {number} of {len(source.layers)} ({layer.diff_id[:19]}): {err}") from err
            report(f"layer {number}/{len(source.layers)} {chain[7:19]} {layers[-1].size_bytes / 2**20:.1f} MiB")
        image = make_image(
            source.config,
            image_id=source.image_id,
            manifest_digest=source.manifest_digest,
            layers=[(layer.name, layer.path) for layer in layers],
            size_bytes=sum(layer.size_bytes for layer in layers),
            notes=[note for layer in layers for note in layer.notes],
        )
        flush(self.root)  # a record must not outlive a power cut that its files did not
        self._write(self._dir("images") / f"{image.image_id}.json", image.to_json())
        for name in names:
            self._write(self._name_file(name), image.image_id + "\n")
        return image

    def _layer(self, source: SourceLayer, chain: str, below: Sequence[Path]) -> _Layer:
        name = chain.removeprefix("sha256:")[:_NAME_DIGITS]
        target, record = self._dir("layers") / name, self._dir("layers") / f"{name}.json"
        with self.locked(fcntl.LOCK_EX, f"staging/.{name}.lock"):  # another importer may be at it
            if not target.is_dir():
                self._unpack(source, chain, below, target, record)
            return _read_layer(name, target, record, chain)

    def _unpack(self, source: SourceLayer, chain: str, below: Sequence[Path], target: Path, record: Path) -> None:
        place = f"{machine_label(os.getpid())}~{owner_label()}-"
        staging = Path(tempfile.mkdtemp(prefix=place, dir=self._dir("staging")))
        try:
            tree = staging / "layer"
            tree.mkdir()
            with source.open() as raw:
                stored = DigestReader(raw)
                with uncompressed(stored) as stream:  # type: ignore[arg-type]
                    plain = DigestReader(stream)
                    done = unpack_layer(
                        plain,  # type: ignore[arg-type]
                        tree,
                        below=below,
                        owner=self._chown_to(),
                        max_bytes=max(0, shutil.disk_usage(staging).free - KEPT_FREE_BYTES),
                    )
                    plain.drain()
                stored.drain()
            for found, expected in ((stored.digest, source.blob_digest), (plain.digest, source.diff_id)):
                if expected and found != expected:
                    raise ImageError(f"it is damaged: its digest is {found}, not {expected}")
            text = _layer_record(chain, source.diff_id, done.size_bytes, done.notes)
            self._write(record, text)
            tree.rename(target)
        finally:
            remove_tree(staging)

    def _chown_to(self) -> tuple[int, int] | None:
        return None if self.owner == (os.geteuid(), os.getegid()) else self.owner

    # ---- files ----------------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        if not self._dir("etc").joinpath("hostname").exists():
            self.root.mkdir(parents=True, exist_ok=True)
            self.root.chmod(0o700)
            for name in _FOLDERS:
                self._dir(name).mkdir(exist_ok=True)
            if self._chown_to() is not None:
                os.chown(self._dir("layers"), *self.owner)
            for name, text in _SHARED_FILES.items():
                self._write(self._dir("etc") / name, text)
        self._check_owner(self.owner[0])

    def _dir(self, name: str) -> Path:
        return self.root / name

    def _name_file(self, name: str) -> Path:
        quoted = urllib.parse.quote(name, safe="")
        if len(quoted) > 200:
            raise ConfigError(f"the image name {name[:40]}... is too long")
        return self._dir("names") / quoted

    def _write(self, path: Path, text: str) -> None:
        """Replaces a file at once; what came before stays readable until then."""
        descriptor, temporary = tempfile.mkstemp(prefix=".", dir=self._dir("staging"))
        try:
            with open(descriptor, "w") as file:
                file.write(text)
                os.fchmod(descriptor, 0o644)
            os.replace(temporary, path)
        except BaseException:
            Path(temporary).unlink(missing_ok=True)
            raise

    @contextmanager
    def locked(self, how: int, name: str = "lock") -> Iterator[None]:
        """Holds a lock file of the store; waits for it. Raises SandboxError where none can be made."""
        try:
            file = open(self.root / name, "a")  # closed below; what the holder does may raise OSError too
        except OSError as err:
            raise SandboxError(f"the store of images {self.root} cannot be locked: {err.strerror}") from err
        with file:
            fcntl.flock(file, how)
            yield


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _layer_record(chain: str, diff_id: str, size_bytes: int, notes: Sequence[str]) -> str:
    return json.dumps({"chain_id": chain, "diff_id": diff_id, "size_bytes": size_bytes, "notes": list(notes)})


def _read_layer(name: str, target: Path, record: Path, chain: str) -> _Layer:
    try:
        found = json.loads(record.read_text())
        if found["chain_id"] == chain:
            return _Layer(name, target, int(found["size_bytes"]), tuple(found["notes"]))
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise ImageError(f"{target} has no readable record ({type(err).__name__}): swe-rl sandbox gc") from err
    raise ImageError(f"{target} holds another layer: swe-rl sandbox gc")


def _mtime(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0  # removed meanwhile
