"""Reading a stored layer: decompressed on the way, with the digests of both forms taken."""

from __future__ import annotations

import contextlib
import hashlib
import io
import shutil
import subprocess
import threading
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import BinaryIO

from swe_rl.errors import ConfigError, ImageError

_PIECE = 1 << 20
_GZIP, _ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"


class DigestReader(io.RawIOBase):
    """Passes bytes on and remembers their SHA-256."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._hash = hashlib.sha256()

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._raw.read(len(buffer))
        self._hash.update(data)
        buffer[: len(data)] = data
        return len(data)

    def drain(self) -> None:
        """Reads to the end: what lies behind the part that was of use belongs to the digest."""
        while self.read(_PIECE):
            pass

    @property
    def digest(self) -> str:
        return "sha256:" + self._hash.hexdigest()


class _Gunzip(io.RawIOBase):
    """Several members one after another, as some builders write them; what follows the last is ignored."""

    def __init__(self, raw: BinaryIO) -> None:
        self._raw = raw
        self._engine = zlib.decompressobj(31)
        self._rest = b""

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        while True:
            data = self._rest or self._raw.read(_PIECE)
            if self._engine.eof:
                if not data.startswith(_GZIP[: len(data)]) or not data:
                    return 0
                self._engine = zlib.decompressobj(31)
            if not data:
                raise EOFError("compressed data ends too early")
            out = self._engine.decompress(data, len(buffer))
            self._rest = self._engine.unconsumed_tail or self._engine.unused_data
            if out:
                buffer[: len(out)] = out
                return len(out)


@contextmanager
def uncompressed(stored: BinaryIO) -> Iterator[BinaryIO]:
    """The layer's tar stream. Raises ImageError for damaged compression."""
    source = io.BufferedReader(stored, _PIECE)  # type: ignore[type-var]
    head = source.peek(4)[:4]
    try:
        if head.startswith(_GZIP):
            yield _Gunzip(source)  # type: ignore[misc]
        elif head.startswith(_ZSTD):
            with _unzstd(source) as plain:
                yield plain
        else:
            yield source
    except (zlib.error, EOFError) as err:
        raise ImageError(f"the layer is damaged: {err}") from err


@contextmanager
def _unzstd(source: BinaryIO) -> Iterator[BinaryIO]:
    tool = shutil.which("zstd")
    if not tool:
        raise ConfigError("a layer is compressed with zstd, and the zstd command is missing: apt-get install zstd")
    process = subprocess.Popen([tool, "-dcq"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
    assert process.stdin is not None
    assert process.stdout is not None
    stdin = process.stdin

    def feed() -> None:
        with contextlib.suppress(BrokenPipeError):
            shutil.copyfileobj(source, stdin, _PIECE)
        with contextlib.suppress(BrokenPipeError):
            stdin.close()

    feeder = threading.Thread(target=feed, daemon=True)
    feeder.start()
    try:
        yield process.stdout  # type: ignore[misc]
        while process.stdout.read(_PIECE):
            pass
        feeder.join()
        if process.wait():
            raise ImageError("the layer is damaged: zstd cannot decompress it")
    finally:
        process.kill()
        process.stdout.close()
        process.wait()
        feeder.join()
