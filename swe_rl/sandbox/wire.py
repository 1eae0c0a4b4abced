"""The framed protocol of csrc/sandboxd/frame.h, seen from the owner. Bytes only, no I/O."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

from swe_rl.errors import SandboxLost
from swe_rl.types import ExecResult, Outcome

SETUP, EXEC, DATA, KILL, PING, SNAPSHOT, ACK, LISTEN = range(1, 9)
READY, FAILED, RESULT, CHUNK, PONG, PASSED, ENDED, HELLO = 32, 33, 34, 35, 36, 37, 38, 39
SHELL, READ, WRITE = 0, 1, 2
MAX_BODY = 8 << 20  # bytes of one frame
MAX_KEEP = 3 << 20  # bytes kept per output stream
DATA_PIECE = 1 << 20

_HEADER = struct.Struct("<III")  # body length, request id, type
_RESULT = struct.Struct("<IIQQQIII")
_OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)  # the supervisor numbers them in this order

# items of a SETUP body
BIND, DEVICE, LINK, FILE, WORKDIR, LAYER, ENV, SHELL_PATH, CGROUP, EMPTY, IMAGE, USER, CPU = range(1, 14)
FLAG_NO_IDMAP, FLAG_USERNS = 1, 2


def frame(kind: int, request_id: int, body: bytes = b"") -> bytes:
    return _HEADER.pack(len(body), request_id, kind) + body


def encoded(text: str) -> bytes | None:
    """As file names are (surrogateescape); None for half a surrogate pair, which has no bytes."""
    try:
        return text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        return None


def _blob(value: str | bytes) -> bytes:
    """Length, bytes, a NUL that is not counted. File names keep undecodable bytes (surrogateescape)."""
    raw = value.encode("utf-8", "surrogateescape") if isinstance(value, str) else value
    return struct.pack("<I", len(raw)) + raw + b"\0"


def item(op: int, a: str, b: str | bytes = b"") -> bytes:
    """One item of a SETUP body; csrc/sandboxd/frame.h says what `a` and `b` are for each op."""
    return struct.pack("<I", op) + _blob(a) + _blob(b)


def numbers(*, memory: int, pids: int, disk: int, lease_ms: int, owner: int, flags: int) -> bytes:
    """The head of a SETUP body."""
    return struct.pack("<6Q", memory, pids, disk, lease_ms, owner, flags)


def listen_body(port: int) -> bytes:
    return struct.pack("<I", port)


def exec_body(
    kind: int, command: bytes, *, cwd: str, timeout_s: float, keep_bytes: int, kill_bytes: int, has_data: bool
) -> bytes:
    timeout_ms = int(min(max(timeout_s * 1000, 1), 0xFFFFFFFF))
    head = struct.pack("<IIIIQ", kind, has_data, timeout_ms, min(keep_bytes, MAX_KEEP), kill_bytes)
    return head + _blob(cwd) + _blob(command)


@dataclass(frozen=True, slots=True)
class Frame:
    kind: int
    request_id: int
    body: bytes


class FrameReader:
    """Cuts a byte stream into frames."""

    def __init__(self) -> None:
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Yields the frames completed by `data`. Raises SandboxLost on a length no supervisor sends."""
        buffer = self._buffer
        buffer += data
        start = 0
        while len(buffer) - start >= _HEADER.size:
            length, request_id, kind = _HEADER.unpack_from(buffer, start)
            if length > MAX_BODY:
                raise SandboxLost(f"the sandbox sent a frame of {length} bytes")
            end = start + _HEADER.size + length
            if len(buffer) < end:
                break
            yield Frame(kind, request_id, bytes(buffer[start + _HEADER.size : end]))
            start = end
        del buffer[:start]


def _join(kept: bytes, total: int, head_cap: int) -> bytes:
    """Head and tail with a marker that says how much is missing between them."""
    if total <= len(kept):
        return kept
    marker = b"\n[... %d bytes omitted ...]\n" % (total - len(kept))
    return kept[:head_cap] + marker + kept[head_cap:]


def parse_result(body: bytes) -> ExecResult:
    code, outcome, micros, out_total, err_total, out_len, err_len, head_cap = _RESULT.unpack_from(body)
    out = body[_RESULT.size : _RESULT.size + out_len]
    err = body[_RESULT.size + out_len : _RESULT.size + out_len + err_len]
    return ExecResult(
        exit_code=code,
        stdout=_join(out, out_total, head_cap),
        stderr=_join(err, err_total, head_cap),
        outcome=_OUTCOMES[outcome],
        duration_s=micros / 1e6,
        stdout_bytes=out_total,
        stderr_bytes=err_total,
    )


def refused(message: bytes) -> ExecResult:
    """The result of a command that was never started."""
    return ExecResult(
        exit_code=126,
        stdout=b"",
        stderr=message,
        outcome="nonzero",
        duration_s=0.0,
        stdout_bytes=0,
        stderr_bytes=len(message),
    )
