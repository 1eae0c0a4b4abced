"""Which tests pytest runs together, and whether what a child says about them agrees with itself.

With --per-file each test file has a child of its own, and the tests that must fail ("!" before the id) run at the end
of every child. The parent, which runs nobody's code, compares what it can see for itself: that every row is one and
was sent once, that a child which ended says so and exits with the code that fits, that pytest's own counts are the
number of rows, that the tests together claim no more time than has passed, and that no test file, conftest.py or
__init__.py beside or above one was changed. A contradiction makes the
verdicts of the file "forged", an end without an end "ended". Code that shares the interpreter with pytest can still
imitate all of this at once; see the package's docstring.
"""

from __future__ import annotations

import os
import time
from typing import Any

from swe_rl.tasks.runner.pytest_tests import EXIT_BASE, prepare, run_session
from swe_rl.tasks.runner.reporter import run_reporter
from swe_rl.tasks.runner.wire import fork, keep_only, kill_group, receive, send

TRAP = "!"  # before the id of a test that must fail
STATUSES = ("passed", "failed", "error", "missing")
ROW, END = [str, str, str, float], [str, str, str, float, int, int]
CLOCK_S = 0.05  # by which two clock readings of one moment may differ
NOISE = ("noise",)  # what arrived cannot be read: code under test has got at the pipe


def run_pytest(options: dict[str, Any], jobs: int, results: int) -> None:
    os.setsid()
    keep_only(jobs, results)
    wanted = receive(jobs)
    places = prepare(options["root"])
    traps = [item[len(TRAP) :] for item in wanted if item.startswith(TRAP)]
    caught: dict[str, tuple[str, str]] = {}
    before = contents(wanted)
    for ids in groups([item for item in wanted if not item.startswith(TRAP)], options["per-file"]):
        verdicts = run_group(options, places, ids, traps)
        if options["per-file"] and contents(wanted) != before:
            verdicts = as_trouble(ids, verdicts, traps, ("forged", "files of the tests were changed"))
        for node_id, status, message in verdicts:
            if node_id in traps:
                caught[node_id] = worse(caught.get(node_id), (status, message))
            else:
                send(results, (node_id, status, message))
    for node_id, verdict in caught.items():
        send(results, (TRAP + node_id, *verdict))


def groups(wanted: list[str], per_file: bool) -> list[list[str]]:
    """Tests that run in one process, in the order of their files."""
    found: dict[str, list[str]] = {}
    for item in wanted:
        found.setdefault(item.partition("::")[0] if per_file else "", []).append(item)
    return [found[path] for path in sorted(found)]


def worse(one: tuple[str, str] | None, other: tuple[str, str]) -> tuple[str, str]:
    """Of two verdicts about a test that must fail: any but "failed" shows more. Messages of failures are compared by
    whoever knows the right one, so of two different ones both must be seen."""
    if one is None or one == other:
        return other
    if one[0] == other[0] == "failed":
        return ("failed", "two different failures")
    return other if one[0] == "failed" or other[0] == "passed" else one


def run_group(options: dict[str, Any], places: list[str], ids: list[str], traps: list[str]) -> list[Any]:
    """(id, status, message) of every test of one child."""
    rows, sink = os.pipe()
    began = time.monotonic()
    child = fork(run_session, options, places, ids, traps, sink)
    os.close(sink)
    frames, times = [], []
    while True:
        try:
            frame = receive(rows)
        except (ValueError, EOFError, TypeError):
            frame = NOISE  # nothing after it can be read
        if frame is None:
            break
        frames.append(frame)
        times.append(time.monotonic() - began)
        if frame == NOISE:
            break
    os.close(rows)
    code = exit_code(child)
    kill_group(child)
    verdicts = [frame[:3] for frame in frames if shape(frame) == ROW and frame[1] in STATUSES]
    if not options["per-file"]:
        return verdicts
    trouble = contradiction(frames, times, code)
    if trouble is None and not {row[0] for row in verdicts}.issuperset(traps):
        trouble = ("forged", "a test that must fail did not run")
    if trouble is None:
        return verdicts
    return as_trouble(ids, verdicts, traps, trouble)


def as_trouble(ids: list[str], verdicts: list[Any], traps: list[str], trouble: tuple[str, str]) -> list[Any]:
    """The verdicts of a child that cannot be believed; what became of a test that must fail is shown as it is."""
    named = dict.fromkeys([*ids, *(row[0] for row in verdicts)])
    return [(item, *trouble) for item in named if "::" in item and item not in traps] + [
        row for row in verdicts if row[0] in traps
    ]


def contents(wanted: list[str]) -> dict[str, bytes | None]:
    """The test files, and what pytest loads from the folders above them: code that one file runs must not alter them
    for the next. None where there is no file."""
    paths: dict[str, bytes | None] = {}
    for item in wanted:
        path = (item[len(TRAP) :] if item.startswith(TRAP) else item).partition("::")[0]
        paths[path] = None
        while path:
            path = os.path.dirname(path)
            for name in ("conftest.py", "__init__.py"):
                paths[os.path.join(path, name)] = None
    for path in paths:
        try:
            with open(path, "rb") as file:
                paths[path] = file.read()
        except OSError:
            continue
    return paths


def exit_code(child: int) -> int:
    """Of a child whose pipe is closed; negative for a signal. One that closed it and lives on is ended."""
    for _ in range(200):
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.WEXITSTATUS(status) if os.WIFEXITED(status) else -os.WTERMSIG(status)
        time.sleep(0.001)
    kill_group(child)
    os.waitpid(child, 0)
    return -9


def shape(frame: Any) -> Any:
    return [type(item) for item in frame] if type(frame) is tuple else None


def contradiction(frames: list[Any], times: list[float], code: int) -> tuple[str, str] | None:
    """("forged" | "ended", why), None when all that is known of a child agrees."""
    if not frames or shape(frames[-1]) != END or frames[-1][1] != "end":
        if frames and shape(frames[-1]) != ROW:
            return ("forged", "what arrived is no row")
        return ("ended", "the process of the tests ended early")
    *rows, end = frames
    if any(shape(row) != ROW or row[1] not in STATUSES for row in rows):
        return ("forged", "what arrived is no row")
    if len({row[0] for row in rows}) != len(rows):
        return ("forged", "reported twice")
    collected, failed = end[4:]
    wrong = [row for row in rows if row[1] in ("failed", "error")]
    if code != EXIT_BASE + int(end[3]):
        return ("forged" if code >= 0 else "ended", "the exit code is not the one that was announced")
    if code - EXIT_BASE not in (0, 1, 5):
        return ("ended", "pytest was interrupted")
    absent = sum(
        row[3] == 0.0 for row in wrong
    )  # of files that could not be collected: one failure, any number of rows
    if (code - EXIT_BASE == 1) != bool(wrong) or len(wrong) - absent + bool(absent) > failed:
        return ("forged", "pytest counted other failures")
    if not collected <= len(rows) <= collected + absent:
        return ("forged", "pytest counted other tests")
    claimed = 0.0  # so far; a row may arrive late, never before all that it claims is over
    for row, arrived in zip(rows, times):  # noqa: B905
        claimed += row[3]
        if row[3] < 0 or claimed > arrived + CLOCK_S:
            return ("forged", "more time was claimed than has passed")
    return None


def main() -> None:
    run_reporter(run_pytest)
