"""Output of a data set's test command as results by test id. Our own tasks never come here: their runner reports ids.

Task.log_parser   parse_log_* by SWE-bench's own parsers (swebench_logs.py), also "" for the parser of the repository
                  r2e         R2E-Gym
                  pytest_verbose   SWE-smith: lines "path::test STATUS" between SWE-bench's markers
"""

from __future__ import annotations

import re

from swe_rl.errors import ConfigError
from swe_rl.tasks.pass_rules import TestResults
from swe_rl.tasks.r2e_log import parse_r2e_log
from swe_rl.types import Task

PYTEST_VERBOSE = "pytest_verbose"
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
FAILURES = (">>>>> Patch Apply Failed", ">>>>> Reset Failed", ">>>>> Tests Errored", ">>>>> Tests Timed Out")
_VERBOSE = re.compile(r"(\S+)\s+(FAILED|PASSED|SKIPPED|ERROR|XFAIL)")
# Where neither the row nor SWE-bench's registry says it: repositories whose parser is not that of plain pytest.
_BY_REPO = {
    "astropy/astropy": "astropy", "django/django": "django", "matplotlib/matplotlib": "matplotlib",
    "mwaskom/seaborn": "seaborn", "pallets/flask": "flask", "psf/requests": "requests", "pydata/xarray": "xarray",
    "pylint-dev/pylint": "pylint", "scikit-learn/scikit-learn": "scikit", "sphinx-doc/sphinx": "sphinx",
    "sympy/sympy": "sympy", "sqlfluff/sqlfluff": "sqlfluff", "marshmallow-code/marshmallow": "marshmallow",
    "pvlib/pvlib-python": "pvlib", "pydicom/pydicom": "pydicom", "pylint-dev/astroid": "astroid",
    "pyvista/pyvista": "pyvista",
}  # fmt: skip


def read_log(task: Task, log: str) -> TestResults:
    """What the output of `task`'s test command says. Raises ConfigError where there is no parser for it, or the extra
    `swebench` is not installed."""
    name = task.log_parser or f"parse_log_{_BY_REPO.get(task.repo, 'pytest')}"
    if name == "r2e":
        return TestResults(parse_r2e_log(log))
    if name == PYTEST_VERBOSE:
        return _verbose(log)
    if not name.startswith("parse_log_"):
        raise ConfigError(
            f"task {task.task_id}: there is no parser for {name} here; judge it by statuses that its own harness gives"
        )
    from swe_rl.tasks.swebench_logs import read_swebench_log

    return read_swebench_log(task, log, name)


def _verbose(log: str) -> TestResults:
    """Needs both markers, as the trace of the script prints them, in their order."""
    start, end = log.find(f"+ : '{START}'"), log.find(f"+ : '{END}'")
    if any(sign in log for sign in (FAILURES[0], FAILURES[3])) or start < 0 or end < start:
        return TestResults({}, complete=False)
    matches = (_VERBOSE.match(line) for line in log[start + len(f"+ : '{START}'") : end].split("\n"))
    return TestResults({match[1]: match[2].lower() for match in matches if match is not None})
