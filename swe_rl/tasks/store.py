"""Task sets on disk: `tasks.jsonl` with SWE-bench field names plus extras, trees and hidden tests as tar files.

    DIR/tasks.jsonl             one JSON object per line; FAIL_TO_PASS and PASS_TO_PASS are JSON strings, as there.
                                test_patch shows the hidden files as a diff where a task has files and no patch
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
import sys
import tarfile
import zlib
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.tasks.environment import relative_mounts, resolve_mounts
from swe_rl.tasks.patches import tree_diff
from swe_rl.types import Task

VERSION = "1"
_UNKNOWN_DATE = "2000-01-01T00:00:00Z"
_TARS_KEPT = 64  # unpacked tars held while reading: neighbours share them
# Fields that a row has only where they differ from the default, under the same name.
_DEFAULTS: dict[str, Any] = {
    "test_files": (), "hidden_paths": (), "setup_cmd": "", "test_cmd": "", "log_parser": "", "pass_rule": "strict",
    "expected_status": {}, "language": "python",
}  # fmt: skip
_TUPLES = ("test_files", "hidden_paths")
# What a damaged row or tar (cut short, bits turned) is met with.
_UNREADABLE = (
    KeyError, ValueError, TypeError, AttributeError, RecursionError, OSError, EOFError, tarfile.TarError, zlib.error,
)  # fmt: skip


def write_tasks(tasks: Iterable[Task], directory: str | Path) -> Path:
    """Writes a task set, one task at a time, and returns the path of its tasks.jsonl, which appears last and at once.

    Raises ConfigError for a task with both hidden files and a test patch.
    """
    root = Path(directory)
    (root / "trees").mkdir(parents=True, exist_ok=True)
    index = root / "tasks.jsonl"
    write_rows((json.dumps(row, sort_keys=True, ensure_ascii=False) for row in iter_rows(tasks, root)), index)
    return index


def write_rows(lines: Iterable[str], path: Path) -> int:
    """Writes `path` line by line under another name first: what an interruption leaves must not look complete. Returns
    the number of lines."""
    staging = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    count = 0
    try:
        with staging.open("w", encoding="utf-8", errors="surrogatepass") as file:
            for line in lines:
                file.write(line + "\n")
                count += 1
        os.replace(staging, path)
    finally:
        staging.unlink(missing_ok=True)
    return count


def iter_rows(tasks: Iterable[Task], root: Path) -> Iterator[dict[str, Any]]:
    """The row of each task; its tree and hidden files go into tars below `root`."""
    for task in tasks:
        yield _to_row(task, root)


def read_tasks(directory: str | Path) -> list[Task]:
    """All tasks of a directory written by `write_tasks`. Raises ConfigError when it is not one."""
    return list(_iterate(directory, tars_kept=sys.maxsize))  # they are all held anyway: equal trees once


def iter_tasks(path: str | Path) -> Iterator[Task]:
    """The tasks of a set, one at a time: a directory written by `write_tasks`, or a file of such rows."""
    return _iterate(path, tars_kept=_TARS_KEPT)


def _iterate(path: str | Path, *, tars_kept: int) -> Iterator[Task]:
    given = Path(path)
    index = given if given.suffix == ".jsonl" else given / "tasks.jsonl"
    if not index.is_file():
        raise ConfigError(
            f"no task set: {index} is missing; build one with `swe-rl tasks build --out DIR`, or import one"
        )
    tars: OrderedDict[str, Mapping[str, bytes]] = OrderedDict()
    with index.open(encoding="utf-8", errors="surrogatepass", newline="\n") as file:
        for number, line in enumerate(file, start=1):
            try:
                task = _from_row(json.loads(line), index.parent, tars)
            except _UNREADABLE as error:
                raise ConfigError(
                    f"{index} line {number} is not a task ({error!r}): make the task set again"
                ) from error
            while len(tars) > tars_kept:
                tars.popitem(last=False)
            yield task


def _to_row(task: Task, root: Path) -> dict[str, Any]:
    if task.hidden_files and task.test_patch:
        raise ConfigError(f"task {task.task_id} has hidden files and a test patch: give the tests once")
    given = {name: getattr(task, name) for name in _DEFAULTS}
    return {
        "instance_id": task.task_id,
        "repo": task.repo,
        "base_commit": task.base_commit,
        **_as_text("patch", task.gold_patch),
        **_as_text("test_patch", task.test_patch or tree_diff({}, task.hidden_files), exact=not task.hidden_files),
        "problem_statement": task.problem_statement,
        "FAIL_TO_PASS": json.dumps(list(task.fail_to_pass)),
        "PASS_TO_PASS": json.dumps(list(task.pass_to_pass)),
        "version": VERSION,
        "created_at": task.created_at or _UNKNOWN_DATE,
        "source": task.source,
        "split": task.split,
        "kind": task.kind,
        "test_runner": task.test_runner,
        "timeout_s": task.timeout_s,
        "workdir": task.workdir,
        "image": task.image,
        **{name: value for name, value in given.items() if value != _DEFAULTS[name]},
        "meta": relative_mounts(task.meta, root),
        "tree": _write_tar(task.tree, root),
        "hidden": _write_tar(task.hidden_files, root),
    }


def _as_text(name: str, data: bytes, *, exact: bool = True) -> dict[str, str]:
    """A patch as a column; bytes that are no UTF-8 go into a second one. `exact` false: the column is for readers."""
    try:
        return {name: data.decode()}
    except UnicodeDecodeError:
        if not exact:
            return {name: data.decode("utf-8", "replace")}
        return {name: "", f"{name}_base64": base64.b64encode(data).decode()}


def _as_bytes(row: Mapping[str, Any], name: str) -> bytes:
    encoded = row.get(f"{name}_base64")
    return base64.b64decode(encoded) if encoded else row[name].encode()


def _from_row(row: Mapping[str, Any], root: Path, tars: OrderedDict[str, Mapping[str, bytes]]) -> Task:
    given = {name: row[name] for name in _DEFAULTS if name in row}
    given.update({name: tuple(given[name]) for name in _TUPLES if name in given})
    return Task(
        task_id=row["instance_id"],
        source=row["source"],
        split=row["split"],
        repo=row["repo"],
        base_commit=row["base_commit"],
        problem_statement=row["problem_statement"],
        fail_to_pass=tuple(json.loads(row["FAIL_TO_PASS"])),
        pass_to_pass=tuple(json.loads(row["PASS_TO_PASS"])),
        gold_patch=_as_bytes(row, "patch"),
        tree=_tar(row["tree"], root, tars),
        hidden_files=_tar(row["hidden"], root, tars),
        test_patch=b"" if row["hidden"] else _as_bytes(row, "test_patch"),
        image=row["image"],
        workdir=row["workdir"],
        kind=row["kind"],
        test_runner=row["test_runner"],
        timeout_s=float(row["timeout_s"]),
        created_at="" if row["created_at"] == _UNKNOWN_DATE else row["created_at"],
        meta=resolve_mounts(row["meta"], root),
        **given,
    )


def _tar(name: str, root: Path, tars: OrderedDict[str, Mapping[str, bytes]]) -> Mapping[str, bytes]:
    """The files of one tar; equal names give the same object as long as it is held."""
    if name not in tars:
        tars[name] = _read_tar(root, name)
    tars.move_to_end(name)
    return tars[name]


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
        target.parent.mkdir(exist_ok=True)
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
