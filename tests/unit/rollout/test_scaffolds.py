"""Every toolset in every action format: the scripted oracle solves tasks in real sandboxes, and an episode trains."""

from __future__ import annotations

import asyncio
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from real_parts import require

from swe_rl.agents import FORMATS, TOOLSETS, make_renderer
from swe_rl.algorithms.aggregation import count_rows, count_tokens, token_weights
from swe_rl.batching import pack, to_samples
from swe_rl.config import AlgoConfig, ModelConfig, TrainConfig, TrainerConfig
from swe_rl.errors import SandboxUnavailable
from swe_rl.models import nano_corpus
from swe_rl.models.nano import build_model, build_tokenizer
from swe_rl.rollout.collector import Collector
from swe_rl.rollout.demonstrations import (
    DemonstratorPolicy,
    TranslatedDemonstrator,
    collect_demonstrations,
    rewrite_calls,
    sessions,
)
from swe_rl.rollout.wiring import rollout_parts
from swe_rl.sandbox import SandboxPool, open_sandbox
from swe_rl.tasks import load_tasks
from swe_rl.tasks.minirepo.demonstrator import Demonstrator as MinirepoDemonstrator
from swe_rl.tasks.oracle import OracleDemonstrator
from swe_rl.tasks.oracle_calls import replacement_between
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import SandboxSpec, StopReason, Task, ToolCall, Trajectory

PROMPT_OF = {"minimal": "default", "r2e": "deepswe", "sweagent": "deepswe_eval", "nebius": "nebius", "bash": "bash"}
MATRIX = [(toolset, action_format) for toolset in TOOLSETS for action_format in FORMATS]
PHASE = "oracle"


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    async def probe() -> None:
        try:
            async with open_sandbox(SandboxSpec()):
                pass
        except SandboxUnavailable as err:
            require(False, f"a machine that allows sandboxes ({err})")

    asyncio.run(probe())
    return [
        *load_tasks("minirepo", split="train", num_tasks=2, seed=0),
        *load_tasks("minirepo", split="hard", num_tasks=1, seed=0),  # several bugs, several files
    ]


@pytest.fixture(scope="module")
def nano() -> tuple[Any, Any]:
    """A very small model and its tokenizer."""
    cfg = ModelConfig(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=1, intermediate_size=32, vocab_size=640)
    tokenizer = build_tokenizer(
        nano_corpus.texts("minimal"), vocab_size=640, whole_words=nano_corpus.whole_words("minimal")
    )
    return build_model(cfg), tokenizer


def config(toolset: str, action_format: str, **changes: Any) -> TrainConfig:
    cfg = TrainConfig()
    cfg.agent.toolset, cfg.agent.action_format, cfg.agent.prompt = toolset, action_format, PROMPT_OF[toolset]
    cfg.agent.max_context_tokens, cfg.agent.max_turn_tokens, cfg.agent.max_observation_tokens = 40_000, 4000, 4000
    cfg.agent.max_turns = 30
    for key, value in changes.items():
        setattr(cfg.agent, key, value)
    return cfg


async def play(cfg: TrainConfig, tasks: list[Task], tokenizer: Any, trees: Path, script: Any) -> list[Trajectory]:
    """One graded episode per task, by `script(task)`."""
    renderer = make_renderer(tokenizer, thinking=cfg.agent.thinking, observations=cfg.agent.observations)
    parts = rollout_parts(cfg, pool=SandboxPool(3), renderer=renderer, trees=trees)
    scripts = {session: partial(script, task) for session, task, _ in sessions(tasks, samples_per_task=1, phase=PHASE)}
    policy = DemonstratorPolicy(scripts, renderer=renderer, action_format=parts.action_format)
    collector = Collector(policy, parts=parts, concurrency=3, seed=0)
    return await collect_demonstrations(collector, tasks, samples_per_task=1, phase=PHASE)


