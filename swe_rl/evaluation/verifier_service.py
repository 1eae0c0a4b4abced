"""A trained verifier at work: one question or many, in batches, with all that forbids an answer.

The weights are here (`open_verifier`), or a server has them (`open_served`: vLLM with a published adapter, for one).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swe_rl.agents.rendering import Renderer, make_renderer
from swe_rl.config import AgentConfig, VerifierConfig
from swe_rl.config.evaluation import ServerConfig
from swe_rl.evaluation.verifier_data import Question, Reader, repository_of
from swe_rl.evaluation.verifier_model import (
    Answers,
    Judgement,
    Manifest,
    answer_probability,
    answers_of,
    judge,
    load_verifier,
    read_manifest,
)
from swe_rl.inference.server import ServerPolicy
from swe_rl.models.tokenizers import read_tokenizer
from swe_rl.training import mesh
from swe_rl.types import Task, Trajectory

Judge = Callable[[Sequence[Sequence[int]]], list[Judgement]]  # prompts -> judgements, in their order
LIKELY, ANSWER_TOKENS = 20, 12  # of a server: likeliest tokens per position, and how far it may write


@dataclass(slots=True, kw_only=True)
class TrainedVerifier:
    """Implements protocols.Verifier. Questions that wait at the same time are answered in one batch.

    Judges only what it was not trained on: ConfigError otherwise.
    """

    manifest: Manifest
    reader: Reader
    judge: Judge
    waiting: list[tuple[Question, asyncio.Future[Judgement]]] = field(default_factory=list)
    worker: asyncio.Task[None] | None = None

    def check(self, tasks: Iterable[Task]) -> None:
        """ConfigError when it was trained on one of these tasks or on its repository."""
        self.manifest.check((task.task_id, repository_of(task)) for task in tasks)

    async def score(self, task: Task, trajectory: Trajectory) -> float:
        """Chance that the trajectory solves its task; nan where `judge_all` would flag it."""
        self.check([task])
        question = self.reader.question(trajectory, task)
        if _blocked(question) is not None:
            return math.nan
        future: asyncio.Future[Judgement] = asyncio.get_running_loop().create_future()
        self.waiting.append((question, future))
        if self.worker is None or self.worker.done():
            self.worker = asyncio.create_task(self._work(), name="verifier")
        judgement = await future
        return math.nan if judgement.flag else judgement.p_yes

    async def _work(self) -> None:
        """Answers what waits until nothing does. A failure goes to everybody who waits."""
        while self.waiting:
            batch, self.waiting = self.waiting, []
            try:
                found = await mesh.in_thread(self._answers, [question for question, _ in batch])
            except Exception as err:  # the boundary of this task: whoever waits gets the cause
                for _, future in batch:
                    if not future.done():
                        future.set_exception(err)
                continue
            for (_, future), judgement in zip(batch, found, strict=True):
                if not future.done():
                    future.set_result(judgement)

    def _answers(self, questions: Sequence[Question]) -> list[Judgement]:
        return self.judge([question.prompt_ids for question in questions])

    def judge_all(self, trajectories: Iterable[Trajectory], tasks: Mapping[str, Task]) -> dict[str, Judgement]:
        """A judgement per trajectory id, whatever the order of the input. A log that gives away the answer, or that is
        too long, is not read: 0, flagged. Raises ConfigError as `check` does, ValueError for an id that is there twice.
        """
        ordered = sorted(trajectories, key=lambda item: item.trajectory_id)
        self.check(tasks[item.task_id] for item in ordered)
        questions = [self.reader.question(item, tasks[item.task_id]) for item in ordered]
        if len({question.trajectory_id for question in questions}) != len(questions):
            raise ValueError("a trajectory is there twice")
        blocked = {question.trajectory_id: _blocked(question) for question in questions}
        open_ones = [question for question in questions if blocked[question.trajectory_id] is None]
        judged = zip(open_ones, self._answers(open_ones), strict=True)
        answered = {question.trajectory_id: judgement for question, judgement in judged}
        return {name: value or answered[name] for name, value in blocked.items()}


def open_verifier(
    directory: Path, *, agent: AgentConfig, policy: Renderer, max_batch_tokens: int, dtype: str = "float32"
) -> TrainedVerifier:
    """One that `swe-rl verify train` wrote. agent and policy: of the rollouts that are judged."""
    loaded, tokenizer, manifest = load_verifier(directory)
    model: Any = loaded  # whose `to` is wrapped by transformers
    model = model.to(device="cuda" if torch.cuda.is_available() else "cpu", dtype=getattr(torch, dtype))
    renderer = make_renderer(tokenizer)
    return TrainedVerifier(
        manifest=manifest,
        reader=_reader(manifest, agent, policy, renderer),
        judge=partial(judge, model, answers=answers_of(renderer), max_tokens=max_batch_tokens),
    )


def open_served(
    directory: Path, *, url: str, cfg: ServerConfig, agent: AgentConfig, policy: Renderer, concurrency: int
) -> TrainedVerifier:
    """One whose weights a server has. `directory` holds its tokenizer and its verifier.json: what it was trained on is
    not to be guessed. Raises ConfigError or CheckpointError, one line."""
    manifest, tokenizer = read_manifest(directory), read_tokenizer(str(directory))
    renderer = make_renderer(tokenizer)
    answers = answers_of(renderer)

    def ask_all(prompts: Sequence[Sequence[int]]) -> list[Judgement]:
        return asyncio.run(_ask_all(prompts, answers, url=url, cfg=cfg, tokenizer=tokenizer, concurrency=concurrency))

    return TrainedVerifier(manifest=manifest, reader=_reader(manifest, agent, policy, renderer), judge=ask_all)


class VerifierServer(ServerPolicy):
    """An OpenAI-compatible server that tells the likeliest tokens."""

    async def likely_tokens(self, prompt_ids: Sequence[int]) -> list[dict[str, float]]:
        """Of each position that it writes at temperature 0: text -> natural log. Raises EngineError, EngineDead."""
        body = {
            "model": self._cfg.model,
            "prompt": list(prompt_ids),
            "max_tokens": ANSWER_TOKENS,
            "temperature": 0,
            "logprobs": LIKELY,
        }
        answer = await self._post("/completions", body)
        choices = answer.get("choices") or [{}]
        return [dict(tokens or {}) for tokens in (choices[0].get("logprobs") or {}).get("top_logprobs") or []]


async def _ask_all(
    prompts: Sequence[Sequence[int]],
    answers: Answers,
    *,
    url: str,
    cfg: ServerConfig,
    tokenizer: object,
    concurrency: int,
) -> list[Judgement]:
    async with VerifierServer(url, cfg, tokenizer=tokenizer, concurrency=concurrency) as server:
        async with asyncio.TaskGroup() as group:  # a failure ends the others before the connection closes
            found = [group.create_task(server.likely_tokens([*ids, *answers.shared])) for ids in prompts]
    return [answer_probability(task.result()) for task in found]


def _reader(manifest: Manifest, agent: AgentConfig, policy: Renderer, verifier: Renderer) -> Reader:
    cfg = VerifierConfig(form=manifest.form, instruction_file=manifest.instruction_file, max_tokens=manifest.max_tokens)
    return Reader(cfg=cfg, agent=agent, policy=policy, verifier=verifier)


def _blocked(question: Question) -> Judgement | None:
    """Why a question is not put at all."""
    if question.leak:
        return Judgement(0.0, f"leak: {question.leak}")
    return None if question.fits else Judgement(0.0, "too long")
