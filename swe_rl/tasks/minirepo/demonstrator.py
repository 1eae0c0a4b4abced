"""A deliberately imperfect demonstrator: what the nano policy is warm-started on. It stands in for pretraining.

It finds the function, reads its file, replaces the function (rightly with probability `p_right`, else by a wrong
version), runs the visible tests, and submits or tries again. The share of right edits sets the warm level.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any

from swe_rl.errors import ConfigError, InvariantError
from swe_rl.tasks.minirepo.mutators import BUG_KINDS, sites
from swe_rl.types import Task, ToolCall


class Demonstrator:
    """A pure state machine: no sandbox, no clock; equal (task, seed, observations) give equal calls."""

    def __init__(
        self,
        task: Task,
        seed: int,
        *,
        p_right: float = 0.15,
        p_give_up: float = 0.7,
        p_unchanged: float = 0.1,
        max_attempts: int = 2,
    ) -> None:
        """p_right: of one function's edit; p_give_up: of submitting after a failed test; p_unchanged: share of wrong
        edits that leave the function as it is. Raises ConfigError for a task of another source."""
        if "bugs" not in task.meta:
            raise ConfigError(f"task {task.task_id} has no demonstrator: only minirepo tasks have one")
        self._bugs: list[Mapping[str, Any]] = list(task.meta["bugs"])
        self._rng = Random(f"demonstrator/{task.task_id}/{seed}")
        self._p_right, self._p_give_up, self._p_unchanged = p_right, p_give_up, p_unchanged
        self._max_attempts = max_attempts
        self._test_passed: bool | None = None
        self._calls = self._play()

    @classmethod
    def oracle(cls, task: Task, seed: int = 0) -> Demonstrator:
        """One that always edits rightly."""
        return cls(task, seed, p_right=1.0)

    def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
        """The next action. `test_passed` tells how the visible tests ended when the last call was `test`, else None.
        Raises InvariantError after `submit`."""
        self._test_passed = test_passed
        for call in self._calls:
            return call
        raise InvariantError("the demonstrator was asked for a call after it had submitted")

    def _play(self) -> Iterator[ToolCall]:
        read: set[str] = set()
        for attempt in range(1, self._max_attempts + 1):
            for bug in self._bugs:
                if attempt == 1:
                    yield _bash(f'grep -rn "def {bug["function"]}" *')
                    if bug["path"] not in read:
                        read.add(bug["path"])
                        yield _bash(f"cat {bug['path']}")
                arguments = {"path": bug["path"], "name": bug["function"], "body": self._edit(bug)}
                yield ToolCall(name="edit_function", arguments=arguments)
            yield ToolCall(name="test", arguments={})
            if self._test_passed or self._rng.random() < self._p_give_up:
                break
        yield ToolCall(name="submit", arguments={})

    def _edit(self, bug: Mapping[str, Any]) -> str:
        if self._rng.random() < self._p_right:
            return bug["clean"]
        if self._rng.random() < self._p_unchanged:
            return bug["buggy"]
        return wrong_version(bug["clean"], rng=self._rng)


def wrong_version(clean: str, *, rng: Random) -> str:
    """A mutant of a clean function, of a random kind. Its behaviour may agree by chance on the visible tests."""
    module = ast.parse(clean)
    function = module.body[0]
    assert isinstance(function, ast.FunctionDef)
    places = [place for kind in BUG_KINDS for place in sites(function, kind)]
    rng.choice(places)()
    return ast.unparse(module)


def _bash(command: str) -> ToolCall:
    return ToolCall(name="bash", arguments={"command": command})
