"""Runs chosen tests with pytest. Files are collected and the ids picked from them, so that one absent id does not hide
the others and thousands of ids fit. The repository decides nothing about the run: own empty settings file, no plugin
autoload, no cache. Python finds pytest through PYTHONPATH, which the interpreter itself was told to ignore.

The process here imports pytest once and then only forks and listens; pytest itself runs in children. With --per-file
there is one child per test file (pytest_keeper.py), so that what one file leaves behind does not reach the next one.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from typing import Any

from swe_rl.tasks.runner.wire import keep_only, send

MESSAGE_CHARS = 240
EXIT_BASE = 64  # a child that came to its end exits with this plus pytest's own code
FLAGS = "-q --continue-on-collection-errors --import-mode=prepend -p no:cacheprovider -p no:doctest -p no:junitxml"


class TestTimeout(Exception):
    """Raised inside a test that has used up its time."""

    __test__ = False


class Recorder:
    """Pytest plugin: picks the wanted tests, limits each one's time and sends one row per test."""

    def __init__(self, results: int, wanted: list[str], limit_s: float, seed: int, last: list[str]) -> None:
        self.results, self.limit_s = results, limit_s
        self.seed = seed  # of a shuffled order; 0 keeps the files' own
        self.last = set(last)  # these come after all others
        self.ids = {item for item in wanted if "::" in item}
        self.files = {item for item in wanted if "::" not in item}
        self.verdicts: dict[str, tuple[str, str]] = {}
        self.began = time.monotonic()
        self.counted = (0, 0)  # tests that pytest collected, reports that failed: its own numbers

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        chosen = [item for item in items if item.nodeid in self.ids or item.nodeid.partition("::")[0] in self.files]
        if self.seed:
            import random

            random.Random(self.seed).shuffle(chosen)
        items[:] = sorted(chosen, key=lambda item: item.nodeid in self.last)

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            path = report.nodeid.partition("::")[0]
            broken = sorted(item for item in self.ids if item.partition("::")[0] == path)
            for node_id in broken or [path + "::(file)"]:
                self.send(node_id, "error", summary(report), 0.0)

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        import signal

        self.verdicts[nodeid] = ("missing", "not run")
        self.began = time.monotonic()
        signal.signal(signal.SIGALRM, expire)
        signal.setitimer(signal.ITIMER_REAL, self.limit_s)

    def pytest_runtest_logreport(self, report: Any) -> None:
        status, _ = self.verdicts[report.nodeid]
        if report.failed:
            if status in ("missing", "passed"):
                self.verdicts[report.nodeid] = ("failed" if report.when == "call" else "error", summary(report))
        elif report.skipped or hasattr(report, "wasxfail"):
            self.verdicts[report.nodeid] = ("missing", "skipped or expected to fail")
        elif report.when == "call":
            self.verdicts[report.nodeid] = ("passed", "")

    def pytest_runtest_logfinish(self, nodeid: str, location: Any) -> None:
        import signal

        signal.setitimer(signal.ITIMER_REAL, 0)
        self.send(nodeid, *self.verdicts[nodeid], time.monotonic() - self.began)

    def pytest_sessionfinish(self, session: Any, exitstatus: Any) -> None:
        self.counted = (session.testscollected, session.testsfailed)

    def send(self, node_id: str, status: str, message: str, seconds: float) -> None:
        send(self.results, (node_id, status, message, seconds))


def expire(*_: Any) -> None:
    raise TestTimeout("time limit")


def summary(report: Any) -> str:
    """First line of the exception, or the last of whatever text there is."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return lines[-1 if crash is None else 0][:MESSAGE_CHARS]


def prepare(root: str) -> list[str]:
    """Imports pytest and sets up what every child shares. Returns pytest's arguments that name places."""
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(root)
    given = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    outside = [path for path in given if not (os.path.abspath(path) + "/").startswith(root + "/")]
    sys.path += outside
    import pytest  # noqa: F401  # before the repository's folders are on the path: its own `pytest.py` must not be the one

    own = [path for path in (root, os.path.join(root, "src")) if os.path.isdir(path)]
    sys.path[:0] = [path for path in given if path not in outside] + own
    folder = tempfile.mkdtemp()
    settings = os.path.join(folder, "pytest.ini")
    with open(settings, "w") as file:
        file.write("[pytest]\n")
    return ["-c", settings, "--rootdir", root, "--basetemp", os.path.join(folder, "tests")]


def run_session(options: dict[str, Any], places: list[str], wanted: list[str], last: list[str], sink: int) -> None:
    """Body of a child: one pytest session over the wanted tests, rows to `sink`, then pytest's own numbers."""
    import pytest

    os.setsid()
    keep_only(sink)
    sys.modules["__main__"] = type(sys)("__main__")  # not this script, whose recorder would be at hand there
    every = [*wanted, *last]
    files = dict.fromkeys(item.partition("::")[0] for item in sorted(wanted) + last)
    present = [path for path in files if os.path.exists(path)]
    recorder = Recorder(sink, every, options["test-s"], options["shuffle"], last)
    code = 5  # nothing collected
    if present:
        code = int(pytest.main([*FLAGS.split(), *places, "--", *present], plugins=[recorder]))
    send(sink, ("", "end", "", float(code), *recorder.counted))
    os._exit(EXIT_BASE + code)
