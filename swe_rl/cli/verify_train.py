"""`swe-rl verify train`: an execution-free verifier from graded attempts, recorded or sampled for it.

RUN/phases/<name>/            the weights with verifier.json: what it was trained on, and must never judge
RUN/candidates.jsonl          held-out attempts with their scores, where eval.splits asks for them
RUN/verifier_quality.json, .html  how good the scores are there: AUC, calibration, ROC and reliability curves
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_rl.cli.hydra_entry import Composed, hydra_main
from swe_rl.config import PhaseConfig, TrainConfig, phase_config, validate
from swe_rl.errors import ConfigError

if TYPE_CHECKING:
    from swe_rl.agents.rendering import Renderer
    from swe_rl.evaluation.candidates import Candidate
    from swe_rl.evaluation.verifier_data import Question
    from swe_rl.train_loop import Run
    from swe_rl.training.torch_backend import TorchBackend
    from swe_rl.types import StepStats, Task, Trajectory


CHANCE_LEAKS = 0.01  # share of sampled attempts whose log may hold a line of what is hidden; they are left out


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code."""
    return hydra_main(
        argv,
        command="verify train",
        schema=TrainConfig,
        config_name="train",
        run=lambda composed: asyncio.run(_main(composed)),
        validate=validate_judged,
    )


async def _main(composed: Composed[TrainConfig]) -> int:
    async with open_session(composed) as session:
        directory = await train_verifier(session)
        if session.cfg.eval.splits:
            await judge_heldout(session, directory)
        session.say(f"verifier: {directory}")
    return 0


def validate_judged(cfg: TrainConfig) -> None:
    """As for training, and: one phase of judged attempts, and a policy to sample from where none are given."""
    validate(cfg)
    if [phase.data for phase in cfg.phases] != ["judged_rollouts"]:
        raise ConfigError(
            "phases: a verifier has one phase, with data=judged_rollouts: choose experiment=test_time_scaling or "
            "experiment=r2e_verifier"
        )
    if idle := sorted(set(cfg.phases[0].overrides) - {"model", "trainer", "algo", "batching"}):
        raise ConfigError(
            f"phases.{cfg.phases[0].name}.overrides.{idle[0]} does nothing: a verifier's phase only says how it "
            f"learns; set {idle[0]} for the whole run"
        )
    if len({Path(name).resolve() for name in cfg.verifier.rollouts}) != len(cfg.verifier.rollouts):
        raise ConfigError("verifier.rollouts names a run twice: its attempts would count double")
    if cfg.model.name == "nano" and not (cfg.init_weights or cfg.verifier.rollouts):
        raise ConfigError(
            "init_weights is empty and model.name=nano knows nothing: add init_weights=RUN/phases/rft of a run of "
            "swe-rl train"
        )


@dataclass(slots=True, kw_only=True)
class Session:
    """What the parts of a verifier run share. `run` has no phases: training a verifier is no part of the loop."""

    cfg: TrainConfig
    phase: PhaseConfig
    run: Run
    heldout: dict[str, Task] = field(default_factory=dict)  # by id
    attempts: list[Trajectory] = field(default_factory=list)  # at them

    def say(self, text: str) -> None:
        self.run.metrics.message(text)


@asynccontextmanager
async def open_session(composed: Composed[TrainConfig]) -> AsyncIterator[Session]:
    """Opens the parts as a training run does. ConfigError before anything is written."""
    from swe_rl.cli.build import open_run
    from swe_rl.cli.train import install_interrupts

    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")  # as for swe-rl train
    cfg = composed.config
    async with AsyncExitStack() as stack:
        opened = open_run(replace(cfg, phases=[]), label=composed.label, config_yaml=composed.yaml)
        run = await stack.enter_async_context(opened)
        install_interrupts(run)
        await run.publisher.publish()  # not every engine begins with the weights of the policy
        yield Session(cfg=cfg, phase=cfg.phases[0], run=run)


