"""Examples of wrong behaviour from failed tests. Runs inside the sandbox, imported by probe.py; standard library only.

A call of the package is rewritten so that it stands alone (local names become literals or what they were assigned,
other names become imports) and evaluated. The same text, evaluated in the correct package, says what is expected.
"""
# mypy: ignore-errors

import ast
import builtins
import copy
import inspect
import signal
import sys
import textwrap

MAX_EXPRESSION, MAX_VALUE, MAX_INLINE = 160, 200, 120
EVALUATE_S = 1.0
MAX_DEPTH = 4  # local names replaced by what they were assigned, one inside the other
TEST_HELPERS = ("raises", "warns", "deprecated_call", "assert_raises")
UNREPEATABLE = {"today", "now", "utcnow", "time", "random", "urandom", "uuid4", "getpid", "open", "input", "id", "hash"}


def explain(node, excinfo, packages):
    """Stand-alone calls, then other expressions, around the failed statement of a test, with what they give."""
    path = str(node.path)
    entries = [entry for entry in excinfo.traceback if str(entry.path) == path]
    frame = entries[-1].frame
    with open(path, encoding="utf-8") as file:
        statements, made_by = involved(ast.parse(file.read()), entries[-1].lineno + 1)
    found = []
    for kinds, most in ((ast.Call, 4), ((ast.Compare, ast.BinOp, ast.Subscript, ast.Attribute), 8)):
        for node in (node for statement in statements for node in ast.walk(statement) if isinstance(node, kinds)):
            if not any(isinstance(inner, (ast.Call, ast.Compare)) for inner in ast.walk(node)):
                continue  # a bare name or constant shows no behaviour
            example = standalone(node, frame.f_globals, frame.f_locals, made_by, packages)
            if example is not None and example not in found and len(found) < most:
                found.append(example)
    return [{**example, "got": got} for example in found if (got := evaluate(example)) is not None]


def involved(tree, line):
    """The innermost statement at `line` and the assignments before it that made what it looks at; and, by local name,
    the expression it was last assigned."""
    inside = [n for n in ast.walk(tree) if isinstance(n, ast.stmt) and n.lineno <= line <= n.end_lineno]
    statement = min(inside, key=lambda n: (n.end_lineno - n.lineno, -n.col_offset))
    functions = [n for n in inside if isinstance(n, ast.FunctionDef)]
    names = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    scope = max(functions, key=lambda n: n.lineno) if functions else tree
    before = [n for n in ast.walk(scope) if isinstance(n, ast.Assign) and n.lineno < line and len(n.targets) == 1]
    before = sorted((n for n in before if isinstance(n.targets[0], ast.Name)), key=lambda n: n.lineno)
    made_by = {n.targets[0].id: n.value for n in before} if functions else {}
    return [statement, *(n for n in reversed(before) if n.targets[0].id in names)], made_by


def standalone(node, scope, local, made_by, packages):
    """{"expression", "imports"} or None when the node depends on what cannot be written down shortly."""
    inliner = Inliner(node, scope, local, made_by, packages)
    try:
        tree = ast.fix_missing_locations(inliner.visit(copy.deepcopy(node)))
        text = ast.unparse(tree)
    except (LookupError, ValueError, TypeError, SyntaxError, OSError, RecursionError):
        return None
    if not inliner.uses_package or len(text) > MAX_EXPRESSION or "\n" in text:
        return None
    return {"expression": text, "imports": sorted(set(inliner.imports))}


class Inliner(ast.NodeTransformer):
    """Replaces every free name by a literal, a lambda, or a name with an import. Raises LookupError if it cannot."""

    def __init__(self, node, scope, local, made_by, packages):
        self.scope, self.local, self.made_by, self.packages = scope, local, made_by, packages
        self.bound = {n.arg for n in ast.walk(node) if isinstance(n, ast.arg)}
        self.bound |= {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        self.imports, self.uses_package, self.depth = [], False, 0

    def visit_Await(self, node):
        raise LookupError

    visit_Yield = visit_YieldFrom = visit_NamedExpr = visit_Await

    def visit_Call(self, node):
        name = getattr(node.func, "id", getattr(node.func, "attr", ""))
        if name in TEST_HELPERS or name in UNREPEATABLE:
            raise LookupError("a check of a test, or different elsewhere and at another time")
        self.generic_visit(node)
        spread = [(a.value.elts if isinstance(a, ast.Starred) and is_sequence(a.value) else [a]) for a in node.args]
        node.args = [argument for part in spread for argument in part]
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
        try:
            return self.written(name, value)
        except (LookupError, ValueError, TypeError, SyntaxError, OSError):
            if name not in self.local or name not in self.made_by or self.depth >= MAX_DEPTH:
                raise
        self.depth += 1
        node = self.visit(copy.deepcopy(self.made_by[name]))
        self.depth -= 1
        return node

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
        """A helper of the test that is one expression becomes a lambda."""
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        found = [n for n in ast.walk(tree) if isinstance(n, ast.Lambda)]
        first = tree.body[0]
        if isinstance(first, ast.FunctionDef) and not first.decorator_list and isinstance(first.body[-1], ast.Return):
            body = [n for n in first.body if not isinstance(n, ast.Expr)]  # but a docstring
            found = [ast.Lambda(first.args, body[0].value)] if len(body) == 1 else []
        if len(found) != 1 or function.__closure__:
            raise LookupError(function.__name__)
        args = {a.arg for a in ast.walk(found[0].args) if isinstance(a, ast.arg)}
        for argument in (a for a in ast.walk(found[0].args) if isinstance(a, ast.arg)):
            argument.annotation = None
        names = {n.id for n in ast.walk(found[0]) if isinstance(n, ast.Name)}
        if not all(n in args or hasattr(builtins, n) for n in names):
            raise LookupError(function.__name__)
        return found[0]


def is_sequence(node):
    return isinstance(node, (ast.Tuple, ast.List))


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
    homes = [home.lstrip("_"), home] if isinstance(home, str) else []
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
