"""Runs inside a sandbox while tasks are made: standard library and pytest only, never imported by the package.

    python3 -I -S probe.py < request.json        answer: JSON at request["answer"]

mode "tests": runs test ids or files by pytest. With `trace`, also which functions each test enters and which lines run.
With `explain`, for some failed tests: calls of the package, rewritten so that they stand alone (locals become literals,
names become imports), and what they give here.
mode "evaluate": what such calls give, for comparison with another state of the code.
"""

import ast
import builtins
import copy
import inspect
import json
import os
import resource
import signal
import sys
import threading
import time

MAX_EXPRESSION, MAX_VALUE, MAX_INLINE = 160, 200, 120
EVALUATE_S = 1.0


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
        self.status, self.seconds, self.examples = {}, {}, []

    def pytest_collection_modifyitems(self, items):
        items[:] = [item for item in items if not self.ids or item.nodeid in self.ids]
        if self.request.get("reverse"):
            items.reverse()

    def pytest_collectreport(self, report):
        if report.failed:
            self.status[report.nodeid.partition("::")[0]] = "error"

    def pytest_runtest_logstart(self, nodeid, location):
        self.status[nodeid], self.seconds[nodeid] = "missing", time.perf_counter()
        if self.tracer:
            self.tracer.test = nodeid
            self.tracer.start()

    def pytest_runtest_logreport(self, report):
        if report.failed or report.skipped or hasattr(report, "wasxfail"):
            self.status[report.nodeid] = "failed" if report.failed else "skipped"
        elif report.when == "call" and self.status[report.nodeid] == "missing":
            self.status[report.nodeid] = "passed"

    def pytest_runtest_logfinish(self, nodeid, location):
        if self.tracer:
            self.tracer.stop()
            self.tracer.test = None
        self.seconds[nodeid] = round(time.perf_counter() - self.seconds[nodeid], 4)

    def pytest_exception_interact(self, node, call, report):
        if len(self.examples) < self.request.get("explain", 0) and hasattr(node, "obj") and report.when == "call":
            try:
                found = explain(node, call.excinfo, self.request["imports"])
            except Exception:  # whatever the tested code does to us: this test just gives no example
                found = []
            self.examples += [{"test": node.nodeid, **example} for example in found]


def run_tests(request):
    import pytest

    tracer = Tracer(request["root"], request["sources"]) if request.get("trace") else None
    plugin = Plugin(request, tracer)
    files = list(dict.fromkeys(name.partition("::")[0] for name in request["tests"]))
    flags = ["-c", "/dev/null", "--rootdir", request["root"], "-p", "no:cacheprovider", "-q", "--tb=short"]
    pytest.main([*flags, "--continue-on-collection-errors", *files], plugins=[plugin])
    answer = {"status": plugin.status, "seconds": plugin.seconds, "examples": plugin.examples}
    return {**answer, **(tracer.answer() if tracer else {})}


# -- examples of wrong behaviour --------------------------------------------------------------------------------------


def explain(node, excinfo, packages):
    """Stand-alone calls out of the failed statement of a test, the outermost first, with what they give."""
    path = str(node.path)
    entries = [entry for entry in excinfo.traceback if str(entry.path) == path]
    frame = entries[-1].frame
    with open(path, encoding="utf-8") as file:
        statement = statement_at(ast.parse(file.read()), entries[-1].lineno + 1)
    found = []
    for call in (item for item in ast.walk(statement) if isinstance(item, ast.Call)):
        example = standalone(call, frame.f_globals, frame.f_locals, packages)
        if example is not None and example not in found and len(found) < 4:
            found.append(example)
    return [{**example, "got": got} for example in found if (got := evaluate(example)) is not None]


def statement_at(tree, line):
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= n.end_lineno]
    return min(inside, key=lambda n: (n.end_lineno - n.lineno, -n.col_offset))


def standalone(call, scope, local, packages):
    """{"expression", "imports"} or None when the call depends on what cannot be written down shortly."""
    inliner = Inliner(call, scope, local, packages)
    try:
        tree = ast.fix_missing_locations(inliner.visit(copy.deepcopy(call)))
        text = ast.unparse(tree)
    except (LookupError, ValueError, RecursionError):
        return None
    if not inliner.uses_package or len(text) > MAX_EXPRESSION or "\n" in text:
        return None
    return {"expression": text, "imports": sorted(set(inliner.imports))}


