"""Verdicts by (task, filtered patch): in a group many agents hand in the same bytes."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any

from swe_rl.rewards.policy import POLICY_VERSION
from swe_rl.types import Task


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


def result_key(task: Task, patch: bytes, limit_s: float) -> str:
    """Digest of all that decides a verdict: base tree, hidden tests, required ids, limit, policy, patch."""
    digest = hashlib.sha256()
    pieces = [str(POLICY_VERSION), task.task_id, task.base_commit, task.image, task.test_runner, str(limit_s)]
    pieces += [*task.fail_to_pass, "", *task.pass_to_pass]
    for piece in pieces:
        digest.update(piece.encode("utf-8", "surrogateescape") + b"\0")
    for path, data in sorted(task.hidden_files.items()):
        digest.update(path.encode("utf-8", "surrogateescape") + b"\0" + hashlib.sha256(data).digest())
    digest.update(hashlib.sha256(patch).digest())
    return digest.hexdigest()
