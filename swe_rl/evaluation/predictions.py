"""Predictions in the form of SWE-bench: one JSON object per task with instance_id, model_name_or_path, model_patch.

`python -m swebench.harness.run_evaluation --predictions_path FILE` takes such a file; it has one prediction per task,
so that n samples per task make n files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from swe_rl.errors import ConfigError
from swe_rl.evaluation.candidates import Candidate, by_task
from swe_rl.training.run_dir import write_atomic

KEYS = ("instance_id", "model_name_or_path", "model_patch")


def prediction(candidate: Candidate, *, model: str) -> dict[str, str]:
    """One object. A patch that is no UTF-8 keeps its bytes as `\\udcXX` escapes of JSON."""
    return dict(zip(KEYS, (candidate.task_id, model, candidate.patch), strict=True))


def write_predictions(folder: Path, candidates: Sequence[Candidate], *, model: str) -> list[Path]:
    """run00.jsonl, run01.jsonl, ...: the first candidate of every task, the second, and so on. Returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    grouped = by_task(candidates)
    most = max((len(items) for items in grouped.values()), default=0)
    written = []
    for run in range(most):
        chosen = [items[run] for items in grouped.values() if run < len(items)]
        written.append(folder / f"run{run:02d}.jsonl")
        write_one(written[-1], chosen, model=model)
    return written


def write_one(path: Path, chosen: Sequence[Candidate], *, model: str) -> None:
    """A file with one candidate per task. Raises ValueError when a task is there twice."""
    if len({item.task_id for item in chosen}) != len(chosen):
        raise ValueError("SWE-bench takes one prediction per task")
    lines = [json.dumps(prediction(item, model=model)) for item in chosen]
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())


def read_predictions(path: Path) -> dict[str, bytes]:
    """Patch by task of a .jsonl or .json file of SWE-bench's form (also a mapping, as SWE-agent writes it).

    ConfigError for a line that is no prediction or a task that is there twice.
    """
    try:
        text = path.read_text(encoding="utf-8")
        found = json.loads(text) if path.suffix == ".json" else [json.loads(line) for line in text.splitlines() if line]
    except (OSError, ValueError) as err:
        raise ConfigError(f"{path} holds no predictions: {err}") from err
    patches: dict[str, bytes] = {}
    for item in found.values() if isinstance(found, dict) else found:
        if not isinstance(item, dict) or not isinstance(item.get("instance_id"), str):
            raise ConfigError(f"{path}: a prediction needs instance_id and model_patch, got {str(item)[:80]}")
        if item["instance_id"] in patches:
            raise ConfigError(f"{path} has two predictions for {item['instance_id']}: one file holds one run")
        patches[item["instance_id"]] = str(item.get("model_patch") or "").encode("utf-8", "surrogateescape")
    return patches
