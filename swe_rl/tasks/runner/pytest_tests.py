"""Runs chosen tests with pytest. Files are collected and the ids picked from them, so that one absent id does not hide
the others and thousands of ids fit. The repository decides nothing about the run: own empty settings file, no plugin
autoload, no cache. Python finds pytest through PYTHONPATH, which the interpreter itself was told to ignore.
"""

from __future__ import annotations

import os
import sys
import tempfile
from typing import Any

from swe_rl.tasks.runner.reporter import run_reporter
from swe_rl.tasks.runner.wire import keep_only, receive, send

MESSAGE_CHARS = 240
FLAGS = "-q --continue-on-collection-errors --import-mode=prepend -p no:cacheprovider -p no:doctest -p no:junitxml"


class TestTimeout(Exception):
    """Raised inside a test that has used up its time."""

    __test__ = False


class Recorder:
    """Pytest plugin: picks the wanted tests, limits each one's time and sends one row per test."""

    def __init__(self, results: int, wanted: list[str], limit_s: float) -> None:
        self.results, self.limit_s = results, limit_s
        self.ids = {item for item in wanted if "::" in item}
        self.files = {item for item in wanted if "::" not in item}
        self.verdicts: dict[str, tuple[str, str]] = {}

    def pytest_collection_modifyitems(self, config: Any, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid in self.ids or item.nodeid.partition("::")[0] in self.files]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            path = report.nodeid.partition("::")[0]
            broken = sorted(item for item in self.ids if item.partition("::")[0] == path)
            for node_id in broken or [path + "::(file)"]:
                send(self.results, (node_id, "error", summary(report)))

    def pytest_runtest_logstart(self, nodeid: str, location: Any) -> None:
        import signal

        self.verdicts[nodeid] = ("missing", "not run")
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
        send(self.results, (nodeid, *self.verdicts[nodeid]))


def expire(*_: Any) -> None:
    raise TestTimeout("time limit")


def summary(report: Any) -> str:
    """First line of the exception, or the last of whatever text there is."""
    crash = getattr(report.longrepr, "reprcrash", None)
    text = str(report.longrepr) if crash is None else crash.message
    lines = [line for line in text.splitlines() if line.strip()] or [""]
    return lines[-1 if crash is None else 0][:MESSAGE_CHARS]


def run_pytest(options: dict[str, Any], jobs: int, results: int) -> None:
    os.setsid()
    keep_only(jobs, results)
    wanted = receive(jobs)
    for name in ("PYTEST_ADDOPTS", "PYTEST_PLUGINS"):
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    root = options["root"]
    os.chdir(root)
    given = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    outside = [path for path in given if not (os.path.abspath(path) + "/").startswith(root + "/")]
    sys.path += outside
    import pytest  # before the repository's folders are on the path: its own `pytest.py` must not be the one

    own = [path for path in (root, os.path.join(root, "src")) if os.path.isdir(path)]
    sys.path[:0] = [path for path in given if path not in outside] + own
    folder = tempfile.mkdtemp()
    settings = os.path.join(folder, "pytest.ini")
    with open(settings, "w") as file:
        file.write("[pytest]\n")
    files = sorted({item.partition("::")[0] for item in wanted if os.path.exists(item.partition("::")[0])})
    places = ["-c", settings, "--rootdir", root, "--basetemp", os.path.join(folder, "tests")]
    if files:
        pytest.main([*FLAGS.split(), *places, "--", *files], plugins=[Recorder(results, wanted, options["test-s"])])


def main() -> None:
    run_reporter(run_pytest)
