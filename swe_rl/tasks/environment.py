"""What a task's sandbox needs besides its tree, and what must be gone from it before the first action.

meta["mounts"]  list of [host directory, path inside]; in a stored task set relative to its directory
meta["env"]     variable -> value, such as PYTHONPATH

A base tree of ours is written without history (repository.py). An image of somebody else's holds its repository with
the fix among later commits, the hidden tests, and caches: `prepare_sandbox` leaves none of that.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError, SandboxError
from swe_rl.protocols import Sandbox
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


def relative_mounts(meta: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """`meta` with absolute host directories of its mounts as seen from `root`: both may be moved together then."""
    if not meta.get("mounts"):
        return dict(meta)
    seen = [
        [os.path.relpath(host, root.resolve()) if os.path.isabs(host) else host, inside]
        for host, inside in meta["mounts"]
    ]
    return {**meta, "mounts": seen}


SETUP_S = 600.0  # of Task.setup_cmd, and of hiding the answers
_NO_WORKDIR, _NO_GIT, _NOT_HIDDEN = 65, 127, 66

# One synthetic commit with everything that is there, tracked by the old repository or not ignored; then no other
# repository, no compiled copies of the workspace, no downloads. Arguments: workdir, then paths to remove.
_HIDE = r"""
command -v git >/dev/null || exit 127
cd "$1" || exit 65
W=$(pwd -P); shift
for P in "$@"; do rm -rf -- "$P" || exit 66; done
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_GLOBAL=/dev/null GIT_NO_REPLACE_OBJECTS=1 GIT_TERMINAL_PROMPT=0
export GIT_AUTHOR_DATE='946684800 +0000' GIT_COMMITTER_DATE='946684800 +0000'
export GIT_AUTHOR_NAME=base GIT_AUTHOR_EMAIL=base@localhost GIT_COMMITTER_NAME=base GIT_COMMITTER_EMAIL=base@localhost
T=$(mktemp -d) || exit 66
git -c safe.directory='*' ls-files -z >"$T/tracked" 2>/dev/null
find / "$W" -xdev \( -path /proc -o -path /sys -o -path /dev \) -prune -o -name .git -prune -print0 |
  xargs -0 -r rm -rf --
find . -name __pycache__ -type d -prune -print0 | xargs -0 -r rm -rf --
find . -name '*.py[co]' -type f -print0 | xargs -0 -r rm -f --
for H in /root "$HOME" /home/*; do rm -rf "$H"/.cache "$H"/.npm "$H"/.cargo/registry "$H"/go/pkg/mod/cache; done
rm -rf /var/cache/pip /tmp/pip-* /tmp/*.patch /tmp/*.diff
find / -xdev \( -path /proc -o -path /sys -o -path /dev \) -prune -o -path '*/pkgs/*' -type f \
  \( -name '*.conda' -o -name '*.tar.bz2' \) -print0 | xargs -0 -r rm -f --
git init -q --template= . 2>/dev/null || exit 66
git config core.fileMode true; git config core.logAllRefUpdates false; git config gc.auto 0
git config user.name agent; git config user.email agent@localhost; git config core.autocrlf false
mkdir -p .git/info && printf '%s\n' '* -text -eol -ident -filter -working-tree-encoding' >.git/info/attributes
printf '%s\n' __pycache__/ '*.pyc' >.git/info/exclude
git symbolic-ref HEAD refs/heads/main
git add -A . || exit 66
xargs -0 -r sh -c 'for F; do if [ -L "$F" ] || [ -f "$F" ]; then printf "%s\0" "$F"; fi; done' - <"$T/tracked" |
  git update-index --add -z --stdin || exit 66
git commit -q --no-verify --allow-empty -m base || exit 66
rm -rf "$T" .git/logs .git/COMMIT_EDITMSG .git/ORIG_HEAD .git/FETCH_HEAD
git rev-parse HEAD
"""


async def prepare_sandbox(sandbox: Sandbox, task: Task) -> None:
    """Makes the sandbox of a task that comes as an image fit for an agent: its set-up command, then nothing of the
    answer is left. A sandbox with the base tree as a layer is that already, and stays as it is.

    The commit that patches are taken against is then the only one, whatever `task.base_commit` says. Raises
    SandboxError when a step fails: the image is unusable, which says nothing about a policy.
    """
    await run_setup(sandbox, task)
    await hide_answers(sandbox, task)


async def run_setup(sandbox: Sandbox, task: Task) -> None:
    """The set-up command of a task that comes as an image, where it has one. Raises SandboxError when it fails."""
    if task.tree or not task.setup_cmd:
        return
    result = await sandbox.exec(task.setup_cmd, cwd=task.workdir, timeout_s=SETUP_S)
    if result.exit_code != 0:
        raise _unprepared(task, "its setup_cmd failed", result.stderr)


async def hide_answers(sandbox: Sandbox, task: Task) -> None:
    """Rebuilds the repository as one commit and removes hidden tests, other repositories, caches and compiled code.
    Does nothing for a task whose tree is ours. Raises SandboxError when it fails."""
    if task.tree:
        return
    command = f"exec sh -c {shlex.quote(_HIDE)} hide {shlex.join([task.workdir, *task.hidden_paths])}"
    result = await sandbox.exec(command, cwd="/", timeout_s=SETUP_S)
    if result.exit_code != 0:
        reason = {_NO_WORKDIR: "it has no such workdir", _NO_GIT: "it has no git"}.get(result.exit_code, "")
        raise _unprepared(task, reason or f"the answers could not be hidden ({result.outcome})", result.stderr)


def _unprepared(task: Task, what: str, stderr: bytes) -> SandboxError:
    tail = stderr[-200:].decode("utf-8", "replace").strip()
    return SandboxError(f"image {task.image!r} of task {task.task_id}, workdir {task.workdir}: {what} {tail}".strip())
