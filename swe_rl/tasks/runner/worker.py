"""The repository's side of the runner: the only processes that run the code under test."""

from __future__ import annotations

import _signal
import os
import sys
from typing import Any

from swe_rl.tasks.runner.wire import fork, is_plain, keep_only, kill_group, receive, send

MESSAGE_CHARS = 240


def serve_repository(root: str, requests: int, replies: int) -> None:
    """Forks a worker for each ("begin", number, limit_s); other requests at this level are left-overs of a dead one."""
    keep_only(requests, replies)
    sys.path.insert(0, root)
    sys.path_hooks.insert(0, source_finder(root))
    os.chdir(root)
    compile("def f(a):\n    return a[1:]\n", "", "exec")  # the parser's own set-up, once instead of in each worker
    while True:
        request = receive(requests)
        if request is None:
            return
        if request[0] == "begin":
            worker = fork(work, request[1], requests, replies)
            wait(worker, request[2])
            send(replies, (request[1], "gone", None))


def wait(worker: int, limit_s: float) -> None:
    """Until the worker has ended, by itself or at the limit; what it started goes with it."""
    _signal.signal(_signal.SIGALRM, lambda *_: kill_group(worker))
    _signal.setitimer(_signal.ITIMER_REAL, limit_s)
    os.waitpid(worker, 0)
    _signal.setitimer(_signal.ITIMER_REAL, 0)
    kill_group(worker)


def source_finder(root: str) -> Any:
    """Path hook that compiles every module below `root`: a stale or forged __pycache__ there is never read."""
    import _frozen_importlib_external as external

    class SourceOnly(external.SourceFileLoader):
        def get_code(self, name: str) -> Any:
            path = self.get_filename(name)
            return compile(self.get_data(path), path, "exec", dont_inherit=True)

    def hook(path: str) -> Any:
        if path != root and not path.startswith(root + "/"):
            raise ImportError(path)
        return external.FileFinder(path, (SourceOnly, [".py"]))

    return hook


def work(number: int, requests: int, replies: int) -> None:
    """Answers a test's requests until it ends."""
    os.setsid()
    known: list[Any] = []  # objects that a test may refer to by their place
    while True:
        request = receive(requests)
        if request is None or request[0] == "end":
            return
        try:
            value = answer(request, known)
            reply: tuple[str, Any] = ("value", value) if is_plain(value) else ("object", remember(value, known))
        except BaseException as error:  # SystemExit and KeyboardInterrupt too: a test must see them as failures
            reply = ("raise", (type(error).__name__, describe(error)))
        send(replies, (number, *reply))


def answer(request: Any, known: list[Any]) -> Any:
    action, subject = request[0], request[1]
    if action == "import":
        __import__(subject)
        return sys.modules[subject]
    if action == "call":
        args = [known[item] if is_reference else item for is_reference, item in request[2]]
        return known[subject](*args, **request[3])
    return attribute(known[subject], request[2])


def attribute(owner: Any, name: str) -> Any:
    if not hasattr(owner, name) and isinstance(owner, type(sys)):
        try:
            __import__(owner.__name__ + "." + name)  # `from package import module`
        except ModuleNotFoundError as error:
            if error.name != owner.__name__ + "." + name:
                raise
    return getattr(owner, name)


def remember(value: Any, known: list[Any]) -> int:
    known.append(value)
    return len(known) - 1


def describe(error: BaseException) -> str:
    try:
        return str(error)[:MESSAGE_CHARS]
    except BaseException:  # its own __str__ failed
        return ""
