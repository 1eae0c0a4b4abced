"""THE loop. Every phase is the same five lines: take samples, weigh, step, publish, record.

What differs between supervised warm start, rejection fine-tuning and reinforcement learning is where the samples come
from (sample_streams.py) and the objective. Synchronous training is asynchronous training with max_staleness=0.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from swe_rl.algorithms.aggregation import count_rows, count_tokens, token_weights
from swe_rl.batching import pack
from swe_rl.config import PhaseConfig, TrainConfig, phase_config
from swe_rl.evaluation.benchmark import EvalResult, evaluate
from swe_rl.inference import EmbeddedEngine
from swe_rl.metrics import MetricsLogger, Progress
from swe_rl.rollout.collector import Collector
from swe_rl.rollout.journal import Journal
from swe_rl.rollout.progress import RolloutProgress
from swe_rl.sample_streams import Share, StepSamples, collect_passed, rollout_stream, supervised_stream
from swe_rl.training import checkpoint, mesh
from swe_rl.training.phase_cache import cached_weights
from swe_rl.training.run_dir import RunDir
from swe_rl.training.schedule import learning_rate
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.training.weight_sync import publish
from swe_rl.types import PackedBatch, StepStats, Task, TrainSample, Trajectory


@dataclass(slots=True)
class Position:
    """How far the run is: what a checkpoint stores beside weights and optimiser."""

    phase: int = 0  # index of the phase under way
    step: int = 0  # optimiser steps done in it
    total: int = 0  # optimiser steps done in the run


@dataclass(slots=True, kw_only=True)
class Run:
    """Everything the loop works with; built by cli/build.py, or by a test from fakes."""

    cfg: TrainConfig
    dir: RunDir
    cache_dir: Path
    backend: TorchBackend
    engine: EmbeddedEngine
    tokenizer: Any
    journal: Journal
    train_tasks: list[Task]
    eval_tasks: dict[str, list[Task]]  # split -> tasks
    make_collector: Callable[[TrainConfig], Collector]
    demonstrate: Callable[[PhaseConfig, TrainConfig, Share], Awaitable[list[Trajectory]]]  # of all ranks
    metrics: MetricsLogger
    progress: RolloutProgress
    share: Share = field(default_factory=Share)
    position: Position = field(default_factory=Position)
    pending_state: Mapping[str, Any] | None = None  # trainer state of the checkpoint a resumed run starts from
    stopping: bool = False  # set by the first interrupt: finish the step, checkpoint, leave
    collector: Collector | None = None

    def drain(self) -> None:
        """First interrupt: no new rollout begins, the loop ends after the step under way."""
        self.stopping = True
        if self.collector is not None:
            self.collector.drain()


async def train(run: Run) -> bool:
    """Runs the phases that are left. True when the last one is done, False when it was interrupted."""
    if run.position.total == 0 and run.cfg.eval.base_tasks and not run.dir.results():
        await evaluate_phase(run, run.cfg, name="base", limit=run.cfg.eval.base_tasks)
    for index in range(run.position.phase, len(run.cfg.phases)):
        phase = run.cfg.phases[index]
        if not await run_phase(run, phase, phase_config(run.cfg, phase)):
            return False
        run.position = Position(phase=index + 1, step=0, total=run.position.total)
        save_checkpoint(run)
    return True


async def run_phase(run: Run, phase: PhaseConfig, cfg: TrainConfig) -> bool:
    """One phase from the step it is at, and its evaluation. False when interrupted."""
    begin_phase(run, phase, cfg)
    stored = cached_weights(run.cache_dir, phase, cfg, world_size=run.share.world_size) if phase.cache else None
    if stored is not None and stored.is_dir():
        run.metrics.message(f"phase {phase.name}: weights from {stored} (same configuration, seed and code)")
        run.backend.load_weights(checkpoint.load_weights(stored))
    elif not await run_steps(run, phase, cfg):
        save_checkpoint(run)
        return False
    export(run, run.dir.phase_weights(phase.name))
    if stored is not None and not stored.is_dir():
        export(run, stored)
    await publish(run.backend, run.engine)
    if phase.evaluate:
        await evaluate_phase(run, cfg, name=phase.name)
    if run.stopping:
        save_checkpoint(run)  # with the steps of the phase done: a resumed run goes straight to the evaluation
        return False
    run.journal.compact_all()
    return True


def begin_phase(run: Run, phase: PhaseConfig, cfg: TrainConfig) -> None:
    """A fresh optimiser; in the first phase of a resumed run, the state of the checkpoint."""
    dtype = getattr(torch, cfg.model.dtype)
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
    await publish(run.backend, run.engine)
    run.collector = run.make_collector(cfg)
    num_steps, stream = await open_stream(run, phase, cfg)
    async with aclosing(stream) as steps:
        while (batch := await next_step(run, steps)) is not None:
            packed = pack(weigh(batch.samples, cfg), max_tokens=cfg.batching.max_tokens_per_batch)
            stats = await asyncio.to_thread(
                run.backend.train_step,
                behaviour(packed, cfg, phase),
                learning_rate=learning_rate(cfg.trainer, batch.step, total_steps=num_steps),
            )
            await publish(run.backend, run.engine)
            record(run, phase, batch, stats, num_steps)
    return run.position.step >= num_steps


async def open_stream(run: Run, phase: PhaseConfig, cfg: TrainConfig) -> tuple[int, AsyncGenerator[StepSamples]]:
    """(number of optimiser steps, samples step by step) from wherever this phase takes them."""
    assert run.collector is not None
    first = run.position.step
    if phase.data == "rollouts":
        per_step = -(-phase.tasks_per_step // run.share.world_size) * cfg.rollout.group_size
        run.progress.begin(phase.name, rollouts_per_step=per_step, num_steps=phase.steps)
        stream = rollout_stream(run.collector, run.train_tasks, phase, cfg, first_step=first, share=run.share)
        return phase.steps, stream
    attempts = -(-phase.num_tasks // run.share.world_size) * phase.samples_per_task
    run.progress.begin(f"{phase.name}: {phase.data}", rollouts_per_step=attempts)
    trajectories: list[Trajectory]
    if phase.data == "demonstrations":
        trajectories = await run.demonstrate(phase, cfg, run.share)
    else:
        trajectories, counts = await collect_passed(run.collector, run.train_tasks, phase, cfg, share=run.share)
        run.metrics.log(counts, phase=phase.name, step=0)
    return supervised_stream(trajectories, phase, first_step=first, seed=cfg.seed, share=run.share)


async def next_step(run: Run, steps: AsyncIterator[StepSamples]) -> StepSamples | None:
    """The next step's samples, or None on every rank as soon as one rank has none or was interrupted. Collective."""
    batch = None if run.stopping else await anext(steps, None)
    return None if mesh.all_reduce_max([float(batch is None)])[0] else batch


