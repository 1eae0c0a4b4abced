"""Environments that are no repositories train through the same loop, by the command line, to their optimum."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from random import Random

import pytest

from swe_rl.agents.environments import GAMES, Bandit, GamePlayer, TextGame
from swe_rl.config import tasks as config
from swe_rl.types import ToolCall


def results(experiment: str, run_dir: Path, *overrides: str) -> dict[tuple[str, str], dict]:
    command = [sys.executable, "-m", "swe_rl", "train", f"experiment={experiment}", f"run_dir={run_dir}", *overrides]
    done = subprocess.run(command, capture_output=True, text=True, timeout=560)
    assert done.returncode == 0, done.stderr[-2000:]
    rows = json.loads((run_dir / "results.json").read_text())
    return {(row["phase"], row["mode"]): row for row in rows}


@pytest.mark.slow
@pytest.mark.parametrize(("experiment", "before"), [("bandit", 0.6), ("text_game", 0.75)])
def test_a_game_is_learned_to_its_optimum(experiment: str, before: float, tmp_path: Path) -> None:
    found = results(experiment, tmp_path / "run")
    assert found["warm_start", "sampled"]["success"] < before, "the warm start left nothing to learn"
    assert found["rl", "greedy"]["success"] == 1.0
    assert found["rl", "sampled"]["success"] >= 0.85


def test_the_names_in_the_configuration_are_those_that_exist() -> None:
    assert sorted(config.GAMES) == sorted(GAMES)


def test_a_game_fits_on_a_page() -> None:
    for game in GAMES.values():
        assert len(Path(sys.modules[game.__module__].__file__ or "").read_text().splitlines()) < 100


async def play(game, task, *ways: str):
    played = game()
    await played.reset(task)
    (tool, (parameter,)) = next(iter(game.signatures.items()))
    steps = [await played.step(ToolCall(name=tool, arguments={parameter: way})) for way in ways]
    return steps, game.score(task, played.result())


async def test_the_bandit_pays_once() -> None:
    (task,) = Bandit.tasks(split="train", num_tasks=1, seed=0)
    steps, reward = await play(Bandit, task, "blue")
    assert (steps[0].done, reward.value, reward.solved) == (True, 1.0, True)
    steps, reward = await play(Bandit, task, "green")
    assert (steps[0].done, reward.value, reward.solved) == (True, 0.6, False)
    steps, reward = await play(Bandit, task, "purple")
    assert (steps[0].done, reward.value, reward.solved) == (False, 0.0, False)
    assert "no such arm" in steps[0].observation


async def test_the_text_game_shows_only_what_was_earned() -> None:
    task = next(
        t for t in TextGame.tasks(split="train", num_tasks=50, seed=0) if t.meta == {"key": "north", "door": "west"}
    )
    opening = await TextGame().reset(task)
    assert "north" in opening[0]["content"]
    assert "west" not in opening[0]["content"]
    steps, reward = await play(TextGame, task, "north", "west")
    assert ([s.done for s in steps], reward.value, reward.solved) == ([False, True], 1.0, True)
    assert "west" in steps[0].observation
    steps, reward = await play(TextGame, task, "west", "north", "north", "west")
    assert (steps[-1].done, reward.value, reward.solved) == (True, pytest.approx(0.4), False)
    assert [s.observation for s in steps[:2]] == ["a wall", steps[1].observation]
    for moves in (("west",), ("north",), ("west", "west"), ("north", "north"), ("up",)):
        _, reward = await play(TextGame, task, *moves)
        assert (reward.value, reward.solved) == (0.0, False)


@pytest.mark.parametrize("name", sorted(GAMES))
async def test_tasks_and_players_are_functions_of_their_seed(name: str) -> None:
    game = GAMES[name]
    tasks = game.tasks(split="train", num_tasks=20, seed=3)
    assert tasks == game.tasks(split="train", num_tasks=20, seed=3)
    assert len({task.task_id for task in tasks}) == 20
    assert not {t.task_id for t in tasks} & {t.task_id for t in game.tasks(split="heldout", num_tasks=20, seed=3)}
    for task in tasks:
        calls = [GamePlayer(game, task, seed=1).next_call(None, None) for _ in range(2)]
        assert calls[0] == calls[1]
        assert list(calls[0].arguments) == list(game.signatures[calls[0].name])
    assert isinstance(game.play(tasks[0], Random(0), None), ToolCall)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("agent.toolset=bash", "agent.toolset does nothing for task.source=bandit"),
        ("agent.prompt=default", "agent.prompt does nothing"),
        ("reward.value=fraction", "reward.value does nothing for task.source=bandit"),
        ("task.num_train=0", "task.num_train=0: task.source=bandit has no end"),
    ],
)
def test_keys_that_a_game_ignores_are_refused(override: str, words: str, tmp_path: Path) -> None:
    from swe_rl.cli.hydra_entry import compose_config
    from swe_rl.config import TrainConfig, validate
    from swe_rl.errors import ConfigError

    with pytest.raises(ConfigError, match=words):
        validate(compose_config(TrainConfig, "train", ["experiment=bandit", override]))
