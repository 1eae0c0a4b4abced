"""The scripts that run tests inside a sandbox. Standard library only (and pytest, for its tests), Python >= 3.8.

    python3 -I -S SCRIPT --root DIR [--test-s S] [--shuffle SEED] [--remove-tests] [--per-file] [--report-fd N]
                         ID|FILE|- ...

"-" reads more ids from standard input, one per line after the first; the first line is the nonce (else the environment
variable SWE_RL_NONCE, which is fit for framing only: code under test can read it). The report, when all is done, on
standard output or descriptor N: `NONCE begin COUNT`, a line `NONCE {"id", "status", "message"}` per test, `NONCE end
COUNT`. A status is passed, failed, error (the file does not load, a process ended) or missing (also skipped).

"functions": plain `def test_*()` functions. Four kinds of process, so that code under test can make a test fail but
never pass:
    reporter   (reporter.py)  holds the nonce; runs nobody's code
    keeper     (keeper.py)    forked before the nonce was read; reads test files and forks a tester per file (a new one
               after a test that hung or died)
    tester     (tester.py)    runs test functions. The modules of the repository are not loaded here: what a test
               imports from them is a remote object, and a call is sent to a worker, which answers with plain data or
               with an exception's name
    worker     (worker.py)    forked per test from a process that never saw a test file or the nonce; it alone runs the
               repository's code
Data are sent by marshal and checked to be plain on arrival, so that an object with a false `__eq__` stays behind.
The test files can be removed before the first worker starts (--remove-tests): expected values are then nowhere to read.

"pytest" (pytest_tests.py, pytest_keeper.py): the reporter, a parent that has imported pytest and runs nobody's code,
and children with pytest and the code under test together: one for all files or, with --per-file, one for each. That
code can end its child, print or patch what it likes: what does not arrive is missing, what arrives twice is forged.
With --per-file the parent also compares exit code, counts and times with the rows. The grader adds a test that must
fail (rewards/grading.py), which runs at the end of every child. What this cannot exclude, since both share an
interpreter: code that patches pytest, or finds the pipe and imitates the recorder, for chosen tests only, leaves the
one that must fail alone, sends as many rows as there are tests, claims little time and exits with the right code; and
objects that claim to equal whatever a test compares them with. Whoever must exclude that uses "functions".

The modules here are ordinary ones; `bundle` joins them into the one file that a sandbox needs.
"""

from __future__ import annotations

import ast
import functools
import importlib.resources

from swe_rl.errors import ConfigError

_MODULES = {  # each uses the ones before it
    "functions": ("wire.py", "reporter.py", "worker.py", "tester.py", "keeper.py"),
    "pytest": ("wire.py", "reporter.py", "pytest_tests.py", "pytest_keeper.py"),
}
_LEFT_OUT = ("__future__", "swe_rl", "typing", "collections")


@functools.cache
def bundle(test_runner: str) -> str:
    """A script's text, without docstrings, comments and annotations: it is compiled anew at each start.

    Raises ConfigError for an unknown runner.
    """
    if test_runner not in _MODULES:
        raise ConfigError(f"test_runner={test_runner!r} is unknown: use one of {', '.join(_MODULES)}")
    folder = importlib.resources.files(__name__)
    body: list[ast.stmt] = []
    for name in _MODULES[test_runner]:
        module = _Slim().visit(ast.parse(folder.joinpath(name).read_text(encoding="utf-8")))
        body += [node for node in module.body if not _is_left_out(node)]
    body.append(ast.Expr(ast.Call(func=ast.Name("main", ast.Load()), args=[], keywords=[])))
    return ast.unparse(ast.fix_missing_locations(ast.Module(body=body, type_ignores=[]))) + "\n"


def _is_left_out(node: ast.stmt) -> bool:
    """Imports of each other, and of what only annotations use: typing alone costs as much as a test."""
    return isinstance(node, ast.ImportFrom) and node.module is not None and node.module.split(".")[0] in _LEFT_OUT


class _Slim(ast.NodeTransformer):
    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        is_text = isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        return None if is_text else node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        self.generic_visit(node)
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        assert node.value is not None, "the runner's modules annotate assignments only"
        return ast.Assign(targets=[node.target], value=node.value)
