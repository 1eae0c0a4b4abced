"""SWE-bench's logs, read by the parsers of the `swebench` package (extra `swebench`, version 5 or later).

What is around them follows the package: signs of failure, markers, the second look at the whole output, the proof that
a suite ran, the exit status. The import takes seconds, since the package imports its whole harness.
"""

from __future__ import annotations

from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.tasks.pass_rules import TestResults
from swe_rl.tasks.test_logs import END, FAILURES, START
from swe_rl.types import Task


def read_swebench_log(task: Task, log: str, parser: str) -> TestResults:
    """The results in `log` by the parser of that name. Raises ConfigError without the package or such a parser."""
    grading, registry, spec_type = _package()
    if parser not in registry:
        raise ConfigError(f"task {task.task_id}: swebench has no log parser {parser}")
    if any(sign in log for sign in FAILURES) or START not in log or END not in log:
        return TestResults({}, complete=False)
    spec = spec_type(
        instance_id=task.task_id,
        image=task.image,
        eval_script_list=[],
        repo=task.repo,
        version=str((task.meta.get("row") or {}).get("version") or ""),
        FAIL_TO_PASS=list(task.fail_to_pass),
        PASS_TO_PASS=list(task.pass_to_pass),
        log_parser=parser,
    )
    found = registry[parser](log.split(START)[1].split(END)[0], spec) or registry[parser](log, spec)
    ran = grading.SUITE_RAN.search(log) is not None
    return TestResults(
        {name: status.lower() for name, status in found.items()},
        complete=bool(found) or ran,
        exit_code=_exit_code(grading, log),
        suite_ran=ran,
    )


def _exit_code(grading: Any, log: str) -> int | None:
    """What follows the last end marker is the script's own: tests may print lines like it before."""
    own: int | None = grading.parse_test_exit_code(log.rpartition(END)[2])
    return grading.parse_test_exit_code(log) if own is None else own


def _package() -> tuple[Any, Any, Any]:
    """(module of grading, parsers by name, class of a test specification)."""
    try:
        from swebench.harness import grading
        from swebench.harness.log_parsers import PARSER_REGISTRY
        from swebench.types import TestSpec
    except ImportError as error:
        raise ConfigError(f"SWE-bench's logs need its package: pip install 'swe-rl[swebench]' ({error})") from error
    return grading, PARSER_REGISTRY, TestSpec
