"""A task's tree as a git repository of exactly one commit, written without starting git.

Objects follow gitformat-pack(5) and gitformat-index(5): loose objects, zlib level 1, index version 2.
No remotes, tags, reflog or unreachable objects exist, so that nothing but the base tree can be read from `.git`.
"""

from __future__ import annotations

import hashlib
import os
import posixpath
import shutil
import struct
import tempfile
import zlib
from collections.abc import Generator, Mapping
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.types import Task

EPOCH_S = 946_684_800  # date of the commit and of every file: 2000-01-01 UTC, older than any edit of an agent
_IDENTITY = f"base <base@localhost> {EPOCH_S} +0000"
_FILE_MODE, _DIR_MODE = 0o100644, 0o40000
_CONFIG = (
    "[core]\n\trepositoryformatversion = 0\n\tfilemode = false\n\tbare = false\n\tlogallrefupdates = false\n"
    "[gc]\n\tauto = 0\n[user]\n\tname = agent\n\temail = agent@localhost\n"
)
_Object = tuple[str, bytes]  # (hex id, "type length\0" + content)


def tree_commit(tree: Mapping[str, bytes]) -> str:
    """Id of the one commit that holds `tree` (path -> content). Equal trees have equal ids, anywhere and any time."""
    *_, (commit_id, _content) = _objects(tree)
    return commit_id


def materialize(task: Task, cache_dir: str | Path) -> Path:
    """Directory under `cache_dir` with the task's base tree and its `.git`; made once per distinct tree.

    Idempotent and safe under concurrent callers (built aside, then renamed). Raises ConfigError when the task has no
    tree or its `base_commit` is not the tree's commit.
    """
    target = Path(cache_dir) / task.base_commit
    if target.is_dir():
        return target
    if not task.tree:
        raise ConfigError(f"task {task.task_id} has no files: it needs a sandbox backend that runs its image")
    objects = list(_objects(task.tree))
    if objects[-1][0] != task.base_commit:
        raise ConfigError(f"task {task.task_id}: base_commit {task.base_commit} is not that of its tree")
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=".staging-", dir=target.parent))
    try:
        staging.chmod(0o755)
        _write_files(staging, task.tree)
        _write_repository(staging / ".git", tree=task.tree, objects=objects)
        staging.rename(target)
    except OSError:
        if not target.is_dir():  # otherwise somebody else was first, with the same content
            raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _objects(tree: Mapping[str, bytes]) -> Generator[_Object, None, None]:
    """Blobs, then trees from the leaves up, then the commit (last)."""
    root: dict[str, Any] = {}
    for path, content in tree.items():
        folder = root
        *parents, name = _parts(path)
        for parent in parents:
            folder = folder.setdefault(parent, {})
            if isinstance(folder, bytes):
                raise ConfigError(f"{path!r} is both a file and a directory in one tree")
        if name in folder:
            raise ConfigError(f"{path!r} is both a file and a directory in one tree")
        folder[name] = content
    tree_id = yield from _folder_objects(root)
    text = f"tree {tree_id}\nauthor {_IDENTITY}\ncommitter {_IDENTITY}\n\nbase\n"
    yield _object("commit", text.encode())


def _parts(path: str) -> list[str]:
    parts = path.split("/")
    if any(part in ("", ".", "..", ".git") for part in parts) or "\0" in path:
        raise ConfigError(f"{path!r} is not a relative POSIX path inside the repository")
    return parts


def _folder_objects(folder: Mapping[str, Any]) -> Generator[_Object, None, str]:
    entries = []
    for name, item in folder.items():
        if isinstance(item, bytes):
            made = _object("blob", item)
            yield made
            entries.append((name.encode(), _FILE_MODE, made[0]))
        else:
            entries.append((name.encode(), _DIR_MODE, (yield from _folder_objects(item))))
    entries.sort(key=lambda entry: entry[0] + b"/" if entry[1] == _DIR_MODE else entry[0])  # git's order
    made = _object("tree", b"".join(b"%o %s\0%s" % (mode, name, bytes.fromhex(key)) for name, mode, key in entries))
    yield made
    return made[0]


def _object(kind: str, content: bytes) -> _Object:
    data = b"%s %d\0%s" % (kind.encode(), len(content), content)
    return hashlib.sha1(data, usedforsecurity=False).hexdigest(), data


def _write_files(root: Path, tree: Mapping[str, bytes]) -> None:
    for folder in sorted({posixpath.dirname(path) for path in tree} - {""}):
        (root / folder).mkdir(parents=True, exist_ok=True)
    for path, content in tree.items():
        (root / path).write_bytes(content)
        os.utime(root / path, (EPOCH_S, EPOCH_S))


def _write_repository(git: Path, *, tree: Mapping[str, bytes], objects: list[_Object]) -> None:
    for folder in ("objects/info", "objects/pack", "refs/heads", "refs/tags", "info"):
        (git / folder).mkdir(parents=True)
    for object_id, data in dict(objects).items():
        shelf = git / "objects" / object_id[:2]
        shelf.mkdir(exist_ok=True)
        (shelf / object_id[2:]).write_bytes(zlib.compress(data, 1))
    (git / "HEAD").write_text("ref: refs/heads/main\n")
    (git / "refs/heads/main").write_text(objects[-1][0] + "\n")
    (git / "config").write_text(_CONFIG)
    (git / "info/exclude").write_text("__pycache__/\n*.pyc\n")
    (git / "index").write_bytes(_index(tree))


def _index(tree: Mapping[str, bytes]) -> bytes:
    """Index with zero times: git compares contents at its first look, wherever the tree is mounted."""
    records = [struct.pack(">4sII", b"DIRC", 2, len(tree))]
    for path, content in sorted((path.encode(), content) for path, content in tree.items()):
        object_id = bytes.fromhex(_object("blob", content)[0])
        record = struct.pack(
            ">10I20sH", 0, 0, 0, 0, 0, 0, _FILE_MODE, 0, 0, len(content), object_id, min(len(path), 0xFFF)
        )
        record += path
        records.append(record + b"\0" * (8 - len(record) % 8))
    body = b"".join(records)
    return body + hashlib.sha1(body, usedforsecurity=False).digest()
