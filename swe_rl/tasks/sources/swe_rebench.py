"""SWE-rebench v1 (with its predecessor SWE-bench-extra) and v2 (twenty languages).

Beyond SWE-bench's columns: install_config (test_cmd, log_parser, ...), meta (llm_score 0 good to 3 bad,
failed_lite_validators), requirements, environment, FAIL_TO_FAIL, PASS_TO_FAIL, license_name, docker_image; v2 has
image_name, license, language, interface, pr_description.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from swe_rl.tasks.sources import swebench
from swe_rl.tasks.sources.fields import Row, RowError
from swe_rl.tasks.sources.kept import keep_row
from swe_rl.tasks.sources.kinds import kind_of
from swe_rl.types import Task

EXTRA = (
    "hints_text", "version", "environment_setup_commit", "requirements", "environment", "FAIL_TO_FAIL", "PASS_TO_FAIL",
    "license_name", "license", "is_extra_sync", "pr_description", "interface", "pull_number", "issue_numbers",
)  # fmt: skip
_PYTEST = "pytest --no-header -rA --tb=line --color=no -p no:cacheprovider"


def read(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One row of v1 or of SWE-bench-extra as a task."""
    row.know((*EXTRA, *swebench.WRAPPING))
    config = row.mapping("install_config", required=False)
    meta = row.sub("meta", required=False)
    image = row.text("docker_image", "") or row.text("image_name", "") or image_name(row.name("instance_id"))
    found = swebench.swebench_task(
        row,
        source=source,
        split=split,
        image=image,
        log_parser=_parser(row, config) or "parse_log_pytest",
        language="python",
        meta={"quality": _quality(meta), **_difficulty(meta)},
    )
    command = _command(row, config) or _PYTEST
    task = replace(found, test_cmd=" ".join([command, *map(shlex.quote, found.test_files)]))
    row.finish(keep_unknown=keep_unknown)
    return keep_row(task, row.values)


def read_v2(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One row of v2 as a task: the whole suite runs, and every required test must end as passed."""
    row.know((*EXTRA, *swebench.WRAPPING))
    repo = row.name("repo")
    config = row.mapping("install_config")
    parser = _parser(row, config)
    command = _command(row, config)
    if not parser:
        raise RowError(row.where, "install_config.log_parser", "is missing, expected the name of a log parser")
    if not command:
        raise RowError(row.where, "install_config.test_cmd", "is missing, expected a string or a list of strings")
    meta = row.sub("meta", required=False)
    task = swebench.swebench_task(
        row,
        source=source,
        split=split,
        image=row.name("image_name"),
        test_cmd=command,
        log_parser=f"swe_rebench_v2:{parser}",  # parsers of its own, in part under the names of SWE-bench's
        pass_rule="all_passed",
        workdir=f"/{repo.rpartition('/')[2]}",
        language=row.text("language", "python"),
        kind=kind_of(_labels(meta)),
        meta={"quality": _quality(meta), **_difficulty(meta), "env": {}},
    )
    row.finish(keep_unknown=keep_unknown)
    return keep_row(task, row.values)


def image_name(instance_id: str) -> str:
    return f"swerebench/sweb.eval.x86_64.{instance_id.replace('__', '_1776_').lower()}:latest"


def _command(row: Row, config: Mapping[str, Any]) -> str:
    """install_config.test_cmd as one text; several commands are run one after the other."""
    found = config.get("test_cmd")
    if found is None:
        return ""
    lines = [found] if isinstance(found, str) else found
    if not isinstance(lines, list) or not all(isinstance(line, str) for line in lines):
        raise RowError(row.where, "install_config.test_cmd", f"is {found!r}, expected a string or a list of strings")
    return "\n".join(line for line in lines if line.strip())


def _parser(row: Row, config: Mapping[str, Any]) -> str:
    """install_config.log_parser, "" when absent."""
    found = config.get("log_parser") or ""
    if not isinstance(found, str):
        raise RowError(row.where, "install_config.log_parser", f"is {found!r}, expected the name of a log parser")
    return found


def _quality(meta: Row) -> dict[str, Any]:
    """All that the set says about a row, with what filters read (curation/filters.py) as plain values."""
    found = dict(meta.values)
    if meta.has("failed_lite_validators"):
        found["failed_lite_validators"] = list(meta.texts("failed_lite_validators"))
    if meta.has("llm_score"):
        found["llm_score"] = dict(meta.mapping("llm_score"))
    return found


def _judged(meta: Row) -> Row:
    """What a model said about a row of v2."""
    judged = meta.objects("llm_metadata")
    return Row(judged[0] if judged else {}, where=f"{meta.where}, in llm_metadata")


def _labels(meta: Row) -> tuple[str, ...]:
    return _judged(meta).texts("pr_categories", required=False)


def _difficulty(meta: Row) -> dict[str, str]:
    """One word on how hard it is, where somebody said: v1 scores it, v2 names it."""
    scores = meta.sub("llm_score", required=False)
    if scores.has("difficulty_score"):
        return {"difficulty": f"{scores.number('difficulty_score'):g} of 3"}
    named = _judged(meta).value("difficulty")
    return {"difficulty": str(named)} if named else {}
