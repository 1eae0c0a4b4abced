"""THE loop. Every phase is the same five lines: take samples, weigh, step, publish, record.

What differs between supervised warm start, rejection fine-tuning and reinforcement learning is where the samples come
from (sample_streams.py) and the objective. Synchronous training is asynchronous training with max_staleness=0.
"""

from __future__ import annotations

import asyncio
import copy
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swe_rl.config import PhaseConfig, TrainConfig, phase_config
from swe_rl.config.stop_presets import untested_reasons
from swe_rl.errors import InvariantError
from swe_rl.evaluation.benchmark import EvalResult
from swe_rl.evaluation.beside import SideEvaluation
from swe_rl.evaluation.heldout import evaluate_splits
from swe_rl.evaluation.verifier_reward import HackingMonitor
from swe_rl.inference.base import Engine
from swe_rl.metric_table import combine_steps
from swe_rl.metrics import MetricsLogger, Progress
from swe_rl.models.contract import PolicyContract
from swe_rl.models.rope import set_rope
from swe_rl.rollout.collector import Collector
from swe_rl.rollout.journal import Journal
from swe_rl.rollout.progress import RolloutProgress
from swe_rl.sample_streams import (
    Share,
    StepSamples,
    collect_passed,
    phase_pool,
    rollout_stream,
    supervised_stream,
)
from swe_rl.training import checkpoint, mesh
from swe_rl.training.checkpoint_writer import CheckpointWriter
from swe_rl.training.parity import compare, rope_variants, sample_probe
from swe_rl.training.phase_cache import cached_weights
from swe_rl.training.rollout_scores import needs_scores, rollout_scores
from swe_rl.training.run_dir import RunDir
from swe_rl.training.schedule import learning_rate
from swe_rl.training.stats import step_metrics
from swe_rl.training.step_batches import optimizer_steps, packed_step
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.training.weight_adapters import export_adapters, merged_on_host
from swe_rl.training.weight_sync import WeightPublisher
from swe_rl.types import StepStats, Task, TrainSample, Trajectory

MAX_DIFF_EXACT = 1e-4  # nats: mean |trainer - engine| logprob on the policy's own tokens, both in fp32
MAX_DIFF_ROUNDED = 0.1  # where one of them computes in bf16


