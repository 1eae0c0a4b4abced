"""How a repository runs its tests where the row does not say: the few of SWE-bench 4.x that are not plain pytest.

Rows of 5.x, SWE-rebench and others carry their own command; these serve SWE-bench 4.x and SWE-Gym.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from swe_rl.tasks.sources.languages import language_of

_PYTEST = "pytest -rA"
_COMMANDS = {
    "django/django": "./tests/runtests.py --verbosity 2 --settings=test_sqlite --parallel 1",
    "sympy/sympy": "PYTHONWARNINGS='ignore::UserWarning,ignore::SyntaxWarning' bin/test -C --verbose",
    "sphinx-doc/sphinx": "tox --current-env -epy39 -v --",
}


# Where an image keeps the environment that the tests need: its programs come first for agent and tests alike.
_SYSTEM = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
CONDA_ENV = {"PATH": f"/opt/miniconda3/envs/testbed/bin:/opt/miniconda3/bin:{_SYSTEM}"}
R2E_ENV = {"PATH": f"/testbed/.venv/bin:/root/.venv/bin:/root/.local/bin:/root/.cargo/bin:{_SYSTEM}"}


def test_command(repo: str, files: Sequence[str]) -> str:
    """The command line that runs these test files and lists every result, "" where they are not Python's."""
    if language_of(files, "python") != "python":
        return ""
    command = _COMMANDS.get(repo, _PYTEST)
    names = [_module(path) for path in files] if repo == "django/django" else list(files)
    return " ".join([command, *map(shlex.quote, names)])


def _module(path: str) -> str:
    """Django's runner takes modules below tests/: tests/ordering/tests.py is ordering.tests."""
    return path.removeprefix("tests/").removesuffix(".py").replace("/", ".")
