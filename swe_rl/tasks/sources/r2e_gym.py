"""R2E-Gym V1, Subset and Lite: commits with generated tests, graded by an exact map of statuses.

Columns: repo_name, docker_image, commit_hash, parsed_commit_content, execution_result_content, modified_files,
modified_entity_summaries, relevant_files, num_non_test_files, num_non_test_func_methods, num_non_test_lines, prompt,
problem_statement, expected_output_json. There is no id, patch or test list: id and patch are derived here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from swe_rl.tasks.r2e_log import comparable
from swe_rl.tasks.sources import swebench
from swe_rl.tasks.sources.fields import Row, SkipRow
from swe_rl.tasks.sources.kept import keep_row
from swe_rl.tasks.sources.parsed_commit import commit_patch, count_entities
from swe_rl.tasks.sources.test_commands import R2E_ENV
from swe_rl.types import Task

TIMEOUT_S = 300.0
STATUSES = ("PASSED", "FAILED", "ERROR", "SKIPPED", "XFAIL", "XPASS")
# Megabytes per row that nothing reads afterwards: the patch is taken from the first.
DROPPED = ("parsed_commit_content", "parsed_commit", "execution_result_content", "prompt")
# The generated tests and their runner, wherever the image or upstream's set-up puts them.
HIDDEN = (
    "/testbed/r2e_tests", "/testbed/run_tests.sh", "/r2e_tests", "/run_tests.sh", "/root/r2e_tests",
    "/root/run_tests.sh",
)  # fmt: skip
_KEPT = (
    "execution_result_content", "modified_files", "modified_entity_summaries", "relevant_files", "num_non_test_files",
    "num_non_test_func_methods", "num_non_test_lines", "prompt", "instance_id", "language", "dataset_name",
)  # fmt: skip
_TEST_CMD = "[ -e r2e_tests ] || ln -s /r2e_tests r2e_tests\nbash run_tests.sh"
_ISSUE = re.compile(r"\[ISSUE\](.*?)\[/ISSUE\]", re.DOTALL)


def read(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One row as a task: every test of the expected map must end as the map says."""
    row.know((*_KEPT, *swebench.WRAPPING))
    repo, commit = row.name("repo_name"), row.name("commit_hash")
    image = row.text("docker_image", "") or row.text("image_name", "") or f"namanjain12/{repo}_final:{commit}"
    row.text("image_name", "")
    expected = _expected(row)
    task = Task(
        task_id=f"{repo}__{commit}",
        source=source,
        split=split,
        repo=repo,
        base_commit=_parent(row) or f"{commit}~1",
        problem_statement=_issue(swebench.issue_text(row)),
        fail_to_pass=tuple(name for name, status in expected.items() if status == "passed" and name),
        pass_to_pass=(),
        gold_patch=_gold(row),
        hidden_paths=HIDDEN,
        image=image,
        test_runner="script",
        test_cmd=_TEST_CMD,
        log_parser="r2e",
        pass_rule="exact_map",
        expected_status=expected,
        timeout_s=TIMEOUT_S,
        created_at=str(_commit(row).get("commit_date") or ""),
        meta={"entities": count_entities(_commit(row)), "env": R2E_ENV},
    )
    row.finish(keep_unknown=keep_unknown)
    return keep_row(task, row.values, dropped=DROPPED)


def _expected(row: Row) -> dict[str, str]:
    """Test name -> status as the grader compares them: names without colours and messages, statuses in lower case."""
    found = row.mapping("expected_output_json")
    if not all(status in STATUSES for status in found.values()):
        raise row.wrong("expected_output_json", f"test names with one of {', '.join(STATUSES)}")
    expected = comparable(found)
    if not expected:
        raise SkipRow("empty map of expected statuses: doing nothing would be rewarded")
    if "passed" not in expected.values():
        raise SkipRow("no test is expected to pass")
    return expected


def _gold(row: Row) -> bytes:
    if row.has("parsed_commit_content") or row.has("parsed_commit"):
        return commit_patch(_commit(row), where=row.where)
    return row.full_text("patch").encode("utf-8", "surrogatepass")


def _commit(row: Row) -> Mapping[str, Any]:
    field = "parsed_commit_content" if row.has("parsed_commit_content") else "parsed_commit"
    return row.mapping(field, required=False)


def _parent(row: Row) -> str:
    return str(_commit(row).get("old_commit_hash") or "")


def _issue(text: str) -> str:
    """What stands between the issue marks, the whole text where there are none."""
    found = _ISSUE.search(text)
    return found[1].strip() if found else text
