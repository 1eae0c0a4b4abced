"""The program that runs chosen tests with pytest inside a sandbox and reports one status per test id.

Same command line and report as the runner of plain test functions: `python3 -I -S RUNNER --root DIR ID|FILE|- ...`, on
standard input the nonce and further ids, one a line; the report is `NONCE begin N`, one `NONCE {"id", "status",
"message"}` per id, `NONCE end N`. Standard library and pytest only (from PYTHONPATH); it never imports this package.
The repository decides nothing about the run: own empty ini file, no plugin autoload, no addopts, collection by file and
then by exact id. Only a test whose call phase passed, with set-up and tear-down, is `passed`.
"""

RUNNER_SOURCE = r'''
import json, os, sys, tempfile

BAD_ENV = ("PYTEST_ADDOPTS", "PYTEST_PLUGINS", "PYTHONSTARTUP", "PYTHONINSPECT")


class Recorder:
    """pytest plugin: keeps the chosen ids (all if none are given) and remembers how each ended."""

    def __init__(self, ids):
        self.wanted, self.status, self.message = dict.fromkeys(ids), {}, {}

    def pytest_collection_modifyitems(self, config, items):
        if self.wanted:
            chosen = [item for item in items if item.nodeid in self.wanted]
            config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in self.wanted])
            items[:] = chosen

    def pytest_collectreport(self, report):
        if report.failed:
            file = report.nodeid.split("::")[0]
            for name in self.wanted or (file,):
                if name.split("::")[0] == file:
                    self.note(name, "error", report)

    def pytest_runtest_logreport(self, report):
        if report.failed:
            self.note(report.nodeid, "failed" if report.when == "call" else "error", report)
        elif report.skipped:
            self.note(report.nodeid, "xfailed" if hasattr(report, "wasxfail") else "skipped", report)
        elif report.when == "call" and report.nodeid not in self.status:
            self.status[report.nodeid] = "xpassed" if hasattr(report, "wasxfail") else "passed"

    def note(self, name, status, report):
        self.status[name] = status
        crash = getattr(getattr(report, "longrepr", None), "reprcrash", None)
        text = getattr(crash, "message", None) or (str(report.longrepr or "").strip() or " ").splitlines()[-1]
        self.message[name] = text.strip().splitlines()[0][:200] if text.strip() else ""

    def records(self):
        for name in self.wanted or self.status:
            yield {"id": name, "status": self.status.get(name, "missing"), "message": self.message.get(name, "")}


def run_tests(root, ids, results):
    """The worker: imports and runs the repository's code. Its rows go to the reporter through a pipe."""
    for name in BAD_ENV:
        os.environ.pop(name, None)
    os.environ["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    sys.dont_write_bytecode = True
    os.chdir(root)
    sys.path[:0] = [path for path in os.environ.get("PYTHONPATH", "").split(":") if path]
    import pytest

    folder = tempfile.mkdtemp()
    ini = os.path.join(folder, "pytest.ini")
    with open(ini, "w") as file:
        file.write("[pytest]\n")
    recorder = Recorder([name for name in ids if "::" in name])
    files = [name for name in dict.fromkeys(name.split("::")[0] for name in ids) if os.path.exists(name)]
    options = ["-c", ini, "--rootdir", root, "--basetemp", os.path.join(folder, "tests"), "--import-mode=prepend", "-q",
               "--continue-on-collection-errors", "--tb=short", "--no-header", "--no-summary",
               "-p", "no:cacheprovider", "-p", "no:doctest", "-p", "no:junitxml"]
    try:
        if files:
            pytest.main([*options, "--", *files], plugins=[recorder])
    finally:
        write_all(results, json.dumps(list(recorder.records())))


def hide_memory():
    """PR_SET_DUMPABLE 0: the worker, a process of the same user, may not read this one's memory or descriptors."""
    try:
        import _ctypes

        prctl = _ctypes.dlsym(_ctypes.dlopen(None, 0), "prctl")
        _ctypes.call_function(prctl, (4, 0, 0, 0, 0))
    except (ImportError, OSError, AttributeError):
        pass  # an interpreter without it: the sandbox's own ptrace limits remain


def read_all(fd):
    chunks = []
    while chunks[-1:] != [b""]:
        chunks.append(os.read(fd, 1 << 16))
    return b"".join(chunks)


def write_all(fd, text):
    data = text.encode()
    while data:
        data = data[os.write(fd, data):]


def start_worker(root):
    """Forked before the nonce is read, so that no memory of it is inherited. Returns its two pipes."""
    jobs, to_worker = os.pipe()
    results, from_worker = os.pipe()
    if os.fork() == 0:
        os.close(to_worker)
        os.close(results)
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):  # what tests print goes nowhere
            os.dup2(null, stream)
        try:
            run_tests(root, json.loads(read_all(jobs)), from_worker)
        finally:
            os._exit(0)
    os.close(jobs)
    os.close(from_worker)
    return to_worker, results


def main(argv):
    nonce = os.environ.pop("SWE_RL_NONCE", "")
    root, ids = os.getcwd(), []
    rest = iter(argv)
    for argument in rest:
        if argument == "--root":
            root = os.path.abspath(next(rest))
        elif argument != "-":
            ids.append(argument)
    hide_memory()
    to_worker, results = start_worker(root)
    if "-" in argv or not nonce:
        nonce, *more = read_all(0).decode("utf-8", "surrogateescape").split("\n")
        ids += [line for line in more if line]
    write_all(to_worker, json.dumps(ids))
    os.close(to_worker)
    try:
        rows = {row["id"]: row for row in json.loads(read_all(results) or b"[]")}
    except ValueError:
        rows = {}  # the worker ended in the middle: nothing counts as passed
    for name in ids:
        if "::" in name:
            rows.setdefault(name, {"id": name, "status": "missing", "message": "not run"})
    lines = ["%s begin %d" % (nonce, len(rows)), *("%s %s" % (nonce, json.dumps(row)) for row in rows.values())]
    write_all(1, "\n".join(["", *lines, "%s end %d" % (nonce, len(rows)), ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
'''
