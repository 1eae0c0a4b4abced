"""Runs inside a sandbox while tasks are made: standard library and pytest only, never imported by the package.

    python3 -I -S probe.py < request.json        answer: JSON in the file request["answer"]

mode "tests": runs test ids or files by pytest. With `trace`, also which functions each test enters and which lines run.
With `explain`, for that many failed tests: calls that show the failure (examples.py).
mode "evaluate": what such calls give, for comparison with another state of the code.
"""
# mypy: ignore-errors

import json
import os
import resource
import socket
import sys
import threading
import time

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
import examples

sys.path.pop(0)


# -- tests ------------------------------------------------------------------------------------------------------------


class Tracer:
    """Which code objects each test enters, and every line that runs. Frames whose lines are all known run untraced."""

    def __init__(self, root, files):
        self.root = root
        self.files = {os.path.join(root, name): name for name in files}
        self.lines = {name: set() for name in files}
        self.left = {}  # code object -> lines not seen yet
        self.spans = {}  # code object -> [file, first line, last line, tests]
        self.test = None

    def start(self):
        threading.settrace(self.enter)
        sys.settrace(self.enter)

    def stop(self):
        sys.settrace(None)
        threading.settrace(None)

    def enter(self, frame, event, arg):
        code = frame.f_code
        name = self.files.get(code.co_filename)
        if name is None or event != "call":
            return None
        if code not in self.spans:
            lines = {line for _, _, line in code.co_lines() if line is not None}
            self.left[code] = lines
            self.spans[code] = [name, min(lines), max(lines), set()]
        if self.test is not None:
            self.spans[code][3].add(self.test)
        left, seen = self.left[code], self.lines[name]
        if not left:
            return None
        left.discard(frame.f_lineno)
        seen.add(frame.f_lineno)

        def step(frame, event, arg):
            if event == "line":
                left.discard(frame.f_lineno)
                seen.add(frame.f_lineno)
            return step

        return step

    def answer(self):
        spans = [[*span[:3], sorted(span[3])] for span in self.spans.values() if span[3]]
        return {"spans": sorted(spans), "lines": {name: sorted(lines) for name, lines in self.lines.items()}}


class Plugin:
    """Keeps the chosen tests, remembers how each ended and how long it took."""

    def __init__(self, request, tracer):
        self.request, self.tracer = request, tracer
        self.ids = {name for name in request["tests"] if "::" in name}
        self.status, self.seconds, self.examples, self.running, self.unsteady = {}, {}, [], None, set()

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if not self.ids or item.nodeid in self.ids]
        if self.request.get("reverse"):
            items.reverse()

    def pytest_collectreport(self, report):
        if report.failed:
            self.status[report.nodeid.partition("::")[0]] = "error"

    def pytest_runtest_logstart(self, nodeid, location):
        self.status[nodeid], self.seconds[nodeid] = "missing", time.process_time()
        self.running = nodeid
        if self.tracer:
            self.tracer.test = nodeid
            self.tracer.start()

    def watch(self, owner, name):
        """Tests that call owner.name depend on clocks, networks or scheduling."""
        original = getattr(owner, name)

        def watched(*args, **keywords):
            self.unsteady.add(self.running)
            return original(*args, **keywords)

        setattr(owner, name, watched)

    def pytest_runtest_logreport(self, report):
        if report.failed or report.skipped or hasattr(report, "wasxfail"):
            self.status[report.nodeid] = "failed" if report.failed else "skipped"
        elif report.when == "call" and self.status[report.nodeid] == "missing":
            self.status[report.nodeid] = "passed"

    def pytest_runtest_logfinish(self, nodeid, location):
        if self.tracer:
            self.tracer.stop()
            self.tracer.test = None
        self.seconds[nodeid] = round(time.process_time() - self.seconds[nodeid], 4)

    def pytest_exception_interact(self, node, call, report):
        if len(self.examples) < self.request.get("explain", 0) and hasattr(node, "obj") and report.when == "call":
            try:
                found = examples.explain(node, call.excinfo, self.request["imports"])
            except Exception:  # whatever the tested code does to us: this test just gives no example
                found = []
            self.examples += [{"test": node.nodeid, **example} for example in found]


def run_tests(request):
    import pytest

    tracer = Tracer(request["root"], request["sources"]) if request.get("trace") else None
    plugin = Plugin(request, tracer)
    if request.get("trace"):
        for owner, name in (
            (time, "sleep"),
            (socket.socket, "connect"),
            (socket.socket, "bind"),
            (threading.Thread, "start"),
        ):
            plugin.watch(owner, name)
    files = list(dict.fromkeys(name.partition("::")[0] for name in request["tests"]))
    flags = ["-c", "/dev/null", "--rootdir", request["root"], "-p", "no:cacheprovider", "-q", "--tb=short"]
    pytest.main([*flags, "--continue-on-collection-errors", *files], plugins=[plugin])
    answer = {"status": plugin.status, "seconds": plugin.seconds, "examples": plugin.examples}
    answer["unsteady"] = sorted(filter(None, plugin.unsteady))
    return {**answer, **(tracer.answer() if tracer else {})}


# -- entry ------------------------------------------------------------------------------------------------------------


def main():
    request = json.load(sys.stdin)
    if request.get("cpu_s"):
        resource.setrlimit(resource.RLIMIT_CPU, (request["cpu_s"], request["cpu_s"] + 1))
    sys.dont_write_bytecode = True
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    os.chdir(request["root"])
    sys.path[:0] = request["path"]
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(null, stream)
    try:
        if request["mode"] == "evaluate":
            answer = {"results": [examples.evaluate(example) for example in request["examples"]]}
        else:
            answer = run_tests(request)
    except BaseException as error:  # SystemExit of the tested code too
        answer = {"error": (type(error).__name__ + ": " + str(error))[:300]}
    with open(request["answer"] + ".part", "w") as file:
        json.dump(answer, file)
    os.replace(request["answer"] + ".part", request["answer"])
    os._exit(0)  # threads and exit hooks of the tested code have no say


main()
