"""Rows of NeMo Gym: other sets' rows in a wrapping of their own. What is inside decides how a row is read.

responses_create_params.metadata.instance_dict  agents' rows: the source row as JSON text, its set in dataset_name
instance                                        single-turn rows (swerl_gen): a SWE-Gym row with its test scripts
top level                                       the source row's columns beside responses_create_params
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from swe_rl.tasks.sources import r2e_gym, swe_gym, swe_rebench, swebench, swebench_pro
from swe_rl.tasks.sources.fields import Row, SkipRow
from swe_rl.tasks.sources.kept import keep_row
from swe_rl.types import Task

_Reader = Callable[..., Task]
_BY_DATASET: tuple[tuple[str, str, _Reader], ...] = (  # part of the set's name -> source, reader; the first one counts
    ("R2E-Gym", "r2e_gym", r2e_gym.read),
    ("SWE-rebench-V2", "swe_rebench_v2", swe_rebench.read_v2),
    ("SWE-rebench", "swe_rebench", swe_rebench.read),
    ("SWE-Gym", "swe_gym", swe_gym.read),
    ("SWE-bench_Multilingual", "swebench_multilingual", swebench.read),
    ("SWE-bench_Pro", "swebench_pro", swebench_pro.read),
    ("SWE-bench", "swebench", swebench.read),
)
_BY_SUBSET = {"gym": "SWE-Gym", "verified": "SWE-bench", "lite": "SWE-bench", "pro": "SWE-bench_Pro",
              "multilingual": "SWE-bench_Multilingual"}  # fmt: skip
_SCRIPTS = ("regression_script", "setup_script", "test_script")
_GOLD, _ISSUE = "golden_patch", "problem_statement"


def read(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One row as a task. Raises SkipRow for rows that hold no repository task."""
    inner, dataset = _inner(row)
    name, reader = _reader(dataset)
    task = reader(inner, source=source, split=split, keep_unknown=keep_unknown)
    meta = {key: value for key, value in task.meta.items() if key not in ("row", "row_lacks")}
    dropped = r2e_gym.DROPPED if name == "r2e_gym" else ()
    return keep_row(replace(task, meta={**meta, "dataset": dataset, "family": name}), row.values, dropped=dropped)


def _reader(dataset: str) -> tuple[str, _Reader]:
    for part, name, reader in _BY_DATASET:
        if part.lower() in dataset.lower():
            return name, reader
    raise SkipRow(f"data set {dataset!r} holds no task of a family known here")


def _inner(row: Row) -> tuple[Row, str]:
    """(the source row in the wrapping, the name of its data set)."""
    params = row.sub("responses_create_params", required=False)
    metadata = params.sub("metadata", required=False)
    if metadata.has("instance_dict"):
        values = dict(metadata.mapping("instance_dict"))
        for field, name in ((_ISSUE, _ISSUE), (_GOLD, "patch")):
            if not values.get(name) and metadata.has(field):
                values[name] = metadata.text(field)
        inner = Row(values, where=f"{row.where}, in instance_dict")
        inner.know([_GOLD])
        return inner, metadata.text("dataset_name", "SWE-bench")
    if row.has("instance"):
        inner = row.sub("instance")
        inner.know(_SCRIPTS)
        return inner, row.text("dataset_name", "SWE-Gym")
    if any(row.has(field) for field in ("patch", "expected_output_json")):
        return row, row.text("dataset_name", "") or _BY_SUBSET.get(row.text("subset", ""), "SWE-bench")
    raise SkipRow(_what(row.values))


def _what(values: Mapping[str, object]) -> str:
    for field, what in (
        ("expected_action", "one tool call of a conversation, not a repository task"),
        ("expected_answer", "a question with an answer, not a repository task"),
        ("verifier_metadata", "names a task of another benchmark, without its content"),
        ("instance_id", "names a task, without its content"),
    ):
        if field in values:
            return what
    return "names a task of another benchmark, without its content"