@dataclass(slots=True)
class Position:
    """How far the run is: what a checkpoint stores beside weights and optimiser."""

    phase: int = 0  # index of the phase under way
    step: int = 0  # iterations done in it: optimiser steps, unless its minibatch_size makes several of one
    total: int = 0  # optimiser steps done in the run


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything the loop works with; built by cli/build.py, or by a test from fakes."""

    cfg: TrainConfig
    dir: RunDir
    cache_dir: Path
    backend: TorchBackend
    engine: Engine
    publisher: WeightPublisher  # from the backend to the engine
    contract: Callable[[TrainConfig], PolicyContract]  # of a phase: what trainer and engine agree on
    tokenizer: Any
    journal: Journal
    checkpoints: CheckpointWriter
    train_tasks: list[Task]
    eval_tasks: dict[str, list[Task]]  # split -> tasks
    make_collector: Callable[..., Collector]  # of a TrainConfig; keywords replace parts of the rollouts
    demonstrate: Callable[[Run, PhaseConfig, TrainConfig], Awaitable[list[Trajectory]]]  # of all ranks
    metrics: MetricsLogger
    progress: RolloutProgress
    share: Share = field(default_factory=Share)
    position: Position = field(default_factory=Position)
    pending_state: Mapping[str, Any] | None = None  # trainer state of the checkpoint a resumed run starts from
    stopping: bool = False  # set by the first interrupt: finish the step, checkpoint, leave
    collector: Collector | None = None  # the one at work
    beside: SideEvaluation | None = None  # evaluates at chosen steps of the phase under way
    monitor: HackingMonitor = field(default_factory=HackingMonitor)  # of a verifier in the reward

    def drain(self) -> None:
        """First interrupt: no new rollout begins, the loop ends after the step under way."""
        self.stopping = True
        if self.collector is not None:
            self.collector.drain()
        if self.beside is not None:
            self.beside.drain()

    def use(self, collector: Collector) -> Collector:
        """Makes this the collector that an interrupt drains, also an interrupt that came before it."""
        self.collector = collector
        if self.stopping:
            collector.drain()
        return collector


async def train(run: Run) -> bool:
    """Runs the phases that are left. True when the last one is done, False when it was interrupted."""
    first = run.position.total == 0 and not mesh.broadcast_object(bool(run.dir.results()))
    if first and run.cfg.eval.base_tasks:
        await run.publisher.publish()
        await evaluate_phase(run, run.cfg, name="base", limit=run.cfg.eval.base_tasks)
    for index in range(run.position.phase, len(run.cfg.phases)):
        phase = run.cfg.phases[index]
        if await interrupted(run) or not await run_phase(run, phase, phase_config(run.cfg, phase)):
            await save_checkpoint(run, wait=True)
            return False
        run.position = Position(phase=index + 1, step=0, total=run.position.total)
        await save_checkpoint(run, wait=True)
    return True


async def run_phase(run: Run, phase: PhaseConfig, cfg: TrainConfig) -> bool:
    """One phase from the step it is at, and its evaluation. False when interrupted: a checkpoint is due."""
    await begin_phase(run, phase, cfg)
    stored, found = await find_cached(run, phase, cfg)
    if stored is not None and found:
        run.metrics.message(f"phase {phase.name}: weights from {stored} (same configuration, tasks, seed and code)")
        version = run.backend.policy_version + 1  # of the last version's tokens none may look like this one's
        run.backend.load_weights(checkpoint.load_weights(stored), policy_version=version)
    elif not await run_steps(run, phase, cfg):
        return False
    await mesh.in_thread(export, run, run.dir.phase_weights(phase.name))
    if stored is not None and not found:
        await mesh.in_thread(export, run, stored)
    await run.publisher.publish()
    if phase.evaluate and not await evaluate_phase(run, cfg, name=phase.name):
        return False  # with the steps of the phase done: a resumed run goes straight to the evaluation
    run.journal.compact_all()
    return True


async def find_cached(run: Run, phase: PhaseConfig, cfg: TrainConfig) -> tuple[Path | None, bool]:
    """(where this phase's weights are kept between runs, whether every rank sees them there). Collective."""
    if not phase.cache:
        return None, False
    stored = cached_weights(run.cache_dir, phase, cfg, tasks=run.train_tasks, world_size=run.share.world_size)
    return stored, not await any_rank(not stored.is_dir())


async def any_rank(local: bool) -> bool:
    """True on every rank if `local` is on one. Collective, off the event loop: a signal is heard while waiting."""
    return bool((await mesh.in_thread(mesh.all_reduce_max, [float(local)]))[0])


async def interrupted(run: Run) -> bool:
    """Whether some rank was told to stop: ranks leave together, or one would wait for ever for the others."""
    return await any_rank(run.stopping)


async def begin_phase(run: Run, phase: PhaseConfig, cfg: TrainConfig) -> None:
    """A fresh optimiser and the rotary embedding of the phase; in the first phase of a resumed run, the state of the
    checkpoint."""
    switched = set_rope(run.backend.model, cfg.model)
    await run.engine.set_rope(cfg.model)
    if switched:
        run.metrics.message(f"phase {phase.name}: {switched}")
    dtype = getattr(torch, cfg.model.dtype)
    if run.pending_state is not None and run.position.phase and cfg.algo.kl_coeff:  # the reference of a resumed phase
        before = run.dir.phase_weights(run.cfg.phases[run.position.phase - 1].name)
        run.backend.load_weights(checkpoint.load_weights(before))
    run.backend.new_phase(cfg.trainer, algo=cfg.algo, objective=objective(phase), dtype=dtype)
    if run.pending_state is not None:
        if run.position.step:
            run.backend.load_state_dict(run.pending_state)
        else:
            run.backend.load_weights(run.pending_state["model"], policy_version=run.pending_state["policy_version"])
        run.pending_state = None
    resumed = f", from step {run.position.step}" if run.position.step else ""
    run.metrics.message(f"phase {phase.name}: {phase.data}{resumed}")


async def run_steps(run: Run, phase: PhaseConfig, cfg: TrainConfig) -> bool:
    """The optimiser steps that are left of a phase. False when it was interrupted before the last one."""
    await run.publisher.publish()
    untested = untested_reasons(cfg.algo) if phase.data == "rollouts" else frozenset()
    run.use(run.make_collector(cfg, untested=untested) if untested else run.make_collector(cfg))
    num_steps, stream = await open_stream(run, phase, cfg)
    if await interrupted(run):
        return False  # what was collected may be a part
    first = run.position.step
    if phase.data == "rollouts":
        await probe_parity(run, cfg)
    async with aclosing(stream) as steps, evaluating_beside(run, phase, cfg):
        while (batch := await next_step(run, phase, steps)) is not None:
            rate = learning_rate(cfg.trainer, batch.step, total_steps=num_steps)
            stats = await optimize(run, phase, cfg, batch, rate)
            if phase.data == "rollouts" and batch.step == first:
                check_agreement(stats[0], cfg, on_policy=first == 0 or cfg.rollout.max_staleness == 0)
            await end_side_evaluation(run, phase)
            await run.publisher.publish()
            await record(run, phase, batch, stats, num_steps)
            if cfg.engine.parity_every and run.position.step % cfg.engine.parity_every == 0:
                await probe_parity(run, cfg)
            begin_side_evaluation(run, phase)
        await end_side_evaluation(run, phase)
    return run.position.step >= num_steps


async def open_stream(run: Run, phase: PhaseConfig, cfg: TrainConfig) -> tuple[int, AsyncGenerator[StepSamples]]:
    """(number of optimiser steps, samples step by step) from wherever this phase takes them."""
    assert run.collector is not None
    first = run.position.step
    if phase.data == "rollouts":
        own = run.dir.rollouts_of(run.share.rank, world_size=run.share.world_size)
        tasks, why = await phase_pool(run.train_tasks, phase, own, share=run.share)
        if why:
            run.metrics.message(f"phase {phase.name}: {why}")
        per_step = -(-min(phase.tasks_per_step, len(tasks)) // run.share.world_size) * cfg.rollout.group_size
        run.progress.begin(phase.name, rollouts_per_step=per_step, num_steps=phase.steps)
        score = partial(rollout_scores, cfg=cfg, backend=run.backend) if needs_scores(cfg) else None
        stream = rollout_stream(run.collector, tasks, phase, cfg, first_step=first, share=run.share, score=score)
        return phase.steps, stream
    attempts = -(-phase.num_tasks // run.share.world_size) * phase.samples_per_task
    run.progress.begin(f"{phase.name}: {phase.data}", rollouts_per_step=attempts)
    trajectories: list[Trajectory]
    if phase.data == "demonstrations":
        trajectories = await run.demonstrate(run, phase, cfg)
    else:
        trajectories, counts = await collect_passed(run.collector, run.train_tasks, phase, cfg, share=run.share)
        run.metrics.log(counts, phase=phase.name, step=0)
    return supervised_stream(trajectories, phase, first_step=first, seed=cfg.seed, share=run.share)


async def next_step(run: Run, phase: PhaseConfig, steps: AsyncIterator[StepSamples]) -> StepSamples | None:
    """The next step's samples with the engine's speed meanwhile; None on every rank at the end, or as soon as one was
    interrupted. Collective."""
    if await interrupted(run):
        return None
    started, sampled = time.monotonic(), run.engine.counters.tokens_sampled
    batch = await anext(steps, None)
    if batch is None or phase.data != "rollouts":
        return batch
    speed = (run.engine.counters.tokens_sampled - sampled) / (time.monotonic() - started)
    (total,) = await mesh.in_thread(mesh.all_reduce_sum, [speed])
    return replace(batch, metrics={**batch.metrics, "engine/tokens_per_s": total})


async def optimize(run: Run, phase: PhaseConfig, cfg: TrainConfig, batch: StepSamples, rate: float) -> list[StepStats]:
    """The optimiser steps of one iteration: one, or as many as phase.minibatch_size and algo.epochs make of it.
    Collective."""

    def step(samples: list[TrainSample]) -> StepStats:
        packed = packed_step(samples, phase, cfg, backend=run.backend)
        return run.backend.train_step(packed, learning_rate=rate)

    if cfg.engine.layout == "colocated":
        await end_side_evaluation(run, phase)
        await run.engine.rest()  # the update after this step wakes it
    plan = await mesh.in_thread(optimizer_steps, batch.samples, phase, cfg, step=batch.step, backend=run.backend)
    stats = [await mesh.in_thread(step, samples) for samples in plan.parts]
    (rejected,) = await mesh.in_thread(mesh.all_reduce_sum, [float(plan.rejected)])
    return [replace(stats[0], details={**stats[0].details, "train/mismatch_rejected": rejected}), *stats[1:]]


def objective(phase: PhaseConfig) -> str:
    """Rollouts are trained by policy gradient, everything else by cross-entropy."""
    return "policy_gradient" if phase.data == "rollouts" else "cross_entropy"


async def probe_parity(run: Run, cfg: TrainConfig) -> None:
    """Compares vLLM's logprobs with the trainer's at short to long contexts. InvariantError, on every rank, with the
    likely causes in order; the embedded engine runs the trainer's own model. Collective."""
    if cfg.engine.backend == "embedded":
        return
    contract = run.contract(cfg)
    played = await sample_probe(run.engine, contract, nonce=run.position.total)
    score = run.backend.logprobs
    without = rope_variants(run.backend.model, cfg.model, score)
    report = await mesh.in_thread(partial(compare, played, contract, score=score, without=without, anywhere=anywhere))
    run.metrics.message(report.describe())
    if await any_rank(not report.ok):
        raise InvariantError(report.describe())


def anywhere(local: bool) -> bool:
    """True on every rank if `local` is on one. Collective."""
    return bool(mesh.all_reduce_max([float(local)])[0])


def check_agreement(stats: StepStats, cfg: TrainConfig, *, on_policy: bool) -> None:
    """Raises InvariantError if trainer and engine give the same tokens of the same weights other probabilities."""
    exact = cfg.model.dtype == cfg.engine.dtype == "float32"
    bound = MAX_DIFF_EXACT if exact else MAX_DIFF_ROUNDED
    if on_policy and stats.num_loss_tokens and not stats.logprob_abs_diff <= bound:
        raise InvariantError(
            f"trainer and engine disagree: mean |logprob difference| {stats.logprob_abs_diff:.1e}, above {bound} for "
            f"model.dtype={cfg.model.dtype} and engine.dtype={cfg.engine.dtype}; likely causes: a model that the "
            "engine's attention does not cover, weights that were not published, another sampling temperature"
        )


async def record(run: Run, phase: PhaseConfig, batch: StepSamples, stats: Sequence[StepStats], num_steps: int) -> None:
    """Counts, logs, compacts the journal of the iteration and checkpoints when due. Collective."""
    run.position = replace(run.position, step=batch.step + 1, total=run.position.total + len(stats))
    values = {**batch.metrics, **iteration_metrics(stats), **await engine_metrics(run.engine)}
    if run.publisher.report is not None:
        values |= run.publisher.report.metrics()
    values |= run.monitor.add(values)
    run.metrics.log(values, phase=phase.name, step=run.position.step)
    if phase.data == "rollouts":
        await asyncio.to_thread(run.journal.compact, phase.name, batch.step)
    else:
        run.metrics.progress(Progress(phase=phase.name, step=run.position.step, num_steps=num_steps))
    if run.position.step % run.cfg.checkpoint_every == 0:
        await save_checkpoint(run)


def iteration_metrics(stats: Sequence[StepStats]) -> dict[str, float]:
    """The optimiser steps of one iteration as one, and their number."""
    return {**combine_steps([step_metrics(each) for each in stats]), "train/optimizer_steps": float(len(stats))}


async def engine_metrics(engine: Engine) -> dict[str, float]:
    """Counters since the start of this process, summed over ranks. Collective."""
    counters = engine.counters.as_dict()
    sums = await mesh.in_thread(mesh.all_reduce_sum, list(counters.values()))
    return {f"engine/{name}": value for name, value in zip(counters, sums, strict=True)}


async def save_checkpoint(run: Run, *, wait: bool = False) -> None:
    """Weights, optimiser and position; durable before older ones go, and with `wait` when this returns. None while a
    resumed run has not taken up its checkpoint yet, which this would replace by weights of before it. Collective."""
    if run.pending_state is not None:
        return

    def save() -> None:
        run.checkpoints.save(
            run.dir.path,
            run.backend,
            step=run.position.total,
            counters={**asdict(run.position), **({"monitor": run.monitor.state()} if run.monitor.first else {})},
            # Adapters alone are no model: a directory that looked like one would load with random weights.
            model_config=None if run.cfg.model.lora_rank else copy.deepcopy(run.backend.model.config),
            tokenizer=run.tokenizer,
            keep=run.cfg.keep_checkpoints,
        )
        if wait:
            run.checkpoints.finish()

    await mesh.in_thread(save)


def export(run: Run, directory: Path) -> None:
    """The present weights as a Hugging Face directory, adapters merged, and the adapters alone in it. Collective."""
    main, adapted = mesh.is_main(), bool(run.cfg.model.lora_rank)
    trained = run.backend.masters.full_on_host(keep=main)
    weights = merged_on_host(run.backend.model, trained, keep=main) if adapted else trained
    if main:
        checkpoint.export(directory, weights, model_config=run.backend.model.config, tokenizer=run.tokenizer)
        if adapted:
            export_adapters(directory / "adapter", run.backend.model, trained, base=run.cfg.model.name)
    mesh.barrier()


@asynccontextmanager
async def evaluating_beside(run: Run, phase: PhaseConfig, cfg: TrainConfig) -> AsyncIterator[None]:
    """Evaluations at the steps of a phase that eval.every names; that of the step a resumed run is at, where it was
    not finished. Collective at the start."""
    if phase.data != "rollouts" or not cfg.eval.every:
        yield
        return

    async def play(collector: Collector, name: str) -> list[EvalResult] | None:
        async def stopping() -> bool:
            return run.stopping

        tasks = {split: found[: cfg.eval.every_tasks or len(found)] for split, found in run.eval_tasks.items()}
        parts = {"own_part": run.share.of, "interrupted": stopping}
        return await evaluate_splits(collector, tasks, cfg.eval, name=name, **parts)  # type: ignore[arg-type]

    run.beside = SideEvaluation(
        every=cfg.eval.every,
        play=play,
        make_collector=partial(run.make_collector, cfg, quiet=True),
        gather=run.share.gather,
    )
    try:
        done = mesh.broadcast_object([row["phase"] for row in run.dir.results()])
        if side_name(run, phase) not in done:
            begin_side_evaluation(run, phase)
        yield
    finally:
        await run.beside.close()
        run.beside = None


def side_name(run: Run, phase: PhaseConfig) -> str:
    """Of the evaluation of the weights at hand, in results.json and in the keys of its rollouts."""
    return f"{phase.name}-step{run.position.step}"


def begin_side_evaluation(run: Run, phase: PhaseConfig) -> None:
    """Where one is due; not of the weights that end the phase, if those are evaluated after it. A rank that was told to
    stop begins it too, drained: its end is collective, and the others may not have been told yet."""
    last = run.position.step >= phase.steps and phase.evaluate
    if run.beside is not None and run.beside.due(run.position.step) and not last:
        run.beside.begin(side_name(run, phase))
        if run.stopping:
            run.beside.drain()


async def end_side_evaluation(run: Run, phase: PhaseConfig) -> None:
    """Waits for the one under way, if any, and keeps what it found. Collective."""
    if run.beside is None:
        return
    name = run.beside.name
    results = await run.beside.finish()
    if run.beside.trouble:
        run.metrics.message(f"{name}: {run.beside.trouble}")
    for found in results:
        step = int(name.rpartition("-step")[2])
        values = {"eval/success": found.success, "eval/stderr": found.stderr}
        known = {key: value for key, value in values.items() if math.isfinite(value)}
        run.metrics.log(known, phase=f"{phase.name}-{found.split}-{found.mode}", step=step)
        success = f"{found.success:.3f} ± {found.stderr:.3f} (n={found.num_tasks})"
        run.metrics.message(f"{name} {found.split} {found.mode}: {success}")
    if results and mesh.is_main():
        run.dir.add_results([{"phase": name, **result.as_row()} for result in results])


async def evaluate_phase(run: Run, cfg: TrainConfig, *, name: str, limit: int = 0) -> bool:
    """Held-out success per split; rows go to results.json. False when interrupted on the way. Collective."""
    results = await evaluate_splits(
        run.use(run.make_collector(cfg)),
        run.eval_tasks,
        cfg.eval,
        name=name,
        limit=limit,
        own_part=run.share.of,
        gather=run.share.gather,
        begin=lambda label, rollouts: run.progress.begin(label, rollouts_per_step=rollouts),
        interrupted=partial(interrupted, run),
    )
    if results is None:
        return False
    for found in results:
        success = f"{found.success:.3f} ± {found.stderr:.3f} (n={found.num_tasks})"
        run.metrics.message(f"{name} {found.split} {found.mode}: {success}")
    if mesh.is_main():
        run.dir.add_results([{"phase": name, **result.as_row()} for result in results])
    return True
