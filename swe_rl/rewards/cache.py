"""Verdicts by (task, filtered patch, grader): in a group many agents hand in the same bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import fields
from pathlib import PurePosixPath
from typing import Any

from swe_rl.rewards.policy import POLICY_VERSION
from swe_rl.tasks.test_runner import runner_digest
from swe_rl.types import Task

GRADER_VERSION = 3  # raised when the same results of the same tests would be judged in another way
_NO_PART = (
    "tree",
    "meta",
    "gold_patch",
    "problem_statement",
    "split",
    "kind",
    "created_at",
    "language",
)  # of a verdict


class ResultCache:
    """The newest `capacity` verdicts. Holds only what a sandbox decided, never an outage."""

    def __init__(self, *, capacity: int = 4096) -> None:
        self.capacity = capacity
        self.hits = 0
        self._entries: OrderedDict[str, Any] = OrderedDict()

    def get(self, key: str) -> Any:
        if key not in self._entries:
            return None
        self.hits += 1
        self._entries.move_to_end(key)
        return self._entries[key]

    def put(self, key: str, verdict: object) -> None:
        self._entries[key] = verdict
        self._entries.move_to_end(key)
        while len(self._entries) > self.capacity:
            self._entries.popitem(last=False)


def grader_version(task: Task) -> str:
    """Names everything of this package that decides a verdict about `task`: rules, path policy, the runner's script."""
    runner = runner_digest(task.test_runner) if task.test_runner in ("functions", "pytest") else task.test_runner
    return f"{GRADER_VERSION}/{POLICY_VERSION}/{runner}"


def task_digest(task: Task, *, with_gold: bool = False) -> str:
    """Digest of all that decides a verdict: base (by its commit), hidden tests, required ids, environment, rules.

    with_gold: of the gold patch too, for verdicts about the task itself.
    """
    digest = hashlib.sha256()
    for field in fields(task):
        if field.name not in _NO_PART:
            _add(digest, field.name, getattr(task, field.name))
    _add(digest, "env", task.meta.get("env", {}))
    _add(digest, "test_s", task.meta.get("test_s", ""))
    mounts = task.meta.get("mounts", ())
    _add(digest, "mounts", [f"{PurePosixPath(str(host)).name}:{inside}" for host, inside in mounts])
    if with_gold:
        _add(digest, "gold_patch", task.gold_patch)
    return digest.hexdigest()


def result_key(task: Task, patch: bytes, *, limit_s: float, strong: bool, order_seed: int) -> str:
    """Key of the verdict about one filtered patch."""
    digest = hashlib.sha256(patch)
    for piece in (grader_version(task), task_digest(task), limit_s, strong, order_seed):
        digest.update(f"\0{piece}".encode())
    return digest.hexdigest()


def _add(digest: Any, name: str, value: object) -> None:
    """Unambiguous: every piece is preceded by its kind and length."""
    if isinstance(value, Mapping):
        _add(digest, name, len(value))
        for key in sorted(value):
            _add(digest, str(key), value[key])
        return
    if isinstance(value, list | tuple):
        _add(digest, name, len(value))
        for item in value:
            _add(digest, "", item)
        return
    data = value if isinstance(value, bytes) else str(value).encode("utf-8", "surrogateescape")
    digest.update(f"{name}:{type(value).__name__}:{len(data)}:".encode("utf-8", "surrogateescape") + data)
