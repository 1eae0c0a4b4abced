"""Where the samples of a phase come from: demonstrations, rollouts that passed, or fresh rollouts with advantages.

A stream yields the samples of one optimiser step after the other, this rank's share of them. When the consumer asks for
the next step, it has trained and published the one before: that is what lets the on-policy stream go on. Under torchrun
all ranks ask together, and a stream ends on all of them at the same step.

A module of its own, on one row with evaluation: it knows rollouts and batches, but neither trainer nor engine.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from swe_rl.algorithms.credit import Credit, Scores, assign_credit, informative
from swe_rl.batching.samples import to_samples
from swe_rl.batching.supervised import num_supervised_steps, supervised_batch
from swe_rl.config import AlgoConfig, PhaseConfig, TrainConfig
from swe_rl.errors import ConfigError, SandboxError
from swe_rl.rewards import turn_rewards
from swe_rl.rollout.buffer import RolloutBuffer
from swe_rl.rollout.collector import Collector
from swe_rl.rollout.pool import measured_success, merged, next_pool
from swe_rl.rollout.seeds import stable_seed
from swe_rl.rollout.selection import select_passed
from swe_rl.rollout.statistics import Losses, rollout_metrics, rollout_sums, total
from swe_rl.types import Task, TrainSample, Trajectory, TrajectoryGroup

log = logging.getLogger(__name__)

ScoreRollouts = Callable[[Sequence[Trajectory]], Mapping[str, Scores]]  # by the trainer, by trajectory id; collective


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSamples:
    step: int  # iteration within the phase, from 0; of supervised phases an optimiser step
    samples: list[TrainSample]  # of this rank
    metrics: dict[str, float] = field(default_factory=dict)  # over all ranks


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    """Which part of the work is this rank's, and how ranks exchange what they made."""

    rank: int = 0
    world_size: int = 1
    gather: Callable[[list[Any]], list[Any]] = list  # concatenation in the order of ranks, on each; collective

    def of(self, items: Sequence[Task]) -> list[Task]:
        return list(items[self.rank :: self.world_size])

    async def all_of(self, trajectories: Sequence[Trajectory], tasks: Sequence[Task]) -> list[Trajectory]:
        """The trajectories of all ranks in the order of `tasks` and indices, however many ranks made them."""
        place = {task.task_id: index for index, task in enumerate(tasks)}
        found = await asyncio.to_thread(self.gather, list(trajectories))
        return sorted(found, key=lambda t: (place[t.task_id], t.rollout_index))


def supervised_stream(
    trajectories: Sequence[Trajectory], phase: PhaseConfig, *, first_step: int, seed: int, share: Share
) -> tuple[int, AsyncGenerator[StepSamples]]:
    """(number of steps, stream) of supervised mini-batches; turns that could not be parsed are masked.

    No trajectory means no step: the phase leaves the weights as they are, and says so.
    """
    samples = [sample for t in trajectories for sample in to_samples(t, 1.0, mask_format_errors=True)]
    if not samples:
        log.warning(
            "phase %s: no attempt passed, so there is nothing to learn from and the weights stay as they are; raise "
            "its num_tasks or samples_per_task, or train the phase before it longer",
            phase.name,
        )
    num_steps = num_supervised_steps(len(samples), batch_size=phase.batch_size, epochs=phase.epochs)

    async def stream() -> AsyncGenerator[StepSamples]:
        for step in range(first_step, num_steps):
            batch = supervised_batch(
                samples,
                step=step,
                batch_size=phase.batch_size,
                seed=seed,
                rank=share.rank,
                world_size=share.world_size,
            )
            yield StepSamples(step=step, samples=batch)

    return num_steps, stream()


async def collect_passed(
    collector: Collector, tasks: Sequence[Task], phase: PhaseConfig, cfg: TrainConfig, *, share: Share
) -> tuple[list[Trajectory], dict[str, float]]:
    """Samples `phase.num_tasks` tasks with the current policy and keeps what passed (rejection fine-tuning): the
    trajectories to imitate, of all ranks, and metrics of the selection."""
    chosen = step_tasks(tasks, step=0, count=phase.num_tasks, seed=cfg.seed, phase=phase.name)
    finished: list[Trajectory] = []
    groups = collector.groups(
        share.of(chosen),
        group_size=phase.samples_per_task,
        phase=phase.name,
        step=0,
        temperature=cfg.rollout.temperature,
        ordered=True,
    )
    async with aclosing(groups):
        async for group in groups:
            finished += group.trajectories
    all_finished = await share.all_of(finished, chosen)
    return select_passed(all_finished, dedupe=phase.dedupe, max_per_task=phase.max_per_task)