def weigh(samples: Sequence[TrainSample], cfg: TrainConfig) -> list[TrainSample]:
    """Fills token weights with denominators that are global over ranks and micro-batches. Collective."""
    mode = cfg.algo.aggregation
    rows, tokens = mesh.all_reduce_sum([count_rows(samples, mode), count_tokens(samples)])
    return token_weights(
        samples,
        mode,
        max_tokens=cfg.agent.max_context_tokens,
        num_rows_global=int(rows),
        num_tokens_global=int(tokens),
    )


def behaviour(batches: Sequence[PackedBatch], cfg: TrainConfig, phase: PhaseConfig) -> list[PackedBatch]:
    """The batches with the old policy they need. Asynchronous rollouts come from older weights: the old policy is the
    one of their engine logprobs (bypass mode: the ratio covers staleness). Synchronous: one step per batch, so the old
    policy is the current one."""
    if phase.data != "rollouts" or cfg.rollout.max_staleness == 0:
        return list(batches)
    return [replace(batch, old_logprobs=batch.rollout_logprobs) for batch in batches]


def objective(phase: PhaseConfig) -> str:
    """Rollouts are trained by policy gradient, everything else by cross-entropy."""
    return "policy_gradient" if phase.data == "rollouts" else "cross_entropy"


def record(run: Run, phase: PhaseConfig, batch: StepSamples, stats: StepStats, num_steps: int) -> None:
    """Counts, logs, compacts the journal of the step and checkpoints when due."""
    run.position = replace(run.position, step=batch.step + 1, total=run.position.total + 1)
    values = {**batch.metrics, **train_metrics(stats), **engine_metrics(run.engine)}
    run.metrics.log(values, phase=phase.name, step=run.position.step)
    if phase.data != "rollouts":
        run.metrics.progress(Progress(phase=phase.name, step=run.position.step, num_steps=num_steps))
    if phase.data == "rollouts":
        run.journal.compact(phase.name, batch.step)
    if run.position.step % run.cfg.checkpoint_every == 0 and phase.data != "demonstrations":
        save_checkpoint(run)


