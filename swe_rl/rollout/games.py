"""The parts of a rollout in an environment without a sandbox: the game itself takes the place of one."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from swe_rl.agents.environments import Game
from swe_rl.agents.formats import FORMATS
from swe_rl.agents.rendering import Renderer
from swe_rl.config import TrainConfig
from swe_rl.rollout.runner import RolloutParts
from swe_rl.types import Reward, Task


def game_parts(cfg: TrainConfig, game: type[Game], *, renderer: Renderer) -> RolloutParts:
    """What is opened for an episode is the game, what it has come to is the patch, and its score is the grade."""

    @asynccontextmanager
    async def open_game(task: Task) -> AsyncIterator[Any]:
        yield game()

    async def result_of(played: Any, task: Task) -> bytes:
        result: bytes = played.result()
        return result

    async def score(task: Task, patch: bytes) -> Reward:
        return game.score(task, patch)

    def same(played: Any) -> Any:
        return played

    return RolloutParts(
        open_sandbox=open_game,
        make_environment=same,
        extract_patch=result_of,
        grade=score,
        renderer=renderer,
        action_format=FORMATS[cfg.agent.action_format].bind(game.signatures),
        limits=cfg.agent,
        infra_retries=cfg.sandbox.infra_retries,
    )