def train_once(model: Any, trajectory: Trajectory) -> None:
    """One optimiser step on one episode: finite loss, every sampled token trains exactly once."""
    samples = to_samples(trajectory, 1.0)
    assert sum(sum(sample.loss_mask) for sample in samples) == trajectory.num_sampled_tokens
    num_tokens, num_rows = count_tokens(samples), count_rows(samples, "token_mean")
    weighted = token_weights(
        samples, "token_mean", max_tokens=40_000, num_rows_global=num_rows, num_tokens_global=num_tokens
    )
    backend = TorchBackend(model, TrainerConfig(), algo=AlgoConfig(), device=torch.device("cpu"), dtype=torch.float32)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    stats = backend.train_step(pack(weighted, max_tokens=40_000), learning_rate=1e-3)
    assert stats.num_loss_tokens == num_tokens
    assert math.isfinite(stats.loss)
    assert not stats.skipped
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize(("toolset", "action_format"), MATRIX)
async def test_the_oracle_solves_tasks_and_an_episode_trains(
    toolset: str, action_format: str, tasks: list[Task], nano: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = nano
    cfg = config(toolset, action_format)
    found = await play(cfg, tasks, tokenizer, tmp_path, partial(OracleDemonstrator, toolset=toolset))
    assert [trajectory.stop_reason for trajectory in found] == [StopReason.SUBMITTED] * len(tasks)
    for trajectory in found:
        assert not any(turn.format_error or turn.repaired for turn in trajectory.turns)
        assert not any("error:" in turn.observation for turn in trajectory.turns), trajectory
        assert trajectory.reward is not None
        assert trajectory.reward.value == 1.0, trajectory
    train_once(model, found[0])


@pytest.mark.parametrize("toolset", [name for name in TOOLSETS if name != "minimal"])
async def test_the_minirepo_demonstrator_speaks_every_toolset(
    toolset: str, tasks: list[Task], nano: tuple[Any, Any], tmp_path: Path
) -> None:
    """It greps, reads, edits, runs the tests until they pass (some of its edits are wrong), and hands in."""

    def script(task: Task) -> TranslatedDemonstrator:
        player = MinirepoDemonstrator(task, 5, p_right=0.5, p_give_up=0.0, max_attempts=12)
        return TranslatedDemonstrator(player, task, toolset=toolset)

    found = await play(config(toolset, "xml"), tasks, nano[1], tmp_path, script)
    for trajectory in found:
        assert trajectory.stop_reason is StopReason.SUBMITTED, trajectory.detail
        assert not any("error:" in turn.observation for turn in trajectory.turns), trajectory
        assert "passed" in trajectory.turns[-2].observation
        assert trajectory.reward is not None
        assert trajectory.reward.tests_passed > 0


async def test_the_oracle_solves_tasks_while_old_observations_leave_the_context(
    tasks: list[Task], nano: tuple[Any, Any], tmp_path: Path
) -> None:
    model, tokenizer = nano
    cfg = config("nebius", "fence", keep_observations=1, remind_turns=30)

    def script(task: Task) -> TranslatedDemonstrator:
        return TranslatedDemonstrator(MinirepoDemonstrator.oracle(task), task, toolset="nebius")

    found = await play(cfg, tasks, tokenizer, tmp_path, script)
    assert [trajectory.reward and trajectory.reward.value for trajectory in found] == [1.0] * len(tasks)
    assert all(any(turn.kept_context is not None for turn in trajectory.turns) for trajectory in found)
    train_once(model, found[-1])


class Curious(OracleDemonstrator):
    """Asks twice, then plays the oracle."""

    questions = 2

    def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
        if self.questions:
            self.questions -= 1
            return ToolCall(name="ask_human", arguments={"question": "What is expected?"})
        return super().next_call(last_observation, test_passed)


async def test_questions_are_answered_and_cost_reward(tasks: list[Task], nano: tuple[Any, Any], tmp_path: Path) -> None:
    cfg = config("sweagent", "hermes", ask_human="scripted", question_cost=0.125)
    task = replace(tasks[0], meta={**tasks[0].meta, "answers": [["expected", "See the report."]]})
    (got,) = await play(cfg, [task], nano[1], tmp_path, partial(Curious, toolset="sweagent"))
    assert [turn.observation for turn in got.turns[:2]] == ["See the report."] * 2
    assert got.reward is not None
    assert got.reward.value == 0.75
    assert got.reward.terms["questions"] == -0.25
    assert got.reward.tests_passed == got.reward.tests_total


@pytest.mark.parametrize(
    ("before", "after", "old", "new", "first", "last"),
    [
        ("a\nb\nc\n", "a\nx\nc\n", "b\n", "x\n", 2, 2),
        ("a\nb\na\nc", "a\nb\nx\nc", "b\na\nc", "b\nx\nc", 2, 4),
        ("a\nb\n", "a\nn\nb\n", "a\nb\n", "a\nn\nb\n", 1, 2),
        ("a\nb\n", "b\n", "a\n", "", 1, 1),
        ("a", "b", "a", "b", 1, 1),
    ],
)
def test_replacement_between(before: str, after: str, old: str, new: str, first: int, last: int) -> None:
    got = replacement_between("f", before, after)
    assert got is not None
    assert (got.old, got.new, got.first_line, got.last_line) == (old, new, first, last)
    assert before.replace(got.old, got.new) == after
    assert replacement_between("f", before, before) is None


FIRST = "def f(a):\n    if a:\n        return 1\n    return 2\n"
EDITOR_SHELL = {"r2e": ("file_editor", "execute_bash", "cmd"), "sweagent": ("str_replace_editor", "bash", "command")}
SECOND = "\n\ndef g(b):\n    return b\n"


@pytest.mark.parametrize("toolset", ["r2e", "sweagent"])
@pytest.mark.parametrize(("before", "left"), [(FIRST + SECOND, SECOND), (SECOND + FIRST, SECOND), (FIRST[:-1], "")])
async def test_a_function_is_taken_out_and_written_anew(
    toolset: str, before: str, left: str, tasks: list[Task], nano: tuple[Any, Any], tmp_path: Path
) -> None:
    """The calls do in a sandbox what they are said to do."""
    body = "def f(a):\n    return 3"
    rewrite = rewrite_calls(toolset, "m.py", before.encode(), name="f", body=body)
    assert rewrite is not None
    assert rewrite.after.decode() == body + "\n\n\n" + left
    editor, shell, key = EDITOR_SHELL[toolset]
    create = ToolCall(name=editor, arguments={"command": "create", "path": "m.py", "file_text": before})
    calls = iter([create, *rewrite.calls, ToolCall(name=shell, arguments={key: "cat m.py"})])

    class Script:
        def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
            return next(calls, ToolCall(name="finish" if toolset == "r2e" else "submit", arguments={}))

    (got,) = await play(config(toolset, "xml"), tasks[:1], nano[1], tmp_path, lambda task: Script())
    assert got.stop_reason is StopReason.SUBMITTED
    assert rewrite.after.decode().strip() in got.turns[3].observation


@pytest.mark.parametrize(
    ("toolset", "before"),
    [
        ("bash", FIRST),  # no editor
        ("r2e", "class A:\n    def f(self):\n        return 1\n"),
        ("r2e", "@d\n" + FIRST),
        ("r2e", "def f(a):\n    return 1\n    return 2\n"),
        ("r2e", "def f(a):\n    yield 1\n\n\ndef g():\n    return 1\n"),
        ("r2e", FIRST + FIRST),
        ("r2e", "from __future__ import annotations\n" + FIRST),
        ("r2e", "LIMIT = 3\n\n\ndef f(a=LIMIT):\n    return a\n"),
        ("r2e", FIRST + "\n\ndef g():\n    return 'ü'\n"),
        ("r2e", FIRST.replace("\n", "\r\n")),
    ],
)
def test_other_functions_are_not_rewritten(toolset: str, before: str) -> None:
    assert rewrite_calls(toolset, "m.py", before.encode(), name="f", body="def f(a):\n    return 3") is None