def train_metrics(stats: StepStats) -> dict[str, float]:
    return {
        "train/loss": stats.loss,
        "train/grad_norm": stats.grad_norm,
        "train/skipped": float(stats.skipped),
        "train/entropy": stats.entropy,
        "train/ratio_clip_frac": stats.ratio_clip_frac,
        "train/kl_rollout": stats.kl_rollout,
        "train/logprob_abs_diff": stats.logprob_abs_diff,
        "train/num_loss_tokens": float(stats.num_loss_tokens),
        "train/num_tokens": float(stats.num_tokens),
        "train/tokens_per_s": stats.tokens_per_s,
        "train/peak_memory_bytes": float(stats.peak_memory_bytes),
    }


def engine_metrics(engine: EmbeddedEngine) -> Mapping[str, float]:
    return {f"engine/{name}": float(value) for name, value in engine.counters.as_dict().items()}


def save_checkpoint(run: Run) -> None:
    """Weights, optimiser and position; durable before older ones go."""
    checkpoint.save(
        run.dir.path,
        run.backend.state_dict(),
        step=run.position.total,
        counters={"phase": run.position.phase, "step": run.position.step, "total": run.position.total},
        model_config=run.backend.model.config,
        tokenizer=run.tokenizer,
        keep=run.cfg.keep_checkpoints,
    )


def export(run: Run, directory: Path) -> None:
    """The present weights as a Hugging Face directory. Collective."""
    weights = run.backend.weights()
    if mesh.is_main():
        checkpoint.export(directory, weights, model_config=run.backend.model.config, tokenizer=run.tokenizer)
    mesh.barrier()


async def evaluate_phase(run: Run, cfg: TrainConfig, *, name: str, limit: int = 0) -> list[EvalResult]:
    """Held-out success per split: sampled at temperature 1, and greedy on a part. Rows go to results.json."""
    collector = run.collector = run.make_collector(cfg)
    results: list[EvalResult] = []
    for split, tasks in run.eval_tasks.items():
        chosen = tasks[: limit or len(tasks)]
        for mode, temperature, count, samples in (
            ("sampled", 1.0, len(chosen), cfg.eval.samples_per_task),
            ("greedy", 0.0, cfg.eval.greedy_tasks, 1),
        ):
            if run.stopping or not count:
                continue
            own = run.share.of(chosen[:count])
            run.progress.begin(f"{name} on {split}, {mode}", rollouts_per_step=len(own) * samples)
            results.append(
                await evaluate(
                    collector,
                    own,
                    split=split,
                    mode=mode,
                    name=f"eval-{name}-{split}-{mode}",
                    samples_per_task=samples,
                    temperature=temperature,
                    gather=mesh.gather_objects,
                )
            )
            found = results[-1]
            run.metrics.message(
                f"{name} {split} {mode}: {found.success:.3f} ± {found.stderr:.3f} (n={found.num_tasks})"
            )
    if mesh.is_main() and not run.stopping:
        run.dir.add_results([{"phase": name, **result.as_row()} for result in results])
    return results
