"""SWE-bench Pro: long tasks of many languages. Lists are text in Python's notation; names of columns are lower case.

Its evaluator runs a script per instance that lies in its repository, not in the rows, and reads the output with another
one. No such parser is here, so tasks are judged by a given map of statuses only, also where copies of the set carry
run_script and parser_script.
"""

from __future__ import annotations

import ast

from swe_rl.tasks.sources import swebench
from swe_rl.tasks.sources.fields import Row, SkipRow
from swe_rl.tasks.sources.kept import keep_row
from swe_rl.tasks.sources.kinds import kind_of
from swe_rl.tasks.sources.patch_paths import hidden_test_files
from swe_rl.types import Task

WORKDIR = "/app"
EXTRA = (
    "requirements", "interface", "issue_specificity", "issue_categories", "run_script", "parser_script",
    "base_dockerfile", "instance_dockerfile", "evaluator_commit", "dataset_revision", "image_digest",
    "language_family", "task_type", "knowledge_domain", "gold_files_changed", "gold_loc_changed", "p_hist",
    "runtime_class", "repo_directory", "install", "test_cmd",
)  # fmt: skip


def read(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One row of the official layout, or of the one with gold_patch and docker_image, as a task."""
    row.know((*EXTRA, *swebench.WRAPPING))
    fail_to_pass, pass_to_pass = row.texts("fail_to_pass"), row.texts("pass_to_pass")
    if not fail_to_pass:
        raise SkipRow("no FAIL_TO_PASS test: nothing would be rewarded")
    gold = row.full_text("gold_patch" if row.has("gold_patch") else "patch")
    test_patch = row.text("test_patch").encode("utf-8", "surrogatepass")
    files = row.texts("selected_test_files_to_run", required=False) or hidden_test_files(test_patch)
    task = Task(
        task_id=row.name("instance_id"),
        source=source,
        split=split,
        repo=row.name("repo"),
        base_commit=row.name("base_commit"),
        problem_statement=_statement(row),
        fail_to_pass=fail_to_pass,
        pass_to_pass=pass_to_pass,
        gold_patch=gold.encode("utf-8", "surrogatepass"),
        test_patch=test_patch,
        test_files=files,
        image=_image(row),
        workdir=row.text("repo_directory", "") or WORKDIR,
        kind=kind_of(row.texts("issue_specificity", required=False)),
        test_runner="script",
        test_cmd=_script(row),
        log_parser="swebench_pro",
        pass_rule="all_passed",
        timeout_s=swebench.TIMEOUT_S,
        language=row.text("repo_language", "") or row.text("language_family", "") or "python",
    )
    row.finish(keep_unknown=keep_unknown)
    return keep_row(task, row.values)


def _statement(row: Row) -> str:
    """Issue, requirements and interface: upstream shows an agent all three, since the tests demand names of them."""
    parts = [swebench.issue_text(row)]
    for field, title in (("requirements", "Requirements"), ("interface", "New interfaces introduced")):
        text = _unquoted(row.text(field, ""))
        if text.strip():
            parts.append(f"{title}:\n{text}")
    return "\n\n".join([_unquoted(parts[0]), *parts[1:]])


def _unquoted(text: str) -> str:
    """Some rows hold their texts as string literals."""
    if len(text) > 1 and text[0] == text[-1] == '"':
        try:
            return str(ast.literal_eval(text))
        except (ValueError, SyntaxError):
            return text
    return text


def _image(row: Row) -> str:
    if row.has("docker_image"):
        return row.name("docker_image")
    return f"jefzda/sweap-images:{row.name('dockerhub_tag')}"


def _script(row: Row) -> str:
    """Check-out of the hidden tests (the last line of before_repo_set_cmd; the others reset the tree), then the run."""
    last = row.text("before_repo_set_cmd", "").strip().rpartition("\n")[2]
    return "\n".join(part for part in (last, row.text("run_script", "")) if part.strip())