async def sample(
    session: Session, tasks: Sequence[Task], count: int, *, phase: str, temperature: float, **changes: Any
) -> list[Trajectory]:
    """`count` attempts at each task, in the order of tasks; from the journal what is there. Under torchrun each rank
    samples its share, and all get all. KeyboardInterrupt when drained on the way: a resumed run goes on from there."""
    run = session.run
    own = run.share.of(tasks)
    collector = run.use(run.make_collector(session.cfg, **changes))
    run.progress.begin(phase, rollouts_per_step=len(own) * count)
    found: list[Trajectory] = []
    groups = collector.groups(own, group_size=count, phase=phase, step=0, temperature=temperature, ordered=True)
    async with aclosing(groups):
        async for group in groups:
            found += group.trajectories
    if run.stopping:
        raise KeyboardInterrupt
    run.journal.compact_all()
    return await run.share.all_of(found, tasks)


async def train_verifier(session: Session) -> Path:
    """Builds the data, trains, saves. Returns the directory of the verifier; that of an earlier process if it is
    there."""
    from swe_rl.evaluation.verifier_data import training_questions
    from swe_rl.evaluation.verifier_model import MANIFEST
    from swe_rl.training import mesh

    cfg, phase, run = session.cfg, session.phase, session.run
    directory = run.dir.phase_weights(phase.name)
    if (directory / MANIFEST).is_file():
        session.say(f"verifier from {directory}")
        return directory
    questions, counts = training_questions(
        await _questions(session),
        balance=cfg.verifier.balance,
        seed=cfg.seed,
        chance_leaks=0.0 if cfg.verifier.rollouts else CHANCE_LEAKS,
    )
    run.metrics.log(counts, phase=phase.name, step=0)
    session.say(
        f"verifier: {len(questions)} questions of {len({q.task_id for q in questions})} tasks, "
        f"{counts['verifier/num_solved']:.0f} solved; {counts['verifier/num_condensed']:.0f} condensed, "
        f"{counts['verifier/num_too_long']:.0f} too long, {counts['verifier/num_leaked']:.0f} leaked of "
        f"{counts['verifier/num_seen']:.0f}"
    )
    await mesh.in_thread(_fit, session, questions, directory)
    return directory


async def _questions(session: Session) -> list[Question]:
    """Of recorded attempts, or of attempts sampled now."""
    from swe_rl.agents.rendering import make_renderer
    from swe_rl.cli.verify_stored import open_stored
    from swe_rl.evaluation.verifier_data import Reader
    from swe_rl.sample_streams import step_tasks

    cfg, phase, run = session.cfg, session.phase, session.run
    verifier = make_renderer(_with_answers(cfg)[1])
    if cfg.verifier.rollouts:
        found: list[Question] = []
        for name in cfg.verifier.rollouts:
            stored = open_stored(Path(name))
            reader_for = partial(Reader, cfg=cfg.verifier, policy=stored.renderer(), verifier=verifier)
            attempts = stored.trajectories()
            tasks = stored.tasks(attempts)
            own = [reader_for(agent=stored.agent_of(t)).question(t, tasks[t.task_id]) for t in attempts]
            # ids name rollouts within a run: two policies on the same tasks have the same ones
            found += [replace(question, trajectory_id=f"{name}:{question.trajectory_id}") for question in own]
        return found
    chosen = step_tasks(run.train_tasks, step=0, count=phase.num_tasks, seed=cfg.seed, phase=phase.name)
    attempts = await sample(
        session, chosen, phase.samples_per_task, phase=phase.name, temperature=cfg.rollout.temperature
    )
    reader = Reader(cfg=cfg.verifier, agent=cfg.agent, policy=renderer_of(session), verifier=verifier)
    by_id = {task.task_id: task for task in chosen}
    return await asyncio.to_thread(lambda: [reader.question(item, by_id[item.task_id]) for item in attempts])


def renderer_of(session: Session) -> Renderer:
    """Of the policy that is sampled."""
    from swe_rl.agents.rendering import make_renderer

    agent = session.cfg.agent
    return make_renderer(session.run.tokenizer, thinking=agent.thinking, observations=agent.observations)


def _with_answers(cfg: TrainConfig) -> tuple[Any, Any]:
    """(the policy's model, its tokenizer), with tokens for the answers where the configuration wants them."""
    from swe_rl.cli.build import load_policy
    from swe_rl.evaluation.verifier_model import add_answer_tokens

    model, tokenizer = load_policy(cfg)
    if cfg.verifier.answer_tokens:
        add_answer_tokens(model, tokenizer)
    return model, tokenizer


