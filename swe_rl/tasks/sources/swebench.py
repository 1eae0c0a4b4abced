"""SWE-bench and its kin: the full set, Lite, Verified, Multilingual, Multimodal; rows of 4.x and 5.x, task folders.

Columns as recipes of the field know them: repo, instance_id, base_commit, patch, test_patch, problem_statement,
hints_text, created_at, version, FAIL_TO_PASS, PASS_TO_PASS, environment_setup_commit; Verified adds difficulty, 5.x
adds image, eval_script, log_parser, eval_type, image_assets.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.tasks.sources.fields import Row, SkipRow
from swe_rl.tasks.sources.kept import keep_row
from swe_rl.tasks.sources.languages import language_of
from swe_rl.tasks.sources.patch_paths import file_changes, hidden_test_files
from swe_rl.tasks.sources.reading import Located
from swe_rl.tasks.sources.test_commands import CONDA_ENV, test_command
from swe_rl.types import PassRule, Task

TIMEOUT_S = 1800.0
EXTRA = ("hints_text", "version", "environment_setup_commit", "difficulty", "eval_type", "image_assets")
# Columns that copies of the sets add: an index of pandas, SWE-agent's, NeMo Gym's.
WRAPPING = (
    "__index_level_0__", "query", "task_id", "responses_create_params", "subset", "split", "agent_ref", "dataset_name",
    "task_source",
)  # fmt: skip
_RULES: dict[str, PassRule] = {"pass_and_fail": "f2p_p2p", "fail_only": "f2p_p2p_fail_only"}


def read(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One row of any of these sets as a task."""
    row.know((*EXTRA, *WRAPPING))
    for field in ("hints_text", "version", "environment_setup_commit", "difficulty"):
        row.text(field, "")
    task = swebench_task(row, source=source, split=split)
    row.finish(keep_unknown=keep_unknown)
    return keep_row(task, row.values)


def swebench_task(
    row: Row, *, source: str, split: str, image: str = "", test_cmd: str = "", log_parser: str = "", **changes: Any
) -> Task:
    """The part that all sets of this shape have in common; `changes` are further fields of Task.

    image, test_cmd, log_parser: where the row itself has no column for them.
    """
    instance_id = row.name("instance_id")
    fail_to_pass = row.texts("FAIL_TO_PASS")
    pass_to_pass = row.texts("PASS_TO_PASS")
    test_patch = row.text("test_patch").encode("utf-8", "surrogatepass")
    repo = row.name("repo")
    files = hidden_test_files(test_patch)
    language = str(changes.get("language") or language_of(files or _changed(row), "python"))
    if not fail_to_pass:
        raise SkipRow("no FAIL_TO_PASS test: nothing would be rewarded")
    fields: dict[str, Any] = {
        "task_id": instance_id,
        "source": source,
        "split": split,
        "repo": repo,
        "base_commit": row.name("base_commit"),
        "problem_statement": issue_text(row),
        "fail_to_pass": fail_to_pass,
        "pass_to_pass": pass_to_pass,
        "gold_patch": row.full_text("patch").encode("utf-8", "surrogatepass"),
        "test_patch": test_patch,
        "test_files": files,
        "image": row.text("image", "") or image or image_name(instance_id),
        "test_runner": "script",
        "test_cmd": row.text("eval_script", "") or test_cmd or test_command(repo, files),
        "log_parser": row.text("log_parser", "") or log_parser,
        "pass_rule": pass_rule(row),
        "timeout_s": TIMEOUT_S,
        "language": language,
        "created_at": row.time("created_at"),
    }
    meta: dict[str, Any] = {"difficulty": row.text("difficulty")} if row.has("difficulty") else {}
    if language == "python":
        meta["env"] = CONDA_ENV
    return Task(**{**fields, **changes, "meta": {**meta, **changes.get("meta", {})}})


def _changed(row: Row) -> list[str]:
    return [change.path for change in file_changes(row.text("patch").encode("utf-8", "surrogatepass"))]


def issue_text(row: Row) -> str:
    """The problem statement. Raises SkipRow when it is blank."""
    text = row.text("problem_statement")
    if not text.strip():
        raise SkipRow("no issue text")
    return text


def pass_rule(row: Row) -> PassRule:
    """By the column eval_type of 5.x; rows without one count passes and failures."""
    name = row.text("eval_type", "pass_and_fail")
    if name not in _RULES:
        raise row.wrong("eval_type", " or ".join(_RULES))
    return _RULES[name]


def image_name(instance_id: str) -> str:
    """The published image of an instance."""
    return f"swebench/sweb.eval.x86_64.{instance_id.replace('__', '_1776_').lower()}:latest"


def has_task_folders(path: Path) -> bool:
    """Whether `path` is a task repository of 5.x: tasks/<id>/task.yaml, or one such folder."""
    return (path / "task.yaml").is_file() or any((path / "tasks").glob("*/task.yaml"))


def folder_rows(path: Path) -> Iterator[Located]:
    """(place, row) of each task folder of 5.x: task.yaml, tests.json, problem_statement.md, gold.patch, test.patch."""
    folders = [path] if (path / "task.yaml").is_file() else sorted(p.parent for p in path.glob("tasks/*/task.yaml"))
    for folder in folders:
        yield folder.name, _folder_row(folder)


def _folder_row(folder: Path) -> dict[str, Any]:
    import yaml

    try:
        row = dict(yaml.safe_load((folder / "task.yaml").read_text(encoding="utf-8")))
        row.update(json.loads((folder / "tests.json").read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError, yaml.YAMLError) as error:
        raise ConfigError(f"{folder} is no task folder: {str(error).splitlines()[0]}") from error
    texts = {"problem_statement.md": "problem_statement", "hints.md": "hints_text", "gold.patch": "patch",
             "test.patch": "test_patch", "eval.sh": "eval_script"}  # fmt: skip
    for name, column in texts.items():
        if (folder / name).is_file():
            row[column] = _text(folder / name)
    row.pop("datasets", None)  # where the folder is published, not what it says
    return row


def _text(file: Path) -> str:
    """Read as bytes: patches keep their CRLF."""
    try:
        return file.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"{file} is not UTF-8: {error}") from error
