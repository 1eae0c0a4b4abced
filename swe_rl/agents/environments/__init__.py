"""Environments beside software engineering, by the name that `task.source` gives them: small ones, to show and to test
that the loop trains anything that keeps the protocol.

A `Game` is an Environment without a sandbox. What an episode leaves behind takes the place of the patch: `result` says
it in bytes, and `score` is a function of the task and of these bytes alone, so that rollouts can be stored and scored
again. (Of SweEnvironment the same two are rewards.extract_patch and rewards.grade.)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from random import Random
from typing import ClassVar, Protocol

from swe_rl.agents.environments.bandit import Bandit
from swe_rl.agents.environments.text_game import TextGame
from swe_rl.protocols import Environment
from swe_rl.types import Reward, Task, ToolCall

__all__ = ["GAMES", "Bandit", "Game", "GamePlayer", "TextGame"]


class Game(Environment, Protocol):
    """One object per episode. The static methods say what all episodes have in common."""

    signatures: ClassVar[Mapping[str, tuple[str, ...]]]  # tool -> parameters

    def result(self) -> bytes:
        """What the episode has come to so far."""
        ...

    @staticmethod
    def score(task: Task, result: bytes) -> Reward: ...

    @staticmethod
    def tasks(*, split: str, num_tasks: int, seed: int) -> list[Task]: ...

    @staticmethod
    def texts() -> Iterator[str]:
        """What is read and written in episodes: a small tokenizer learns from it."""
        ...

    @staticmethod
    def play(task: Task, rng: Random, last_observation: str | None) -> ToolCall:
        """An action of an imperfect player who knows the rules: the warm start imitates it."""
        ...


class GamePlayer:
    """A demonstrator (see rollout.demonstrations) for games."""

    def __init__(self, game: type[Game], task: Task, *, seed: int) -> None:
        self._game, self._task, self._rng = game, task, Random(f"{task.task_id}/{seed}")

    def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
        """The next action after what was last seen."""
        return self._game.play(self._task, self._rng, last_observation)


GAMES: dict[str, type[Game]] = {"bandit": Bandit, "text_game": TextGame}
