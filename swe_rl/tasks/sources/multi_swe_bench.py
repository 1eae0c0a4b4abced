"""Multi-SWE-bench and Multi-SWE-RL: org, repo, number, base, resolved_issues, fix_patch, test_patch, and the tests that
pass before and after by name (p2p, and fixed_tests = f2p, s2p and n2p together).

In the images, the folder above the repository holds the script that runs the suite.
"""

from __future__ import annotations

from collections.abc import Mapping

from swe_rl.tasks.sources import swebench
from swe_rl.tasks.sources.fields import Row, RowError, SkipRow
from swe_rl.tasks.sources.kept import keep_row
from swe_rl.tasks.sources.languages import language_of
from swe_rl.tasks.sources.patch_paths import file_changes, hidden_test_files
from swe_rl.types import Task

EXTRA = (
    "state", "title", "body", "f2p_tests", "s2p_tests", "n2p_tests", "run_result", "test_patch_result",
    "fix_patch_result", "lang", "hints", "commits", "fixed_tests",
)  # fmt: skip
_LANGUAGES = {"c": "c", "cpp": "cpp", "c++": "cpp", "go": "go", "java": "java", "js": "javascript", "ts": "typescript",
              "rust": "rust", "python": "python"}  # fmt: skip


def read(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One row as a task: all fixed tests and all that passed before must pass."""
    row.know((*EXTRA, *swebench.WRAPPING))
    org, repo, number = row.name("org"), row.name("repo"), int(row.number("number"))
    fixed = _names(row, "fixed_tests")
    if not fixed:
        raise SkipRow("no fixed test: nothing would be rewarded")
    test_patch = row.text("test_patch").encode("utf-8", "surrogatepass")
    base = row.sub("base")
    task = Task(
        task_id=row.text("instance_id", "") or f"{org}__{repo}-{number}",
        source=source,
        split=split,
        repo=f"{org}/{repo}",
        base_commit=base.name("sha"),
        problem_statement=_issues(row),
        fail_to_pass=fixed,
        pass_to_pass=_names(row, "p2p_tests"),
        gold_patch=row.full_text("fix_patch").encode("utf-8", "surrogatepass"),
        test_patch=test_patch,
        test_files=hidden_test_files(test_patch),
        image=f"mswebench/{org}_m_{repo}:pr-{number}".lower(),
        workdir=f"/home/{repo}",
        test_runner="script",
        test_cmd="bash ../run.sh",
        log_parser="multi_swe_bench",  # upstream has one per repository and language: none of them is here
        pass_rule="all_passed",
        timeout_s=swebench.TIMEOUT_S,
        language=_language(row),
    )
    row.finish(keep_unknown=keep_unknown)
    return keep_row(task, row.values)


def _language(row: Row) -> str:
    named = row.text("lang", "").lower()
    fixed = (change.path for change in file_changes(row.text("fix_patch").encode("utf-8", "surrogatepass")))
    return _LANGUAGES.get(named, named) or language_of(fixed)


def _names(row: Row, field: str) -> tuple[str, ...]:
    """Tests of an object {name: {run, test, fix}}; Parquet gives absent names as null."""
    found = row.mapping(field)
    if not all(value is None or isinstance(value, Mapping) for value in found.values()):
        raise row.wrong(field, "an object of test name to its statuses {run, test, fix}")
    return tuple(name for name, value in found.items() if value is not None)


def _issues(row: Row) -> str:
    """Title and body of every resolved issue, or of the pull request where none is linked."""
    issues = row.value("resolved_issues") or []
    if not isinstance(issues, list) or not all(isinstance(issue, Mapping) for issue in issues):
        raise RowError(row.where, "resolved_issues", "is malformed, expected a list of {number, title, body}")
    texts = [f"{issue.get('title') or ''}\n\n{issue.get('body') or ''}".strip() for issue in issues]
    texts = texts or [f"{row.text('title', '')}\n\n{row.text('body', '')}".strip()]
    found = "\n\n".join(text for text in texts if text)
    if not found:
        raise SkipRow("no issue text")
    return found
