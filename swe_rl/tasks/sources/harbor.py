"""Harbor and terminal-bench task folders: task.toml, instruction.md, environment/Dockerfile, tests/, solution/.

The verifier (tests/test.sh) writes 1 or 0, or a fraction, to /logs/verifier/reward.txt.
"""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.tasks.sources.fields import Row, RowError, SkipRow
from swe_rl.types import Task

REWARD_PATH = "/logs/verifier/reward.txt"
_MAX_FILE_BYTES = 4 << 20
Located = tuple[str, Mapping[str, Any]]


def folder_rows(path: Path) -> Iterator[Located]:
    """(place, content) of each task folder at or below `path`: the parsed task.toml, and its files by path."""
    found = [path] if (path / "task.toml").is_file() else sorted(p.parent for p in path.rglob("task.toml"))
    if not found:
        raise ConfigError(f"{path} has no task.toml: expected a Harbor task folder, or a folder of these")
    for folder in found:
        try:
            settings = tomllib.loads((folder / "task.toml").read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{folder}/task.toml cannot be read: {str(error).splitlines()[0]}") from error
        yield folder.name, {"settings": settings, "name": folder.name, "files": _files(folder)}


def read(row: Row, *, source: str, split: str, keep_unknown: bool = False) -> Task:
    """One folder as a task. Settings of task.toml that are not read here are kept in meta, whatever they are."""
    settings = row.sub("settings")
    files: Mapping[str, bytes] = row.value("files")
    environment = settings.sub("environment", required=False)
    verifier = settings.sub("verifier", required=False)
    metadata = settings.mapping("metadata", required=False)
    name = settings.sub("task", required=False).text("name", "") or row.text("name")
    instruction = _text(row, files, "instruction.md")
    tests = {f"/{path}": data for path, data in files.items() if path.startswith("tests/")}
    return Task(
        task_id=f"harbor/{name}",
        source=source,
        split=split,
        repo=str(metadata.get("repo") or name),
        base_commit="",
        problem_statement=instruction,
        fail_to_pass=(),
        pass_to_pass=(),
        gold_patch=b"".join(data for path, data in sorted(files.items()) if _is_solution_patch(path)),
        hidden_files=tests,
        image=_image(environment, files, row.text("name")),
        workdir=environment.text("workdir", "") or _workdir(files),
        test_runner="script",
        test_cmd="bash /tests/test.sh",
        pass_rule="reward_file",
        timeout_s=verifier.number("timeout_sec", 600.0),
        language="",
        meta={
            "task_toml": settings.values,
            "solution": _optional(files, "solution/solve.sh"),
            "dockerfile": _optional(files, "environment/Dockerfile"),
            **({"difficulty": str(metadata["difficulty"])} if metadata.get("difficulty") else {}),
        },
    )


def _files(folder: Path) -> dict[str, bytes]:
    """The folder's files that make up the task; a finished trial that lies beside them does not."""
    wanted = [folder / "instruction.md"]
    for part in ("tests", "solution", "environment"):
        wanted += sorted(path for path in (folder / part).rglob("*") if path.is_file())
    small = [path for path in wanted if path.is_file() and path.stat().st_size <= _MAX_FILE_BYTES]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in small}


def _text(row: Row, files: Mapping[str, bytes], path: str) -> str:
    if path not in files:
        raise RowError(row.where, path, "is missing, expected a text file")
    text = files[path].decode("utf-8", "replace")
    if not text.strip():
        raise SkipRow("no issue text")
    return text


def _optional(files: Mapping[str, bytes], path: str) -> str:
    return files.get(path, b"").decode("utf-8", "replace")


def _is_solution_patch(path: str) -> bool:
    return path.startswith("solution/") and path.endswith((".patch", ".diff"))


def _image(environment: Row, files: Mapping[str, bytes], name: str) -> str:
    """The published image, or the name under which the folder's Dockerfile is to be built."""
    published = environment.text("docker_image", "") or environment.text("base_image", "")
    if published:
        return published
    built = {path: data for path, data in files.items() if path.startswith("environment/")}
    digest = hashlib.sha256()
    for path, data in sorted(built.items()):
        digest.update(path.encode() + b"\0" + hashlib.sha256(data).digest())
    return f"swe-rl/harbor-{name.lower()}:{digest.hexdigest()[:12]}" if built else ""


def _workdir(files: Mapping[str, bytes]) -> str:
    """The last WORKDIR of the Dockerfile; /app is the convention of these sets."""
    lines = _optional(files, "environment/Dockerfile").splitlines()
    found = [line.split(None, 1)[1].strip() for line in lines if line.upper().startswith("WORKDIR ")]
    return found[-1] if found else "/app"