class Inliner(ast.NodeTransformer):
    """Replaces every free name by a literal, a lambda, or a name with an import. Raises LookupError if it cannot."""

    def __init__(self, call, scope, local, packages):
        self.scope, self.local, self.packages = scope, local, packages
        self.bound = {n.arg for n in ast.walk(call) if isinstance(n, ast.arg)}
        self.bound |= {n.id for n in ast.walk(call) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.imports, self.uses_package = [], False

    def visit_Await(self, node):
        raise LookupError

    visit_Yield = visit_YieldFrom = visit_NamedExpr = visit_Await

    def visit_Call(self, node):
        self.generic_visit(node)
        node.keywords = [k for k in node.keywords if k.arg or not (isinstance(k.value, ast.Dict) and not k.value.keys)]
        is_dict = isinstance(node.func, ast.Name) and node.func.id == "dict" and not node.keywords
        return node.args[0] if is_dict and len(node.args) == 1 and isinstance(node.args[0], ast.Dict) else node

    def visit_Name(self, node):
        name = node.id
        if name in self.bound:
            return node
        if name in self.local:
            value = self.local[name]
        elif name in self.scope:
            value = self.scope[name]
        elif hasattr(builtins, name):
            return node
        else:
            raise LookupError(name)
        return self.written(name, value)

    def written(self, name, value):
        if value is getattr(builtins, getattr(value, "__name__", "") or " ", None):
            return ast.Name(value.__name__, ast.Load())
        statement = import_of(name, value)
        if statement is not None:
            module = getattr(value, "__name__" if inspect.ismodule(value) else "__module__", None) or ""
            owner = statement.split()[1]
            self.uses_package |= any(m.partition(".")[0] in self.packages for m in (module, owner))
            self.imports.append(statement)
            return ast.Name(name, ast.Load())
        if inspect.isfunction(value):
            return self.as_lambda(value)
        return literal(value)

    def as_lambda(self, function):
        """A helper of the test with one return becomes a lambda."""
        tree = ast.parse(inspect.cleandoc(inspect.getsource(function)))
        body = getattr(tree.body[0], "body", None)
        if not isinstance(tree.body[0], ast.FunctionDef) or len(body) != 1 or not isinstance(body[0], ast.Return):
            raise LookupError(function.__name__)
        args = {a.arg for a in ast.walk(tree.body[0].args) if isinstance(a, ast.arg)}
        names = {n.id for n in ast.walk(body[0]) if isinstance(n, ast.Name)}
        if tree.body[0].decorator_list or not all(n in args or hasattr(builtins, n) for n in names):
            raise LookupError(function.__name__)
        return ast.Lambda(tree.body[0].args, body[0].value)


def literal(value):
    text = repr(value)
    if len(text) > MAX_INLINE or " at 0x" in text or type(ast.literal_eval(text)) is not type(value):
        raise LookupError(text)
    if ast.literal_eval(text) != value:
        raise LookupError(text)
    return ast.parse(text, mode="eval").body


def import_of(name, value):
    """The import that binds `name` to `value` anywhere, None if there is none."""
    if inspect.ismodule(value):
        parent, _, last = value.__name__.rpartition(".")
        if value.__name__ == name:
            return "import " + name
        return f"from {parent} import {name}" if parent and last == name else f"import {value.__name__} as {name}"
    home = getattr(value, "__module__", None)
    homes = [home, home.lstrip("_")] if isinstance(home, str) else []
    top = home.partition(".")[0] if homes else ""
    homes += sorted((m for m in sys.modules if top and m.partition(".")[0] == top), key=lambda m: (len(m), m))
    for module in homes:
        if module and not is_test_module(module) and sys.modules.get(module) is not None:
            if vars(sys.modules[module]).get(name) is value:
                return f"from {module} import {name}"
    return None


def is_test_module(name):
    parts = name.split(".")
    tests = any(part in ("tests", "test", "conftest") or part.startswith("test_") for part in parts)
    return tests or parts[0] in ("pytest", "_pytest", "__main__")


def evaluate(example):
    """["value", repr] or ["raises", "Type: message"]; None when that is long, unstable or slow."""
    first = evaluate_once(example)
    return first if first is not None and first == evaluate_once(example) else None


def evaluate_once(example):
    def expire(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, expire)
    signal.setitimer(signal.ITIMER_REAL, EVALUATE_S)
    try:
        scope = {}
        for statement in example["imports"]:
            exec(statement, scope)
        value = eval(example["expression"], scope)
        if hasattr(value, "__next__"):
            return None  # an inner or outer call, list(...) for one, says more
        text = repr(value)
        kind = "value"
    except TimeoutError:
        return None
    except Exception as error:
        kind, text = "raises", (type(error).__name__ + ": " + str(error)).rstrip(": ")
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    return None if len(text) > MAX_VALUE or " at 0x" in text or "\n" in text else [kind, text]


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
    if request["mode"] == "evaluate":
        answer = {"results": [evaluate(example) for example in request["examples"]]}
    else:
        answer = run_tests(request)
    with open(request["answer"] + ".part", "w") as file:
        json.dump(answer, file)
    os.replace(request["answer"] + ".part", request["answer"])
    os._exit(0)  # threads and exit hooks of the tested code have no say


main()
