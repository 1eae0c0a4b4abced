"""Task sets on disk: `tasks.jsonl` with SWE-bench field names plus extras, trees and hidden tests as tar files.

    DIR/tasks.jsonl             one JSON object per line; FAIL_TO_PASS and PASS_TO_PASS are JSON strings, as there
    DIR/trees/<name>.tar.gz     `tree`: base (buggy) tree with the visible tests; equal trees share one tar
                                `hidden`: hidden test files, written only when grading

The bytes are a function of the tasks alone: tars carry no dates, owners or compression times.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import io
import json
import os
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.tasks.environment import resolve_mounts
from swe_rl.tasks.patches import tree_diff
from swe_rl.types import Task

VERSION = "1"


def write_tasks(tasks: Iterable[Task], directory: str | Path) -> Path:
    """Writes a task set and returns the path of its tasks.jsonl, which appears last and at once."""
    root = Path(directory)
    (root / "trees").mkdir(parents=True, exist_ok=True)
    lines = [json.dumps(_to_row(task, root), sort_keys=True, ensure_ascii=False) + "\n" for task in tasks]
    index = root / "tasks.jsonl"
    staging = root / ".tasks.jsonl.tmp"
    staging.write_text("".join(lines), encoding="utf-8")
    os.replace(staging, index)
    return index


def read_tasks(directory: str | Path) -> list[Task]:
    """All tasks of a directory written by `write_tasks`. Raises ConfigError when it is not one."""
    index = Path(directory) / "tasks.jsonl"
    if not index.is_file():
        raise ConfigError(f"no task set: {index} is missing; build one with `swe-rl tasks build --out DIR`")
    tars: dict[str, Mapping[str, bytes]] = {}
    tasks = []
    for number, line in enumerate(index.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            tasks.append(_from_row(json.loads(line), index.parent, tars))
        except (KeyError, ValueError, TypeError, OSError, tarfile.TarError) as error:
            raise ConfigError(f"{index} line {number} is not a task ({error!r}): build the task set again") from error
    return tasks


def _to_row(task: Task, root: Path) -> dict[str, Any]:
    try:
        patch = {"patch": task.gold_patch.decode()}
    except UnicodeDecodeError:
        patch = {"patch": "", "patch_base64": base64.b64encode(task.gold_patch).decode()}
    return {
        "instance_id": task.task_id,
        "repo": task.repo,
        "base_commit": task.base_commit,
        **patch,
        "test_patch": tree_diff({}, task.hidden_files).decode("utf-8", "replace"),
        "problem_statement": task.problem_statement,
        "FAIL_TO_PASS": json.dumps(list(task.fail_to_pass)),
        "PASS_TO_PASS": json.dumps(list(task.pass_to_pass)),
        "version": VERSION,
        "created_at": "2000-01-01T00:00:00Z",
        "source": task.source,
        "split": task.split,
        "kind": task.kind,
        "test_runner": task.test_runner,
        "timeout_s": task.timeout_s,
        "workdir": task.workdir,
        "image": task.image,
        "meta": dict(task.meta),
        "tree": _write_tar(task.tree, root),
        "hidden": _write_tar(task.hidden_files, root),
    }


def _from_row(row: Mapping[str, Any], root: Path, tars: dict[str, Mapping[str, bytes]]) -> Task:
    for name in (row["tree"], row["hidden"]):
        if name not in tars:
            tars[name] = _read_tar(root, name)
    encoded = row.get("patch_base64")
    return Task(
        task_id=row["instance_id"],
        source=row["source"],
        split=row["split"],
        repo=row["repo"],
        base_commit=row["base_commit"],
        problem_statement=row["problem_statement"],
        fail_to_pass=tuple(json.loads(row["FAIL_TO_PASS"])),
        pass_to_pass=tuple(json.loads(row["PASS_TO_PASS"])),
        gold_patch=base64.b64decode(encoded) if encoded else row["patch"].encode(),
        tree=tars[row["tree"]],
        hidden_files=tars[row["hidden"]],
        image=row["image"],
        workdir=row["workdir"],
        kind=row["kind"],
        test_runner=row["test_runner"],
        timeout_s=float(row["timeout_s"]),
        meta=resolve_mounts(row["meta"], root),
    )


def _write_tar(files: Mapping[str, bytes], root: Path) -> str:
    """Name of a tar of `files`, "" for none. The name is a digest of the content, so equal trees share one tar."""
    if not files:
        return ""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as tar:
        for path in sorted(files):
            info = tarfile.TarInfo(path)
            info.size, info.mode = len(files[path]), 0o644
            tar.addfile(info, io.BytesIO(files[path]))
    name = hashlib.sha256(buffer.getvalue()).hexdigest()[:24]
    target = root / "trees" / f"{name}.tar.gz"
    if not target.exists():
        staging = target.with_suffix(f".{os.getpid()}.tmp")
        staging.write_bytes(gzip.compress(buffer.getvalue(), mtime=0))
        os.replace(staging, target)
    return name


def _read_tar(root: Path, name: str) -> dict[str, bytes]:
    if not name:
        return {}
    files = {}
    with tarfile.open(root / "trees" / f"{name}.tar.gz", mode="r:gz") as tar:
        for member in tar:
            content = tar.extractfile(member)
            if content is None:
                raise ValueError(f"{member.name} in {name}.tar.gz is not a regular file")
            files[member.name] = content.read()
    return files
