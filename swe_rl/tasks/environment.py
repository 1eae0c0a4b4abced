"""What a task's sandbox needs besides its tree: read-only directories and variables, stated in Task.meta.

meta["mounts"]  list of [host directory, path inside]; in a stored task set relative to its directory
meta["env"]     variable -> value, such as PYTHONPATH
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.types import SandboxSpec, Task


def task_spec(task: Task, base: SandboxSpec, *, tree: str | Path | None = None) -> SandboxSpec:
    """`base` for this task: its image, workdir, mounts and variables, and `tree` (from `materialize`) as the layer.

    Raises ConfigError when a directory that the task needs is missing.
    """
    mounts = tuple((str(host), str(inside)) for host, inside in task.meta.get("mounts", ()))
    for host, _inside in mounts:
        if not Path(host).is_dir():
            raise ConfigError(f"task {task.task_id} needs the directory {host}: build the task set again")
    return replace(
        base,
        image=task.image or base.image,
        workdir=task.workdir,
        layers=(str(tree),) if tree is not None else base.layers,
        readonly_mounts=(*base.readonly_mounts, *mounts),
        env={**base.env, **task.meta.get("env", {})},
    )


def resolve_mounts(meta: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """`meta` with the host directories of its mounts made absolute below `root`."""
    if not meta.get("mounts"):
        return dict(meta)
    return {**meta, "mounts": [[str((root / host).resolve()), inside] for host, inside in meta["mounts"]]}
