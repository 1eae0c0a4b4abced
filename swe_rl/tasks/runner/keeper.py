"""Which plain test functions to run, with one tester per file."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from typing import Any

from swe_rl.tasks.runner.reporter import run_reporter
from swe_rl.tasks.runner.tester import GRACE_S, end_worker, test_all
from swe_rl.tasks.runner.wire import fork, keep_only, kill_group, receive, send
from swe_rl.tasks.runner.worker import serve_repository

SYNTAX_TREE_ONLY = 0x400  # ast.PyCF_ONLY_AST without importing ast


def keep(options: dict[str, Any], jobs: int, results: int) -> None:
    """Reads the ids from `jobs`, sends (id, status, message) per test to `results`."""
    keep_only(jobs, results)
    to_worker, requests = os.pipe()
    replies, from_worker = os.pipe()
    fork(serve_repository, options["root"], to_worker, from_worker)
    os.close(to_worker)
    os.close(from_worker)
    wanted = receive(jobs)
    sources = {path: read_source(options["root"], path) for path in {item.partition("::")[0] for item in wanted}}
    codes = {path: compiled(source, path) for path, source in sources.items()}
    if options["remove-tests"]:
        for path, source in sources.items():
            if source is not None:
                os.unlink(os.path.join(options["root"], path))
    groups: dict[str, list[str]] = {}
    for test_id in expand(wanted, sources):
        groups.setdefault(test_id.partition("::")[0], []).append(test_id)
    for path, ids in groups.items():
        if sources[path] is None:
            for test_id in ids:
                send(results, (test_id, "missing", "no such file"))
        else:
            test_file = (codes[path], sources[path], path)
            run_tests(options, test_file, ids, requests, replies, results)


def run_tests(
    options: dict[str, Any], test_file: Any, ids: list[str], requests: int, replies: int, results: int
) -> None:
    """Runs the tests of one file in a tester, and after one that hung or died the rest in a new tester."""
    done = 0
    while done < len(ids):
        verdicts, sink = os.pipe()
        tester = fork(test_all, options, test_file, ids[done:], requests, replies, sink)
        os.close(sink)
        done += forward(verdicts, ids[done:], results, options["test-s"] + 2 * GRACE_S)
        kill_group(tester)
        os.waitpid(tester, 0)
        os.close(verdicts)
        end_worker(requests)


def forward(verdicts: int, ids: list[str], results: int, limit_s: float) -> int:
    """Passes verdicts on until one is late or absent, which is a verdict too. Returns how many tests have theirs."""
    for place, test_id in enumerate(ids):
        try:
            verdict = receive(verdicts, time.monotonic() + limit_s)
        except TimeoutError:
            send(results, (test_id, "failed", "time limit"))
            return place + 1
        send(results, (test_id, *(verdict or ("error", "the process of the test ended"))))
        if verdict is None:
            return place + 1
    return len(ids)


def compiled(source: bytes | None, path: str) -> Any:
    try:
        return compile(source or b"", path, "exec")
    except (SyntaxError, ValueError):
        return None  # the tester meets the error again and reports it


def expand(wanted: list[str], sources: dict[str, Any]) -> Iterator[str]:
    """Ids as they are; a file becomes the ids of its top-level test functions, in their order."""
    for item in wanted:
        if "::" in item or sources[item] is None:
            yield item
            continue
        try:
            body = compile(sources[item], item, "exec", SYNTAX_TREE_ONLY).body
        except (SyntaxError, ValueError):
            yield item + "::(file)"
            continue
        for node in body:
            if type(node).__name__ == "FunctionDef" and node.name.startswith("test"):
                yield item + "::" + node.name


def read_source(root: str, path: str) -> bytes | None:
    try:
        with open(os.path.join(root, path), "rb") as file:
            return file.read()
    except OSError:
        return None


def main() -> None:
    run_reporter(keep)
