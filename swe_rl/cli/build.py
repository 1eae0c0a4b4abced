"""Builds what the loop works with from a configuration, and closes it again whatever happens."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from swe_rl.agents.environments import GAMES, GamePlayer
from swe_rl.agents.rendering import Renderer, make_renderer
from swe_rl.cli.engines import contract_of, open_engine
from swe_rl.cli.paths import cache_dir
from swe_rl.cli.preflight import check_backends, check_cache, check_cluster, check_counts
from swe_rl.cli.trainers import open_trainer, reads_weights, set_environment
from swe_rl.cli.verify_reward import load_verifier
from swe_rl.config import PhaseConfig, TrainConfig, expand_rounds, phase_config
from swe_rl.errors import CheckpointError, ConfigError
from swe_rl.evaluation.verifier_reward import VerifiedRunner
from swe_rl.metrics import open_metrics
from swe_rl.models import nano_corpus
from swe_rl.models.adapters import adapt
from swe_rl.models.loading import load_model, model_without_weights
from swe_rl.models.rope import set_rope, wanted_rope
from swe_rl.protocols import Policy, Verifier
from swe_rl.rollout.collector import Collector, Runner
from swe_rl.rollout.demonstrations import (
    Demonstrator,
    DemonstratorPolicy,
    TranslatedDemonstrator,
    collect_demonstrations,
    sessions,
)
from swe_rl.rollout.journal import Journal
from swe_rl.rollout.progress import RolloutProgress
from swe_rl.rollout.ray_node import RunnerSetup
from swe_rl.rollout.ray_rollouts import RayCluster, RemoteRunner, open_cluster
from swe_rl.rollout.runner import RolloutRunner
from swe_rl.rollout.wiring import no_patch, rollout_parts, sandbox_pool, ungraded
from swe_rl.sample_streams import Share, step_tasks
from swe_rl.sandbox import SandboxPool
from swe_rl.tasks import load_tasks
from swe_rl.tasks.minirepo.demonstrator import Demonstrator as MinirepoDemonstrator
from swe_rl.tasks.oracle import OracleDemonstrator
from swe_rl.train_loop import Position, Run
from swe_rl.training import checkpoint, mesh
from swe_rl.training.checkpoint_writer import CheckpointWriter
from swe_rl.training.run_dir import RunDir, check_ranks_agree, open_run_dir
from swe_rl.training.waiting import open_attendance
from swe_rl.training.weight_sync import WeightPublisher
from swe_rl.types import Task, Trajectory


@asynccontextmanager
async def open_run(cfg: TrainConfig, *, label: str, config_yaml: str) -> AsyncIterator[Run]:
    """The parts of a run, under torchrun those of this rank. ConfigError for bad input, before anything is written."""
    set_environment(cfg)
    check_backends(cfg)
    cfg = replace(cfg, phases=expand_rounds(cfg.phases))
    if cfg.threads:
        torch.set_num_threads(cfg.threads)
    device = mesh.init_distributed()
    async with AsyncExitStack() as stack:
        stack.callback(mesh.shutdown)
        check_cluster(cfg.cluster, world_size=mesh.world_size())
        check_ranks_agree(config_yaml)
        gather, leave = open_attendance()
        stack.callback(leave)
        share = Share(rank=mesh.rank(), world_size=mesh.world_size(), gather=gather)
        train_tasks, eval_tasks = load_task_sets(cfg)
        check_counts(cfg, num_tasks=len(train_tasks), world_size=share.world_size)
        model, tokenizer = load_policy(cfg)
        renderer = make_renderer(tokenizer, thinking=cfg.agent.thinking, observations=cfg.agent.observations)
        check_cache(cfg, model.config, device=device)
        verifier = load_verifier(cfg, renderer, [*train_tasks, *(t for tasks in eval_tasks.values() for t in tasks)])
        if not reads_weights(cfg):
            model.to(device)
        contract = partial(contract_of, model=model, tokenizer=tokenizer, stop_ids=renderer.stop_ids)
        engine = await stack.enter_async_context(open_engine(cfg, model, contract(cfg)))
        backend = open_trainer(cfg, model, device=device)
        run_dir = name_run_dir(cfg, label=label, config_yaml=config_yaml)
        journal = Journal(run_dir.rollouts_of(share.rank, world_size=share.world_size))
        stack.callback(journal.close)
        checkpoints = stack.enter_context(closing(CheckpointWriter(behind=cfg.async_checkpoints)))
        metrics = stack.enter_context(open_metrics(run_dir.path, rank=share.rank))
        metrics.message(
            f"chat rendering: {type(renderer).__name__}, thinking {cfg.agent.thinking}, "
            f"observations as {cfg.agent.observations}"
        )
        if (rope := wanted_rope(model, cfg.model)) is not None:
            metrics.message(f"rotary embedding: {rope.describe()}")
        progress = RolloutProgress(metrics)
        pool, cluster = sandbox_pool(cfg.sandbox, run_id=run_dir.path.name), None
        if cfg.rollout.backend == "ray":
            cluster = await stack.enter_async_context(open_cluster(cfg, run_id=run_dir.path.name))
            metrics.message(f"rollouts on Ray: {len(cluster.nodes)} nodes, {cluster.places} at a time")
        else:
            await stack.enter_async_context(pool)
        parts = Parts(
            pool=pool,
            cluster=cluster,
            renderer=renderer,
            trees=cache_dir() / "trees",
            progress=progress,
            verifier=verifier,
        )
        run = Run(
            cfg=cfg,
            dir=run_dir,
            cache_dir=cache_dir(),
            backend=backend,
            engine=engine,
            publisher=WeightPublisher(
                backend,
                [engine],
                mode=cfg.engine.weight_sync,
                dtype=cfg.engine.dtype,
                in_flight=cfg.engine.in_flight,
            ),
            contract=contract,
            tokenizer=tokenizer,
            journal=journal,
            checkpoints=checkpoints,
            train_tasks=train_tasks,
            eval_tasks=eval_tasks,
            make_collector=partial(make_collector, parts=parts, policy=engine, journal=journal),
            demonstrate=partial(demonstrate, parts=parts),
            metrics=metrics,
            progress=progress,
            share=share,
        )
        restore(run)
        yield run


class Listener(Protocol):
    """Hears of every finished rollout."""

    def add(self, task: Task, trajectory: Trajectory) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    pool: SandboxPool  # of this process; without use where a cluster has its own
    cluster: RayCluster | None
    renderer: Renderer
    trees: Path  # materialised task trees, content-addressed
    progress: Listener
    verifier: Verifier | None = None  # adds its score to the reward


def load_task_sets(cfg: TrainConfig) -> tuple[list[Task], dict[str, list[Task]]]:
    """(training tasks, held-out tasks per split). ConfigError when a split is empty."""
    game = GAMES.get(cfg.task.source)
    load = game.tasks if game else partial(load_tasks, cfg.task.source)
    train = load(split="train", num_tasks=cfg.task.num_train, seed=cfg.task.seed)
    held = {
        split: load(split=split, num_tasks=count, seed=cfg.task.heldout_seed)
        for split, count in cfg.eval.splits.items()
    }
    return train, held


def load_policy(cfg: TrainConfig) -> tuple[Any, Any]:
    """(transformers model in fp32, tokenizer), with the weights of `init_weights` where given; without weights where
    the trainer reads them itself."""
    game = GAMES.get(cfg.task.source)
    if reads_weights(cfg):
        model, tokenizer = model_without_weights(cfg.model.name)
    else:
        model, tokenizer = load_model(
            cfg.model,
            cache_dir=cache_dir() / "models",
            texts=game.texts() if game else nano_corpus.texts(cfg.agent.toolset),
            whole_words=() if game else nano_corpus.whole_words(cfg.agent.toolset),
        )
    for phase in cfg.phases:  # not hours later
        wanted_rope(model, phase_config(cfg, phase).model)
    set_rope(model, cfg.model)
    if cfg.init_weights:
        load_into(model, checkpoint.load_weights(cfg.init_weights), source=cfg.init_weights)
    if cfg.model.lora_rank:
        adapt(model, rank=cfg.model.lora_rank, alpha=cfg.model.lora_alpha)
    return model, tokenizer


def load_into(model: torch.nn.Module, weights: Mapping[str, torch.Tensor], *, source: str) -> None:
    """Copies `weights` into the parameters of the same names. ConfigError when they are of another model."""
    own = dict(model.named_parameters())
    wrong = sorted(set(own) ^ set(weights)) or sorted(name for name in own if own[name].shape != weights[name].shape)
    if wrong:
        raise ConfigError(f"init_weights={source} is of another model than model.name: {wrong[0]} does not fit")
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])


def name_run_dir(cfg: TrainConfig, *, label: str, config_yaml: str) -> RunDir:
    """Rank 0 makes or reopens the directory; the others learn its name. Its ConfigError is raised on every rank."""
    path, problem = "", ""
    if mesh.is_main():
        try:
            found = open_run_dir(
                cfg.run_dir, label=label, resume=cfg.resume, config_yaml=config_yaml, world_size=mesh.world_size()
            )
            path = str(found.path)
        except ConfigError as err:
            problem = str(err)
    path, problem = mesh.broadcast_object((path, problem))
    if problem:
        raise ConfigError(problem)
    return RunDir(Path(path))


def restore(run: Run) -> None:
    """Continues from the latest checkpoint of the directory, if resuming and there is one.

    A run killed before its first checkpoint has none: it starts over, with the rollouts that are in the journal.
    Raises CheckpointError when the checkpoints of a run that was further are gone.
    """
    path = mesh.broadcast_object(checkpoint.latest(run.dir.path) if run.cfg.resume else None)
    if path is None:
        lost = [phase.name for phase in run.cfg.phases[1:] if run.cfg.resume and run.dir.has_rollouts(phase.name)]
        if lost:
            raise CheckpointError(f"{run.dir.path} has rollouts of phase {lost[0]}, but no checkpoint: it was removed")
        return
    saved = checkpoint.load(path)
    counters = dict(saved.counters)
    run.monitor.load_state(counters.pop("monitor", {}))
    run.position = Position(**counters)
    run.pending_state = saved.backend
    run.metrics.message(f"resuming from {path.name}: phase {run.position.phase + 1}, step {run.position.step}")


def make_collector(
    cfg: TrainConfig, *, parts: Parts, policy: Policy, journal: Journal | None, quiet: bool = False, **changes: Any
) -> Collector:
    """A collector whose limits are those of `cfg` (a phase may have its own). `quiet`: not for the progress shown."""
    made = rollout_parts(cfg, pool=parts.pool, renderer=parts.renderer, trees=parts.trees)
    runner: Runner | None = None
    changed = replace(made, **changes)
    if parts.cluster is not None:
        setup = partial(RunnerSetup, cfg=cfg, renderer=parts.renderer, trees=str(parts.trees), changes=changes)
        runner = RemoteRunner(parts.cluster, policy, lambda channel: setup(channel=channel))
    if parts.verifier is not None:
        inner = runner or RolloutRunner(policy, parts=changed, run_seed=cfg.seed)
        runner = VerifiedRunner(inner, parts.verifier, weight=cfg.reward.verifier_weight)
    return Collector(
        policy,
        parts=changed,
        runner=runner,
        concurrency=cfg.sandbox.concurrency if parts.cluster is None else parts.cluster.places,
        seed=cfg.seed,
        journal=journal,
        on_rollout=None if quiet else parts.progress.add,
    )


async def demonstrate(run: Run, phase: PhaseConfig, cfg: TrainConfig, *, parts: Parts) -> list[Trajectory]:
    """Plays the demonstrations of a phase in real sandboxes, ungraded: imperfect ones are the point. Of all ranks, in
    the order of tasks; after an interrupt only those that had begun."""
    tasks = step_tasks(run.train_tasks, step=0, count=phase.num_tasks, seed=cfg.seed, phase=phase.name)
    chosen = run.share.of(tasks)
    scripts = {
        session: partial(_demonstrator, task, phase, seed=cfg.seed * 1_000_003 + attempt, toolset=cfg.agent.toolset)
        for session, task, attempt in sessions(chosen, samples_per_task=phase.samples_per_task, phase=phase.name)
    }
    made = rollout_parts(cfg, pool=parts.pool, renderer=parts.renderer, trees=parts.trees)
    policy = DemonstratorPolicy(scripts, renderer=parts.renderer, action_format=made.action_format)
    collector = make_collector(cfg, parts=parts, policy=policy, journal=None, extract_patch=no_patch, grade=ungraded)
    own = await collect_demonstrations(
        run.use(collector), chosen, samples_per_task=phase.samples_per_task, phase=phase.name
    )
    return await run.share.all_of(own, tasks)


def _demonstrator(task: Task, phase: PhaseConfig, *, seed: int, toolset: str) -> Demonstrator:
    if task.source in GAMES:
        return GamePlayer(GAMES[task.source], task, seed=seed)
    if task.source != "minirepo":
        return OracleDemonstrator(task, toolset=toolset)
    player = MinirepoDemonstrator(task, seed, p_right=phase.p_right, p_give_up=phase.p_give_up)
    return player if toolset == "minimal" else TranslatedDemonstrator(player, task, toolset=toolset)
