"""The rollout journal: what is finished stays finished, whatever is killed and when.

One append-only file per (phase, step) while rollouts run; `compact` turns it into one Parquet file and removes it. A
frame is `length u32 | crc32 u32 | payload`, little endian, the payload a JSON object; each `append` returns after
fsync. A kill in mid-write leaves a broken last frame, which reading ignores and the next append cuts off. Parquet files
appear by atomic rename, so a kill between rename and removal leaves both, which reads the same.
"""

from __future__ import annotations

import json
import logging
import os
import struct
import threading
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO
from urllib.parse import quote, unquote

from swe_rl.rollout.records import from_json, from_row, parquet_schema, to_json, to_row
from swe_rl.types import Trajectory

log = logging.getLogger(__name__)

_HEADER = struct.Struct("<II")
_MAX_RECORD_BYTES = 1 << 30  # a larger length is a broken frame


@dataclass(frozen=True, slots=True, order=True)
class RolloutKey:
    """Names one rollout for ever: the same key is never sampled twice in a run."""

    phase: str
    step: int
    task_id: str
    rollout_index: int

    @property
    def group_id(self) -> str:
        return f"{self.phase}/{self.step}/{self.task_id}"

    @property
    def trajectory_id(self) -> str:
        return f"{self.group_id}/{self.rollout_index}"


class Journal:
    """Finished rollouts of a run, by key. Thread-safe; one writing process per directory.

    Two locks, taken in this order: `_writing` for the files, held during fsync, and `_lock` for the memory, held only
    for moments, so that `get` on the event loop never waits for a disk that another thread writes to.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._open: dict[tuple[str, int], BinaryIO] = {}
        self._cache: dict[tuple[str, int], dict[tuple[str, int], Trajectory]] = {}
        self._writing = threading.Lock()
        self._lock = threading.Lock()

    def append(self, key: RolloutKey, trajectory: Trajectory) -> None:
        """Writes one finished rollout and returns when it is on disk. Raises ValueError for a key that is there
        already."""
        payload = json.dumps([key.phase, key.step, to_json(trajectory)], separators=(",", ":")).encode()
        with self._writing:
            if self.get(key) is not None:
                raise ValueError(f"{key} is in the journal already")
            _write_frame(self._stream(key.phase, key.step), payload)
            with self._lock:
                self._load(key.phase, key.step)[key.task_id, key.rollout_index] = trajectory

    def get(self, key: RolloutKey) -> Trajectory | None:
        """The finished rollout of that key, from this run or the one before the resume."""
        with self._lock:
            return self._load(key.phase, key.step).get((key.task_id, key.rollout_index))

    def finished(self, phase: str, step: int) -> list[Trajectory]:
        """All finished rollouts of a step, ordered by task and index."""
        with self._lock:
            found = self._load(phase, step)
            return [found[key] for key in sorted(found)]

    def compact(self, phase: str, step: int) -> Path:
        """Rewrites a step as Parquet, ordered by task and index, and forgets it in memory. Idempotent."""
        target, source = self._path(phase, step, "parquet"), self._path(phase, step, "journal")
        with self._writing:
            if source.exists() or not target.exists():
                write_parquet(target, self.finished(phase, step))
            if (stream := self._open.pop((phase, step), None)) is not None:
                stream.close()
            source.unlink(missing_ok=True)
            with self._lock:
                self._cache.pop((phase, step), None)
        return target

    def compact_all(self) -> list[Path]:
        """Compacts every step that is still in the append-only form; for the end of a phase or a run."""
        steps = [path.stem.rpartition("-") for path in sorted(self._directory.glob("*.journal"))]
        return [self.compact(unquote(phase), int(step)) for phase, _, step in steps]

    def close(self) -> None:
        """Closes the open files; what was appended is on disk already. Idempotent."""
        with self._writing:
            for stream in self._open.values():
                stream.close()
            self._open.clear()

    def _path(self, phase: str, step: int, suffix: str) -> Path:
        return self._directory / f"{quote(phase, safe='')}-{step:06d}.{suffix}"

    def _load(self, phase: str, step: int) -> dict[tuple[str, int], Trajectory]:
        if (phase, step) not in self._cache:
            parquet = self._path(phase, step, "parquet")
            found = read_parquet(parquet) if parquet.exists() else []
            found += read_journal(self._path(phase, step, "journal"))
            self._cache[phase, step] = {(item.task_id, item.rollout_index): item for item in reversed(found)}
        return self._cache[phase, step]

    def _stream(self, phase: str, step: int) -> BinaryIO:
        if (phase, step) not in self._open:
            path = self._path(phase, step, "journal")
            created = not path.exists()
            stream = path.open("r+b" if not created else "w+b", buffering=0)
            stream.truncate(sum(_HEADER.size + len(payload) for payload in _frames(stream)))
            stream.seek(0, os.SEEK_END)
            if created:
                _sync_directory(self._directory)
            self._open[phase, step] = stream
        return self._open[phase, step]


def read_journal(path: Path) -> Iterator[Trajectory]:
    """Trajectories of one journal file in the order written; nothing if it does not exist."""
    if not path.exists():
        return
    with path.open("rb") as stream:
        read = 0
        for payload in _frames(stream):
            read += _HEADER.size + len(payload)
            yield from_json(json.loads(payload)[2])
    if lost := path.stat().st_size - read:
        log.warning("%s: %d bytes of an unfinished record at the end are ignored", path, lost)


def write_parquet(path: Path, trajectories: Sequence[Trajectory]) -> None:
    """Writes and renames into place, so that `path` is complete whenever it exists."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pylist([to_row(item) for item in trajectories], schema=parquet_schema())
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(table, partial, compression="zstd")
    with partial.open("rb") as stream:
        os.fsync(stream.fileno())
    partial.replace(path)
    _sync_directory(path.parent)


def read_parquet(path: Path) -> list[Trajectory]:
    """Trajectories of one step as written by `write_parquet`."""
    import pyarrow.parquet as pq

    return [from_row(row) for row in pq.read_table(path).to_pylist()]


def _write_frame(stream: BinaryIO, payload: bytes) -> None:
    """All or nothing: a write that fails (disk full) is cut off again, so that later frames stay readable."""
    start = stream.tell()
    frame = memoryview(_HEADER.pack(len(payload), zlib.crc32(payload)) + payload)
    try:
        while frame:
            frame = frame[stream.write(frame) :]
        os.fsync(stream.fileno())
    except OSError:
        stream.truncate(start)
        stream.seek(start)
        raise


def _frames(stream: BinaryIO) -> Iterator[bytes]:
    """Payloads from the start up to the first frame that is incomplete or fails its checksum."""
    stream.seek(0)
    while len(header := stream.read(_HEADER.size)) == _HEADER.size:
        length, checksum = _HEADER.unpack(header)
        if not 0 < length <= _MAX_RECORD_BYTES:
            return
        payload = stream.read(length)
        if len(payload) != length or zlib.crc32(payload) != checksum:
            return
        yield payload


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
