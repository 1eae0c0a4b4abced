"""The test's side of the runner: runs one test function; the repository's code is reached through a link."""

from __future__ import annotations

import builtins
import os
import time
from typing import Any

from swe_rl.tasks.runner.wire import keep_only, receive, send
from swe_rl.tasks.runner.worker import MESSAGE_CHARS, describe

GRACE_S = 0.5  # a worker is killed at its limit; its parent tells so within this time


class Remote:
    """Stands for an object in the worker. Attributes that are plain data are fetched, others are remote again."""

    def __init__(self, link: Any, place: int) -> None:
        self.__dict__.update(_link=link, _place=place)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._link.ask("get", self._place, name)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        sent = [(True, arg._place) if type(arg) is Remote else (False, arg) for arg in args]
        result = self._link.ask("call", self._place, sent, keywords)
        self._link.last = repr(result)
        return result


class Link:
    """Begins a worker and talks to it through two pipes that all workers share, one after the other."""

    def __init__(self, requests: int, replies: int, limit_s: float) -> None:
        self.requests, self.replies = requests, replies
        self.limit = time.monotonic() + limit_s
        self.number = time.monotonic_ns()  # marks this worker's replies
        self.last: str | None = None  # the last call's result, for messages
        send(requests, ("begin", self.number, limit_s))

    def ask(self, *request: Any) -> Any:
        send(self.requests, request)
        while True:
            reply = receive(self.replies, self.limit + GRACE_S)
            if reply is None:
                raise RuntimeError("the process under test ended")
            number, kind, value = reply
            if number == self.number:  # else left over from an earlier test
                break
        if kind == "value":
            return value
        if kind == "object":
            return Remote(self, value)
        if kind == "raise":
            raise rebuilt(*value)
        raise TimeoutError if time.monotonic() > self.limit - 0.05 else RuntimeError("the process under test ended")


def rebuilt(name: str, message: str) -> Exception:
    """The builtin exception of that name, so that a test can expect it; others as RuntimeError."""
    kind = getattr(builtins, str(name), None)
    if isinstance(kind, type) and issubclass(kind, Exception) and kind is not AssertionError:
        try:
            return kind(message)
        except TypeError:
            pass  # UnicodeDecodeError and others want more arguments
    return RuntimeError(f"{name}: {message}")


def importer(link: Link, root: str) -> Any:
    """`__import__` of a test file: modules of the repository are remote, the others are the interpreter's own."""

    def load(name: str, namespace: Any = None, scope: Any = None, names: Any = (), level: int = 0) -> Any:
        if level:
            raise ImportError("relative imports are not supported in test files")
        top = name.partition(".")[0]
        if not os.path.exists(os.path.join(root, top)) and not os.path.exists(os.path.join(root, top + ".py")):
            return __import__(name, namespace, scope, names, level)
        module = link.ask("import", name)
        return module if names or "." not in name else link.ask("import", top)

    return load


def test_all(options: dict[str, Any], test_file: Any, ids: list[str], requests: int, replies: int, sink: int) -> None:
    """Body of a tester process: one verdict per id of the file, each with a worker and a namespace of its own.

    test_file: code of the whole file (None when it does not compile), its source, its path.
    """
    os.setsid()
    keep_only(requests, replies, sink)
    for test_id in ids:
        name = test_id.partition("::")[2]
        try:
            link = Link(requests, replies, options["test-s"])
            verdict = run_test(test_file, name, link, options["root"])
        except BrokenPipeError:
            verdict = ("error", "the process under test ended")
        end_worker(requests)
        send(sink, verdict)


def end_worker(requests: int) -> None:
    try:
        send(requests, ("end",))
    except BrokenPipeError:
        return  # ended with its parent


def run_test(test_file: Any, name: str, link: Link, root: str) -> tuple[str, str]:
    """(status, message) of one test function."""
    code, source, path = test_file
    names = dict(builtins.__dict__, __import__=importer(link, root))
    scope: dict[str, Any] = {"__name__": "test", "__file__": path, "__builtins__": names}
    try:
        exec(code or compile(source, path, "exec"), scope)
    except BaseException as error:
        return "error", explain(error, source, path, link)
    function = scope.get(name)
    if not callable(function) or type(function) is Remote:
        return "missing", "no such test function"
    try:
        function()
    except BaseException as error:
        return "failed", explain(error, source, path, link)
    return "passed", ""


def explain(error: BaseException, source: bytes, path: str, link: Link) -> str:
    """`assert f(2) == 3: got 4`, or the line and the exception."""
    trace, number = error.__traceback__, 0
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == path:
            number = trace.tb_lineno
        trace = trace.tb_next
    line = source.decode("utf-8", "replace").split("\n")[number - 1].strip() if number else ""
    if isinstance(error, TimeoutError):
        reason = "time limit"
    elif type(error) is AssertionError and not error.args and link.last is not None:
        reason = "got " + link.last
    else:
        reason = (type(error).__name__ + ": " + describe(error)).rstrip(": ")
    return ((line + ": " if line else "") + reason)[:MESSAGE_CHARS]
