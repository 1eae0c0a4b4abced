"""One evaluation from its parts to its files.

RUN/config.yaml           as of training runs; a resumed evaluation must have the same
RUN/rollouts/             journals and Parquet files: every episode, exact
RUN/results.json          one row per split and mode; `swe-rl eval show|compare` read it
RUN/candidates.jsonl      what verifiers score and `swe-rl verify select` chooses from
RUN/predictions/run*.jsonl  SWE-bench's form, one file per run over the tasks
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from swe_rl.agents.environments import GAMES
from swe_rl.cli.build import Parts, make_collector
from swe_rl.cli.eval_policy import OpenPolicy, open_policy
from swe_rl.cli.eval_table import final_table
from swe_rl.cli.eval_view import LiveView
from swe_rl.cli.paths import cache_dir
from swe_rl.config.evaluation import EvaluationConfig
from swe_rl.evaluation.benchmark import EvalResult
from swe_rl.evaluation.candidates import FILE_NAME, Candidate, candidate_of, read_candidates, write_candidates
from swe_rl.evaluation.heldout import evaluate_splits
from swe_rl.evaluation.predictions import write_predictions
from swe_rl.evaluation.sequential_eval import evaluate_sequentially
from swe_rl.rollout.collector import Collector
from swe_rl.rollout.journal import Journal
from swe_rl.rollout.ray_rollouts import open_cluster
from swe_rl.rollout.wiring import sandbox_pool
from swe_rl.tasks import load_tasks
from swe_rl.training.run_dir import RunDir, open_run_dir, write_atomic
from swe_rl.types import Task, Trajectory

PHASE = "policy"  # of the rollout keys: eval-policy-<split>-<mode>


@dataclass(slots=True, kw_only=True)
class Evaluation:
    cfg: EvaluationConfig
    dir: RunDir
    tasks: dict[str, list[Task]]  # by split
    policy: OpenPolicy
    collector: Collector
    journal: Journal
    view: LiveView
    kept: Kept
    interrupted: bool = False

    def drain(self) -> None:
        """Rollouts under way go on to their end, no other one begins."""
        self.interrupted = True
        self.view.message("interrupted: finishing what runs; once more to stop at once")
        self.collector.drain()


class Kept:
    """Candidates of finished rollouts at full temperature, as they come; small, so that thousands fit into memory."""

    def __init__(self) -> None:
        self.candidates: dict[str, Candidate] = {}

    def add(self, task: Task, trajectory: Trajectory) -> None:
        if not trajectory.stop_reason.is_infra and trajectory.group_id.split("/")[0].endswith("-sampled"):
            self.candidates[trajectory.trajectory_id] = candidate_of(trajectory, task)

    def score(self, scores: Mapping[str, float]) -> None:
        """Execution-free scores by trajectory id; what could not be judged is 0, flagged."""
        for name, value in scores.items():
            known = value == value
            changes = {"ef_score": value if known else 0.0, "ef_flag": "" if known else "not judged"}
            self.candidates[name] = replace(self.candidates[name], **changes)  # type: ignore[arg-type]


@asynccontextmanager
async def open_evaluation(cfg: EvaluationConfig, *, config_yaml: str) -> AsyncIterator[Evaluation]:
    """The parts of an evaluation. ConfigError for bad input, before anything is written."""
    tasks = task_sets(cfg)
    train = cfg.as_train()
    async with AsyncExitStack() as stack:
        policy = await stack.enter_async_context(open_policy(cfg, [task for part in tasks.values() for task in part]))
        run_dir = open_run_dir(cfg.run_dir, label="eval", resume=cfg.resume, config_yaml=config_yaml)
        journal = Journal(run_dir.rollouts)
        stack.callback(journal.close)
        view = stack.enter_context(LiveView())
        view.message(f"policy: {policy.source}")
        pool, cluster = sandbox_pool(cfg.sandbox, run_id=run_dir.path.name), None
        if cfg.rollout.backend == "ray":
            cluster = await stack.enter_async_context(open_cluster(train, run_id=run_dir.path.name))
        else:
            await stack.enter_async_context(pool)
        kept = Kept()
        parts = Parts(
            pool=pool,
            cluster=cluster,
            renderer=policy.renderer,
            trees=cache_dir() / "trees",
            progress=_Both(view, kept),
        )
        collector = make_collector(train, parts=parts, policy=policy.policy, journal=journal)
        yield Evaluation(
            cfg=cfg,
            dir=run_dir,
            tasks=tasks,
            policy=policy,
            collector=collector,
            journal=journal,
            view=view,
            kept=kept,
        )


@dataclass(frozen=True, slots=True)
class _Both:
    view: LiveView
    kept: Kept

    def add(self, task: Task, trajectory: Trajectory) -> None:
        self.kept.add(task, trajectory)
        self.view.add(task, trajectory)


def task_sets(cfg: EvaluationConfig) -> dict[str, list[Task]]:
    """Tasks by split. ConfigError when a split has none."""
    game = GAMES.get(cfg.task.source)
    load = game.tasks if game else partial(load_tasks, cfg.task.source)
    seed = cfg.task.heldout_seed
    return {split: load(split=split, num_tasks=count, seed=seed) for split, count in cfg.splits.items()}


async def evaluate_policy(evaluation: Evaluation) -> bool:
    """Plays what is missing, writes the files, prints the table. False when interrupted: nothing is lost then."""
    cfg = evaluation.cfg

    async def interrupted() -> bool:
        return evaluation.interrupted

    if cfg.sequential.verifier:
        results = await _sequential(evaluation)
    else:
        results = await evaluate_splits(
            evaluation.collector,
            evaluation.tasks,
            cfg.eval,
            name=PHASE,
            temperature=cfg.rollout.temperature,
            begin=evaluation.view.begin,
            interrupted=interrupted,
        )
    candidates = keep_scores(evaluation.dir, evaluation.kept.candidates)
    if results is None:
        evaluation.view.message(
            f"go on with: swe-rl eval resume=true run_dir={evaluation.dir.path} and the same settings"
        )
        return False
    evaluation.journal.compact_all()
    evaluation.view.close()
    save(evaluation.dir, results, candidates, name=evaluation.policy.name)
    return True


async def _sequential(evaluation: Evaluation) -> list[EvalResult] | None:
    """Every split with the stopping rule; scores go into the candidates. None when interrupted."""
    from swe_rl.evaluation.verifier_service import open_verifier

    cfg, rule = evaluation.cfg, evaluation.cfg.sequential
    verifier = open_verifier(
        Path(rule.verifier), agent=cfg.agent, policy=evaluation.policy.renderer, max_batch_tokens=rule.batch_tokens
    )
    verifier.check(task for tasks in evaluation.tasks.values() for task in tasks)
    results = []
    for split, tasks in evaluation.tasks.items():
        evaluation.view.begin(f"{split}, sequential", len(tasks) * cfg.eval.samples_per_task)
        found = await evaluate_sequentially(
            evaluation.collector,
            tasks,
            verifier,
            split=split,
            name=f"eval-{PHASE}-{split}-sampled",
            threshold=rule.threshold,
            most=cfg.eval.samples_per_task,
            temperature=cfg.rollout.temperature,
        )
        if found is None:
            return None
        evaluation.kept.score(found.scores)
        evaluation.view.message(
            f"{split}: {found.rollouts:.2f} rollouts and {found.tokens:.0f} sampled tokens per task, "
            f"{100 * found.confident:.1f} % of tasks stopped by a confident score"
        )
        results.append(found.result)
    return results


def keep_scores(run_dir: RunDir, found: Mapping[str, Candidate]) -> list[Candidate]:
    """Writes candidates.jsonl, by trajectory id. What verifiers added before a resume stays, also of rollouts that an
    interrupted resume did not come to: an id names the same rollout for ever."""
    file = run_dir.path / FILE_NAME
    known = read_candidates(file) if file.exists() else []
    scored = {c.trajectory_id: c for c in known if (c.ef_score, c.regression, c.reproduction) != (None, None, None)}
    merged = {**found, **scored}
    candidates = [merged[name] for name in sorted(merged)]
    write_candidates(file, candidates)
    return candidates


def save(run_dir: RunDir, results: Sequence[EvalResult], candidates: Sequence[Candidate], *, name: str) -> None:
    """Writes results.json and the predictions, each whole or not at all, and prints the table. `name`: of the model; in
    results.json it stands where training runs have their phase, so that reports read both."""
    rows = [result.as_report() for result in results]
    named = [{"phase": name, **row} for row in rows]
    write_atomic(run_dir.results_file, json.dumps(named, indent=1).encode())
    write_predictions(run_dir.path / "predictions", candidates, model=name)
    print(final_table(rows))
    print(f"run directory: {run_dir.path}")
