"""The runner's main process: starts the process that runs tests, collects its verdicts, holds the nonce, reports."""

from __future__ import annotations

import os
import sys
from typing import Any

from swe_rl.tasks.runner.wire import fork, kill_group, read_all, receive, send, write_all


def run_reporter(run: Any) -> None:
    """run(options, jobs, results): reads the ids from `jobs`, sends (id, status, message) per test to `results`."""
    options, ids = parse(sys.argv[1:])
    nonce = os.environ.pop("SWE_RL_NONCE", "")
    sys.dont_write_bytecode = True
    hide_memory()
    jobs, to_child = os.pipe()
    results, from_child = os.pipe()
    child = fork(run, options, jobs, from_child)  # before the nonce is read: a copy of this memory would hold it
    os.close(from_child)
    if "-" in ids or not nonce:
        first, *more = read_all(0).decode("utf-8", "surrogateescape").split("\n")
        nonce = first or nonce
        ids = [item for item in ids if item != "-"] + [line for line in more if line]
    send(to_child, ids)
    report(collect(results), ids, nonce, options["report-fd"])
    kill_group(child)
    os._exit(0)  # nothing to tear down: saves the interpreter's own end


def collect(results: int) -> list[Any]:
    """Rows until the end of the stream, or until something that is no row: code under test has got at the stream."""
    rows: list[Any] = []
    while True:
        try:
            row = receive(results)
        except (ValueError, EOFError, TypeError):
            return rows
        if type(row) is not tuple or [type(item) for item in row] != [str, str, str]:
            return rows
        rows.append(row)


def report(rows: list[tuple[str, str, str]], ids: list[str], nonce: str, fd: int) -> None:
    """An id without a row is missing; one with two rows was tampered with."""
    found: dict[str, tuple[str, str]] = {}
    for test_id, status, message in rows:
        found[test_id] = ("error", "reported twice") if test_id in found else (status, message)
    for item in ids:
        if "::" in item:
            found.setdefault(item, ("missing", "not run"))
    lines = ["", f"{nonce} begin {len(found)}"]
    for test_id, (status, message) in found.items():
        lines.append(f'{nonce} {{"id": {quoted(test_id)}, "status": "{status}", "message": {quoted(message)}}}')
    lines += [f"{nonce} end {len(found)}", ""]
    write_all(fd, "\n".join(lines).encode())


def quoted(text: str) -> str:
    """A JSON string."""
    units = text.encode("utf-16-be", "surrogatepass")
    codes = [int.from_bytes(units[place : place + 2], "big") for place in range(0, len(units), 2)]
    return '"' + "".join(chr(c) if 32 <= c < 127 and c not in b'"\\' else f"\\u{c:04x}" for c in codes) + '"'


def hide_memory() -> None:
    """PR_SET_DUMPABLE 0: processes of the same user may not read this one's memory or open its descriptors."""
    try:
        import _ctypes

        own: Any = None  # the interpreter itself
        prctl = _ctypes.dlsym(_ctypes.dlopen(own, 0), "prctl")
        _ctypes.call_function(prctl, (4, 0, 0, 0, 0))
    except (ImportError, OSError, AttributeError):
        return  # an interpreter without it: the sandbox's own ptrace limits remain


def parse(arguments: list[str]) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {"root": ".", "test-s": 5.0, "shuffle": 0, "report-fd": 1}
    options.update({"remove-tests": False, "per-file": False})
    kinds: dict[str, Any] = {"root": str, "test-s": float, "shuffle": int, "report-fd": int}
    ids = []
    rest = list(arguments)
    while rest:
        item = rest.pop(0)
        key = item[2:]
        if item in ("--remove-tests", "--per-file"):
            options[key] = True
        elif item.startswith("--") and key in kinds and rest:
            options[key] = kinds[key](rest.pop(0))
        elif item.startswith("--"):
            raise SystemExit("unknown option " + item)
        else:
            ids.append(item)
    options["root"] = os.path.abspath(options["root"])
    return options, ids