def _backend(run: Run, cfg: TrainConfig) -> tuple[TorchBackend, Any]:
    """(what is trained, its tokenizer): the policy's own backend, since the engine has a copy of the weights; a second
    model where there are tokens for the answers, or where the policy is still needed to become a test agent."""
    import torch

    from swe_rl.training.torch_backend import TorchBackend

    settings: dict[str, Any] = {"algo": cfg.algo, "objective": "cross_entropy"}
    settings["dtype"] = getattr(torch, cfg.model.dtype)
    if cfg.verifier.answer_tokens or cfg.verifier.test_tasks:
        model, tokenizer = _with_answers(cfg)
        return TorchBackend(model, cfg.trainer, device=run.backend.device, **settings), tokenizer
    run.backend.new_phase(cfg.trainer, **settings)
    return run.backend, run.tokenizer


def _fit(session: Session, questions: Sequence[Question], directory: Path) -> None:
    """Trains the policy to answer, and writes it."""
    from swe_rl.agents.rendering import make_renderer
    from swe_rl.evaluation.verifier_data import to_sample
    from swe_rl.evaluation.verifier_model import Manifest, save_verifier
    from swe_rl.evaluation.verifier_training import train_supervised
    from swe_rl.metrics import Progress
    from swe_rl.training import mesh
    from swe_rl.training.stats import step_metrics
    from swe_rl.training.weight_adapters import export_adapters

    run, phase, cfg = session.run, session.phase, phase_config(session.cfg, session.phase)
    backend, tokenizer = _backend(run, cfg)
    renderer = make_renderer(tokenizer)

    def on_step(step: int, steps: int, stats: StepStats) -> None:
        run.metrics.log(step_metrics(stats), phase=phase.name, step=step)
        run.metrics.progress(Progress(phase=phase.name, step=step, num_steps=steps))
        if run.stopping:
            raise KeyboardInterrupt

    train_supervised(backend, [to_sample(q, renderer) for q in questions], phase, cfg, on_step=on_step)
    manifest = Manifest(
        form=cfg.verifier.form,
        instruction_file=cfg.verifier.instruction_file,
        max_tokens=cfg.verifier.max_tokens,
        tasks=tuple(sorted({question.task_id for question in questions})),
        repositories=tuple(sorted({question.repository for question in questions})),
    )
    weights = backend.weights()  # with adapters merged
    adapters = backend.masters.full() if cfg.model.lora_rank else {}
    if mesh.is_main():
        save_verifier(directory, weights, manifest, model_config=backend.model.config, tokenizer=tokenizer)
        if adapters:
            export_adapters(directory / "adapter", backend.model, adapters, base=cfg.model.name)


async def judge_heldout(session: Session, directory: Path) -> list[Candidate]:
    """Samples the held-out tasks, writes them as candidates with their scores, and tells how good the scores are."""
    from swe_rl.cli.verify_quality import write_quality
    from swe_rl.evaluation.candidates import FILE_NAME, candidate_of, write_candidates
    from swe_rl.training import mesh

    cfg, run = session.cfg, session.run
    for split, tasks in run.eval_tasks.items():
        session.heldout |= {task.task_id: task for task in tasks}
        session.attempts += await sample(
            session,
            tasks,
            cfg.eval.samples_per_task,
            phase=f"candidates-{split}",
            temperature=cfg.rollout.temperature,
        )
    verifier = _open(session, directory)
    scores = await mesh.in_thread(verifier.judge_all, session.attempts, session.heldout)
    candidates = [
        replace(candidate_of(item, session.heldout[item.task_id]), ef_score=found.p_yes, ef_flag=found.flag)
        for item in session.attempts
        for found in [scores[item.trajectory_id]]
    ]
    if mesh.is_main():
        write_candidates(run.dir.path / FILE_NAME, candidates)
        session.say(write_quality(run.dir.path, candidates))
    return candidates


def _open(session: Session, directory: Path) -> Any:
    from swe_rl.evaluation.verifier_service import open_verifier

    cfg = phase_config(session.cfg, session.phase)
    return open_verifier(
        directory, agent=cfg.agent, policy=renderer_of(session), max_batch_tokens=cfg.batching.max_tokens_per_batch
    )
