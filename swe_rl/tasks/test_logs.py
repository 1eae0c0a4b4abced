"""Output of a data set's test command as results by test id. Our own tasks never come here: their runner reports ids.

Task.log_parser   parse_log_* by SWE-bench's own parsers (swebench_logs.py); "" for the parser of a Python repository
                  r2e         R2E-Gym
                  pytest_verbose   SWE-smith: lines "path::test STATUS" between SWE-bench's markers
Other names stand for parsers that are not here (SWE-rebench v2, SWE-bench Pro, Multi-SWE-bench): such tasks are refused
before a sandbox is opened, and judged by a given map of statuses (pass_rules.judge).
"""

from __future__ import annotations

import re

from swe_rl.errors import ConfigError
from swe_rl.tasks.pass_rules import TestResults
from swe_rl.tasks.r2e_log import parse_r2e_log
from swe_rl.types import Task

PYTEST_VERBOSE = "pytest_verbose"
START, END = ">>>>> Start Test Output", ">>>>> End Test Output"
EXIT_CODE = ">>>>> Test Exit Code"  # then ": N"
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
    if why := _why_no_parser(task):
        raise _refused(task, why)
    name = task.log_parser or f"parse_log_{_BY_REPO.get(task.repo, 'pytest')}"
    if name == "r2e":
        return TestResults(parse_r2e_log(log))
    if name == PYTEST_VERBOSE:
        return _verbose(log)
    from swe_rl.tasks.swebench_logs import read_swebench_log

    return read_swebench_log(task, log, name)


def why_ungradable(task: Task) -> str:
    """Why no run of its tests can judge `task` here; "" when one can. Knows nothing of what is installed."""
    if task.test_runner != "script":
        return ""
    if not task.test_cmd.strip():
        return "it has no test command"
    return "" if task.pass_rule == "reward_file" else _why_no_parser(task)


def _why_no_parser(task: Task) -> str:
    if not task.log_parser and task.language != "python":
        return f"it names no log parser, and its language is {task.language or 'unknown'}"
    if task.log_parser in ("", "r2e", PYTEST_VERBOSE) or task.log_parser.startswith("parse_log_"):
        return ""
    return f"there is no parser for {task.log_parser} here"


def check_gradable(task: Task) -> None:
    """Raises ConfigError for what `why_ungradable` names."""
    if why := why_ungradable(task):
        raise _refused(task, why)


def _refused(task: Task, why: str) -> ConfigError:
    return ConfigError(f"task {task.task_id}: {why}; judge it by statuses that its own harness gives")


def _verbose(log: str) -> TestResults:
    """Needs both markers, as the trace of the script prints them, in their order."""
    start, end = log.find(f"+ : '{START}'"), log.find(f"+ : '{END}'")
    if any(sign in log for sign in (FAILURES[0], FAILURES[3])) or start < 0 or end < start:
        return TestResults({}, complete=False)
    matches = (_VERBOSE.match(line) for line in log[start + len(f"+ : '{START}'") : end].split("\n"))
    return TestResults({match[1]: match[2].lower() for match in matches if match is not None})