async def phase_pool(
    tasks: Sequence[Task], phase: PhaseConfig, directory: Path, *, share: Share
) -> tuple[list[Task], str]:
    """(the tasks of a phase with rollouts, what was left out, "" when nothing was asked for).

    `directory` holds the rollouts of this rank. When fewer tasks than ranks would be left, all stay. Collective.
    """
    if not phase.pool_from:
        return list(tasks), ""
    own = await asyncio.to_thread(measured_success, directory, phase.pool_from)
    measured = merged(await asyncio.to_thread(share.gather, [own]))
    pool = next_pool(tasks, measured, max_success=phase.max_success)
    never = sum(tally.passed == 0 for tally in measured.values())
    what = f"{len(measured)} of {len(tasks)} tasks tried in phase {phase.pool_from}, {never} of them never solved"
    if len(pool) < share.world_size:
        return list(tasks), f"{what}: only {len(pool)} would be left, so all stay"
    return pool, f"{what}: {len(pool)} tasks are left"


async def rollout_stream(
    collector: Collector,
    tasks: Sequence[Task],
    phase: PhaseConfig,
    cfg: TrainConfig,
    *,
    first_step: int,
    share: Share,
    score: ScoreRollouts | None = None,
) -> AsyncGenerator[StepSamples]:
    """On-policy groups with advantages, step by step, at most `rollout.max_staleness` steps ahead of the trainer.

    A pool that is smaller than `tasks_per_step` is taken whole at every step."""
    count = min(phase.tasks_per_step, len(tasks)) if phase.pool_from else phase.tasks_per_step
    per_step = {
        step: share.of(step_tasks(tasks, step=step, count=count, seed=cfg.seed, phase=phase.name))
        for step in range(first_step, phase.steps)
    }

    async def produce(buffer: RolloutBuffer) -> None:
        for step, chosen in per_step.items():
            await collector.expect(chosen, group_size=cfg.rollout.group_size)  # started while the trainer trains
            await buffer.admit(step)
            async with aclosing(_sampled(collector, chosen, phase, cfg, step=step)) as groups:
                async for group in groups:
                    await buffer.put(group)

    losses = Losses(collector)
    capacity = max(1, count) * (1 + cfg.rollout.max_staleness)
    async with RolloutBuffer(max_staleness=cfg.rollout.max_staleness, capacity=capacity, version=first_step) as buffer:
        buffer.start(produce)
        for step, chosen in per_step.items():
            groups = await buffer.take(len(chosen))
            whole = await asyncio.to_thread(share.gather, [len(groups) == len(chosen)])
            if not all(whole):
                return  # drained, here or on another rank: what is finished is in the journal
            more = await refill(collector, groups, tasks, phase, cfg, step=step, count=count, share=share)
            if more is None:
                return
            lost = {**losses.since_last(), **more.counts}
            yield await asyncio.to_thread(
                with_credit,
                more.groups,
                cfg.algo,
                step=step,
                seed=cfg.seed,
                share=share,
                lost=lost,
                score=with_potential(score, cfg),
            )
            await buffer.advance(step + 1)


def step_tasks(tasks: Sequence[Task], *, step: int, count: int, seed: int, phase: str) -> list[Task]:
    """The tasks of one step: consecutive pieces of a shuffled order, reshuffled at each pass; distinct within a step.

    A pure function of its arguments: a resumed run trains on the same tasks. Raises ConfigError if there are too few.
    """
    if count > len(tasks):
        raise ConfigError(f"phase {phase!r} wants {count} tasks at once, there are {len(tasks)}: raise task.num_train")
    per_pass = len(tasks) // count
    epoch, place = divmod(step, per_pass)
    order = list(tasks)
    random.Random(stable_seed("tasks", seed, phase, epoch)).shuffle(order)
    return order[place * count : (place + 1) * count]


@dataclass(frozen=True, slots=True, kw_only=True)
class Refilled:
    groups: list[TrajectoryGroup]  # of this rank: those there were, then those sampled in place of uniform ones
    counts: dict[str, int] = field(default_factory=dict)  # of this rank


