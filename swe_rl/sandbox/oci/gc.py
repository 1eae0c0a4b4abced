"""Frees disk: what nobody refers to, and under pressure the images that were opened longest ago. Never one in use."""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from swe_rl.errors import ConfigError
from swe_rl.sandbox.oci.image_config import Image
from swe_rl.sandbox.oci.machine import machine_label, remove_tree
from swe_rl.sandbox.oci.store import ImageStore
from swe_rl.sandbox.owner import is_alive

MIN_FREE = 0.1  # part of the disk that an import wants free
_FOREIGN_S = 86_400.0  # a use from another machine, whose processes cannot be seen from here, counts for a day


@dataclass(frozen=True, slots=True, kw_only=True)
class Collected:
    images: int
    layers: int
    freed_bytes: int
    kept_in_use: int  # images that would have gone, were they not in use


def free_part(store: ImageStore) -> float:
    """Part of the store's disk that is free, 0 to 1."""
    place = next(path for path in (store.root, *store.root.parents) if path.exists())
    usage = shutil.disk_usage(place)
    return usage.free / usage.total


def in_use(store: ImageStore) -> set[str]:
    """Ids of the images that a living process has opened. Marks of dead ones are removed."""
    here = machine_label(os.getpid())
    found: set[str] = set()
    for mark in store.root.glob("use/*"):
        machine, _, label = mark.name.partition("~")
        alive = is_alive(label) if machine == here else time.time() - mark.stat().st_mtime < _FOREIGN_S
        if alive:
            found.update(path.name for path in mark.iterdir())
        else:
            shutil.rmtree(mark, ignore_errors=True)
    return found


def collect(store: ImageStore, *, min_free: float = 0.0, remove: str = "") -> Collected:
    """Removes remains of killed importers and layers of no image; then the image `remove` (its name or digest), if one
    is given; then, while less than `min_free` of the disk is free, the images that were opened longest ago.

    Waits for imports under way. Raises ConfigError when the image to remove is in use, ImageError when there is none.
    """
    if not store.root.joinpath("lock").exists():
        if remove:
            store.find(remove)
        return Collected(images=0, layers=0, freed_bytes=0, kept_in_use=0)
    trash = store.root / "staging" / f"{machine_label(os.getpid())}~trash-{os.getpid()}-{time.monotonic_ns()}"
    with store.locked(fcntl.LOCK_EX):
        used = in_use(store)
        chosen = _named(store, remove, used)
        _clear_staging(store)
        trash.mkdir()
        for image in chosen:
            _forget(store, image)
        count, freed = _move_unused_layers(store, trash)
        found = _evict(store, used, min_free, trash)
    remove_tree(trash)  # after the lock: opening an image need not wait for it
    return replace(
        found,
        images=found.images + len(chosen),
        layers=found.layers + count,
        freed_bytes=found.freed_bytes + freed,
    )


def _named(store: ImageStore, reference: str, used: set[str]) -> list[Image]:
    if not reference:
        return []
    image = store.find(reference)
    if image.image_id in used:
        raise ConfigError(f"image {reference!r} is in use by a running process: end it first")
    return [image]


def _clear_staging(store: ImageStore) -> None:
    """Nobody imports now: what lies here is of the dead."""
    for path in store.root.glob("staging/*"):
        remove_tree(path) if path.is_dir() else path.unlink(missing_ok=True)
    for path in store.root.glob("staging/.*"):
        path.unlink(missing_ok=True)


def _evict(store: ImageStore, used: set[str], min_free: float, trash: Path) -> Collected:
    """Forgets images, the one opened longest ago first, while the disk needs it."""
    images = layers = freed = kept = 0
    for image in reversed(store.images()):
        if free_part(store) >= min_free:
            break
        if image.image_id in used:
            kept += 1
            continue
        _forget(store, image)
        count, size = _move_unused_layers(store, trash)
        images, layers, freed = images + 1, layers + count, freed + size
        for path in trash.iterdir():  # the disk must show what this freed before the next one goes
            remove_tree(path)
    return Collected(images=images, layers=layers, freed_bytes=freed, kept_in_use=kept)


def _forget(store: ImageStore, image: Image) -> None:
    for name, image_id in store.names().items():
        if image_id == image.image_id:
            store.forget_name(name)
    (store.root / "images" / f"{image.image_id}.json").unlink(missing_ok=True)


def _move_unused_layers(store: ImageStore, trash: Path) -> tuple[int, int]:
    """Number and bytes of the layers that no image has; they are moved to the trash."""
    wanted = {name for image in store.images() for name in image.layers}
    count = freed = 0
    for path in _layer_folders(store):
        if path.name in wanted:
            continue
        freed += sum(file.lstat().st_size for file in path.rglob("*") if file.is_file() and not file.is_symlink())
        path.chmod(0o700)
        path.rename(trash / path.name)
        path.with_name(f"{path.name}.json").unlink(missing_ok=True)
        count += 1
    for record in store.root.glob("layers/*.json"):
        if not record.with_suffix("").exists():
            record.unlink()  # its importer was killed just before the layer appeared
    return count, freed


def _layer_folders(store: ImageStore) -> Iterator[Path]:
    return (path for path in store.root.glob("layers/*") if path.is_dir())
