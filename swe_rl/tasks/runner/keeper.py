"""Which plain test functions to run, with one tester each."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

from swe_rl.tasks.runner.reporter import run_reporter
from swe_rl.tasks.runner.tester import GRACE_S, Link, test_one
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
    for number, test_id in enumerate(expand(wanted, sources)):
        path, _, name = test_id.partition("::")
        if sources[path] is None:
            send(results, (test_id, "missing", "no such file"))
        else:
            test = (codes[path], sources[path], path, name)
            send(results, (test_id, *run_tester(options, test, number, requests, replies)))


def run_tester(options: dict[str, Any], test: Any, number: int, requests: int, replies: int) -> tuple[str, str]:
    """Runs one test in a process of its own and waits for its verdict, a little more than the time limit at most."""
    limit_s = options["test-s"]
    try:
        send(requests, ("begin", number, limit_s))
    except BrokenPipeError:
        return "error", "the process under test ended"
    verdict, sink = os.pipe()
    link = Link(requests, replies, number, limit_s)
    tester = fork(test_one, test, link, options["root"], sink)
    os.close(sink)
    try:
        result = receive(verdict, link.limit + 2 * GRACE_S)
    except TimeoutError:
        result = ("failed", "time limit")
    kill_group(tester)
    os.waitpid(tester, 0)
    os.close(verdict)
    try:
        send(requests, ("end",))
    except BrokenPipeError:
        return "error", "the process under test ended"
    return result or ("error", "the process of the test ended")


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