async def refill(
    collector: Collector,
    groups: Sequence[TrajectoryGroup],
    tasks: Sequence[Task],
    phase: PhaseConfig,
    cfg: TrainConfig,
    *,
    step: int,
    count: int,
    share: Share,
) -> Refilled | None:
    """Dynamic sampling: rounds of further tasks until `count` groups over all ranks carry a signal, at most
    algo.refill_rounds. Groups without a signal stay for the statistics; credit drops them. None when drained.

    The tasks of a round follow from the arguments and from what was sampled: a resumed run takes the same. Collective.
    """
    found, rounds = list(groups), 0
    taken = {task.task_id for task in step_tasks(tasks, step=step, count=count, seed=cfg.seed, phase=phase.name)}
    unused = [task for task in tasks if task.task_id not in taken]
    random.Random(stable_seed("refill", cfg.seed, phase.name, step)).shuffle(unused)
    while rounds < cfg.algo.refill_rounds and unused:
        good = await asyncio.to_thread(share.gather, [sum(informative(group, cfg.algo) for group in found)])
        missing = count - sum(good)
        if missing <= 0:
            break
        chosen, unused, rounds = share.of(unused[:missing]), unused[missing:], rounds + 1
        sampled = [group async for group in _sampled(collector, chosen, phase, cfg, step=step)]
        found += sampled
        if not all(await asyncio.to_thread(share.gather, [len(sampled) == len(chosen)])):
            return None
    refilled = len(found) - len(groups)
    return Refilled(groups=found, counts={"refilled": refilled, "refill_rounds": rounds if share.rank == 0 else 0})


async def _sampled(
    collector: Collector, tasks: Sequence[Task], phase: PhaseConfig, cfg: TrainConfig, *, step: int
) -> AsyncGenerator[TrajectoryGroup]:
    """Groups of `tasks` in their order: the order of sums in the gradient then does not depend on timing."""
    groups = collector.groups(
        tasks,
        group_size=cfg.rollout.group_size,
        phase=phase.name,
        step=step,
        temperature=cfg.rollout.temperature,
        ordered=True,
        spare=cfg.rollout.spare_rollouts,
    )
    async with aclosing(groups):
        async for group in groups:
            yield group


def with_potential(score: ScoreRollouts | None, cfg: TrainConfig) -> ScoreRollouts | None:
    """`score` with the shaping of reward.potential_weight among what it says; itself when there is none."""
    if score is None or not cfg.reward.potential_weight:
        return score

    def scored(trajectories: Sequence[Trajectory]) -> Mapping[str, Scores]:
        found = dict(score(trajectories))
        for trajectory in trajectories:
            added = turn_rewards(trajectory, 0.0, weight=cfg.reward.potential_weight, gamma=cfg.algo.gamma)
            name = trajectory.trajectory_id
            found[name] = replace(found[name], turn_rewards=added)
        return found

    return scored


def with_credit(
    groups: Sequence[TrajectoryGroup],
    algo: AlgoConfig,
    *,
    step: int,
    seed: int,
    share: Share | None = None,
    lost: Mapping[str, float] | None = None,
    score: ScoreRollouts | None = None,
) -> StepSamples:
    """Filters groups, assigns advantages, turns trajectories into samples. Collective: metrics are over all ranks.

    `lost` counts rollouts lost, attempts retried and the like; `score` is asked where the algorithm needs the trainer
    before it can give credit. Raises SandboxError if no rank has a rollout.
    """
    share = share or Share()
    scores = {} if score is None else score([t for group in groups for t in group.trajectories])
    credits, seen = assign_credit(groups, algo, scores=scores, gather=share.gather)
    sums = total(share.gather([rollout_sums(groups, total([lost or {}, seen]))]))
    if not sums["trajectories"]:
        raise SandboxError("every rollout of this step was lost to infrastructure trouble")
    if algo.permute_advantages:
        credits = _permuted(credits, seed=stable_seed("permute", seed, step), share=share)
    samples = [
        sample
        for credit in credits
        for sample in to_samples(
            credit.trajectory,
            credit.advantages,
            trained=credit.trained,
            value_targets=credit.value_targets if credit.trained else (),
        )
    ]
    return StepSamples(step=step, samples=samples, metrics=rollout_metrics(sums))


def _permuted(credits: Sequence[Credit], *, seed: int, share: Share) -> list[Credit]:
    """The rows of this rank with advantages shuffled over the whole batch, all ranks together. Of algorithms that give
    all turns of a rollout the same advantage."""
    parts = share.gather([[credit.advantages[0] if credit.advantages else 0.0 for credit in credits]])
    shuffled = [advantage for part in parts for advantage in part]
    random.Random(seed).shuffle(shuffled)
    start = sum(len(part) for part in parts[: share.rank])
    own = shuffled[start : start + len(credits)]
    return [
        replace(credit, advantages=[value] * len(credit.advantages)) for credit, value in zip(credits, own, strict=True)
    ]
