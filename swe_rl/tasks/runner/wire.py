"""Frames between the runner's processes: 4 bytes of length, then marshal. Also forking and ending processes.

marshal and `_signal` because they are part of the interpreter: importing json or signal would cost as much as a test.
"""

from __future__ import annotations

import _signal
import gc
import marshal
import os
import select
import time
from typing import Any

MAX_FRAME_BYTES = 1 << 24
PLAIN = (type(None), bool, int, float, complex, str, bytes)
NESTED = (tuple, list, set, frozenset)


def send(fd: int, value: Any) -> None:
    data = marshal.dumps(value)
    write_all(fd, len(data).to_bytes(4, "little") + data)


def write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


def read_all(fd: int) -> bytes:
    data = b""
    while True:
        chunk = os.read(fd, 1 << 16)
        if not chunk:
            return data
        data += chunk


def receive(fd: int, deadline: float | None = None) -> Any:
    """The next value, None at the end of the stream. Raises TimeoutError at the deadline, ValueError if not plain."""
    head = read_exactly(fd, 4, deadline)
    if head is None:
        return None
    size = int.from_bytes(head, "little")
    if size > MAX_FRAME_BYTES:
        raise ValueError("answer too large")
    data = read_exactly(fd, size, deadline)
    value = None if data is None else marshal.loads(data)
    check_plain(value)
    return value


def read_exactly(fd: int, size: int, deadline: float | None) -> bytes | None:
    data = b""
    while len(data) < size:
        if deadline is not None:
            poll = select.poll()
            poll.register(fd, select.POLLIN)
            if not poll.poll(max(0, int((deadline - time.monotonic()) * 1000))):
                raise TimeoutError
        chunk = os.read(fd, size - len(data))
        if not chunk:
            return None
        data += chunk
    return data


def check_plain(value: Any) -> None:
    """Raises ValueError unless `value` is made of exact builtin data types: subclasses may lie about equality."""
    kind = type(value)
    if kind in PLAIN:
        return
    if kind in NESTED:
        for item in value:
            check_plain(item)
    elif kind is dict:
        for key, item in value.items():
            check_plain(key)
            check_plain(item)
    else:
        raise ValueError("the answer is not plain data")


def is_plain(value: Any) -> bool:
    try:
        check_plain(value)
    except (ValueError, RecursionError):
        return False
    return True


def fork(run: Any, *args: Any) -> int:
    """Runs `run(*args)` in a child that never comes back, whatever happens in it. Returns its pid."""
    gc.freeze()  # the child's collector does not touch, hence not copy, what it inherits
    pid = os.fork()
    if pid == 0:
        try:
            run(*args)
        finally:
            os._exit(0)
    return pid


def keep_only(*fds: int) -> None:
    """Standard streams to /dev/null and every other descriptor closed, except `fds`."""
    null = os.open("/dev/null", os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    start = 3
    for fd in sorted(fds):
        os.closerange(start, fd)
        start = fd + 1
    os.closerange(start, 4096)


def kill_group(pid: int) -> None:
    """The process, and the group it leads if it does already."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, _signal.SIGKILL)
        except OSError:
            continue  # ended already
