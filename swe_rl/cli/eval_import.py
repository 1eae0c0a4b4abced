"""`swe-rl eval import FILE...`: episodes of other systems, graded by our hidden tests, as an evaluation of ours."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from swe_rl.agents.rendering import make_renderer
from swe_rl.cli.hydra_entry import compose_all
from swe_rl.config import ModelConfig
from swe_rl.config.evaluation import EvaluationConfig, validate_evaluation
from swe_rl.errors import ConfigError, SandboxError, SandboxUnavailable
from swe_rl.evaluation.attempt import Attempt, attempt_of
from swe_rl.evaluation.benchmark import EvalResult
from swe_rl.evaluation.candidates import candidate_of
from swe_rl.evaluation.foreign import Foreign, read_foreign
from swe_rl.protocols import RewardFn
from swe_rl.rollout.journal import Journal, RolloutKey
from swe_rl.types import StopReason, Task, Trajectory

HELP = """\
usage: swe-rl eval import FILE... [key=value ...]

Grades the patches of mini-swe-agent trajectories (*.traj.json), or of SWE-bench predictions (.jsonl, .json), by the
hidden tests of our tasks, and writes a run directory like that of an evaluation: table, candidates, predictions.
A folder stands for the *.traj.json files below it. Several episodes of one task are several samples.

example:
  swe-rl eval import runs/other/*.traj.json task=dataset task.source=DIR run_dir=runs/other"""
PHASE = "imported"


@dataclass(frozen=True, slots=True)
class Job:
    key: RolloutKey
    task: Task
    episode: Foreign


def main(argv: Sequence[str]) -> int:
    """Entry point; returns the exit code. Raises ConfigError for bad input."""
    from swe_rl.cli.eval_policy import spelt_out

    if not argv or "-h" in argv or "--help" in argv:
        print(HELP)
        return 0
    files = [Path(word) for word in argv if "=" not in word]
    composed = compose_all(EvaluationConfig, "eval", spelt_out([word for word in argv if "=" in word]))
    cfg = composed.config
    validate_evaluation(cfg)
    if cfg.policy or cfg.model.name != ModelConfig().name:
        raise ConfigError("policy and model.name do nothing for swe-rl eval import, which samples nothing: remove them")
    if not files:
        raise ConfigError("swe-rl eval import needs a *.traj.json file, a folder or a file of predictions")
    episodes = [episode for file in files for episode in read_foreign(file)]
    return asyncio.run(_import(cfg, composed.yaml, episodes))


def plan(tasks: dict[str, list[Task]], episodes: Sequence[Foreign]) -> tuple[dict[str, list[Job]], int]:
    """(jobs by split, episodes of tasks that are not there). ConfigError when none is."""
    by_id = {task.task_id: (split, task) for split, found in tasks.items() for task in found}
    jobs: dict[str, list[Job]] = {}
    counts: dict[str, int] = {}
    unknown = 0
    for episode in episodes:
        if episode.task_id not in by_id:
            unknown += 1
            continue
        split, task = by_id[episode.task_id]
        index = counts[episode.task_id] = counts.get(episode.task_id, -1) + 1
        key = RolloutKey(f"eval-{PHASE}-{split}-sampled", 0, task.task_id, index)
        jobs.setdefault(split, []).append(Job(key, task, episode))
    if not jobs:
        raise ConfigError(f"none of {len(episodes)} episodes is of a task in the source: {episodes[0].task_id} is not")
    return jobs, unknown


async def _import(cfg: EvaluationConfig, config_yaml: str, episodes: Sequence[Foreign]) -> int:
    from swe_rl.cli.eval_policy import built_in_tokenizer
    from swe_rl.cli.eval_run import keep_scores, save, task_sets
    from swe_rl.cli.paths import cache_dir
    from swe_rl.rollout.wiring import rollout_parts, sandbox_pool
    from swe_rl.training.run_dir import open_run_dir

    jobs, unknown = plan(task_sets(cfg), episodes)
    if unknown:
        print(f"{unknown} of {len(episodes)} episodes are of tasks that are not in the source: left out")
    renderer = make_renderer(built_in_tokenizer(cfg.as_train()))
    run_dir = open_run_dir(cfg.run_dir, label="import", resume=cfg.resume, config_yaml=config_yaml)
    journal = Journal(run_dir.rollouts)
    results, candidates = [], []
    try:
        async with sandbox_pool(cfg.sandbox, run_id=run_dir.path.name) as pool:
            parts = rollout_parts(cfg.as_train(), pool=pool, renderer=renderer, trees=cache_dir() / "trees")
            places = asyncio.Semaphore(cfg.sandbox.concurrency)

            async def grade(job: Job) -> Trajectory:
                async with places:
                    return await graded(job, job.episode.trajectory(job.key, renderer), parts.grade, journal)

            for split, found in jobs.items():
                async with asyncio.TaskGroup() as group:  # a failure ends the others before the pool closes
                    running = [group.create_task(grade(job)) for job in found]
                done = [task.result() for task in running]
                results.append(_result(split, found, done))
                candidates += [
                    candidate_of(t, job.task) for job, t in zip(found, done, strict=True) if not t.stop_reason.is_infra
                ]
        journal.compact_all()
    finally:
        journal.close()
    candidates = keep_scores(run_dir, {item.trajectory_id: item for item in candidates})
    names = sorted({episode.model for episode in episodes} - {""})
    save(run_dir, results, candidates, name=cfg.name or "+".join(names) or "imported")
    return 0


async def graded(job: Job, trajectory: Trajectory, grade: RewardFn, journal: Journal) -> Trajectory:
    """The trajectory with its reward, from the journal where it is there; INFRA_ERROR when no verdict was possible."""
    if (known := journal.get(job.key)) is not None:
        return known
    if trajectory.patch is not None:
        try:
            trajectory = replace(trajectory, reward=await grade(job.task, trajectory.patch))
        except SandboxUnavailable:
            raise
        except SandboxError as err:
            return replace(trajectory, stop_reason=StopReason.INFRA_ERROR, detail=f"grading: {err!r}")
    await asyncio.to_thread(journal.append, job.key, trajectory)
    return trajectory


def _result(split: str, jobs: Sequence[Job], done: Sequence[Trajectory]) -> EvalResult:
    attempts: list[Attempt] = []
    for job, trajectory in zip(jobs, done, strict=True):
        if not trajectory.stop_reason.is_infra:
            attempts.append(attempt_of(trajectory, job.task, run=job.key.rollout_index))
    return EvalResult(split=split, mode="sampled", attempts=attempts, num_lost=len(done) - len(attempts))
