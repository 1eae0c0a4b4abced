"""`swe-rl verify pipeline`: test-time scaling from a policy to a table, in one command that can be resumed.

Attempts at training tasks -> a verifier -> attempts at held-out tasks with its scores -> tests written by a test agent
-> existing and written tests run on every attempt -> selection. Files: those of `swe-rl verify train`, and

RUN/phases/test_agent/  the policy after imitating test-writing demonstrations
RUN/tests.jsonl         every test that was written, with its state
RUN/selection/          tables and curves of `swe-rl verify select`
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_rl.cli.hydra_entry import Composed, hydra_main
from swe_rl.cli.verify_train import Session, judge_heldout, open_session, sample, train_verifier, validate_judged
from swe_rl.config import PhaseConfig, TrainConfig
from swe_rl.errors import ConfigError

if TYPE_CHECKING:
    from swe_rl.evaluation.execution_bench import ExecutionBench
    from swe_rl.evaluation.execution_tests import WrittenTest
    from swe_rl.types import StepStats, Trajectory


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code."""
    return hydra_main(
        argv,
        command="verify pipeline",
        schema=TrainConfig,
        config_name="train",
        run=lambda composed: asyncio.run(_main(composed)),
        validate=validate_pipeline,
    )


def validate_pipeline(cfg: TrainConfig) -> None:
    """As for a verifier, and: there is something to select from, and a demonstrator where one is asked for."""
    validate_judged(cfg)
    if int(os.environ.get("WORLD_SIZE") or 1) > 1:
        raise ConfigError("swe-rl verify pipeline is one process: start it without torchrun (verify train may have it)")
    if not cfg.eval.splits:
        raise ConfigError("eval.splits is empty, so there is nothing to select from: add eval.splits.heldout=128")
    if cfg.eval.samples_per_task < 2:
        raise ConfigError("eval.samples_per_task=1 leaves nothing to choose: set it to 16, for example")
    if cfg.verifier.test_tasks and cfg.task.source != "minirepo":
        raise ConfigError(
            f"verifier.test_tasks={cfg.verifier.test_tasks} does nothing for task.source={cfg.task.source}, only "
            "minirepo has test-writing demonstrations: set it to 0"
        )


async def _main(composed: Composed[TrainConfig]) -> int:
    from swe_rl.cli.verify_select import main as select

    async with open_session(composed) as session:
        directory = await train_verifier(session)
        await judge_heldout(session, directory)
        await run_tests(session)
    return select([str(session.run.dir.path)])


async def run_tests(session: Session) -> None:
    """Has tests written where the configuration asks for them, runs all tests on all attempts, fills the candidates."""
    from swe_rl.cli.paths import cache_dir
    from swe_rl.evaluation.candidates import read_candidates, update_candidates
    from swe_rl.evaluation.execution_scores import bench_of, execute
    from swe_rl.evaluation.execution_tests import FILE_NAME, write_tests
    from swe_rl.rollout.wiring import sandbox_pool

    cfg, run = session.cfg, session.run
    async with sandbox_pool(cfg.sandbox, run_id=run.dir.path.name) as pool:
        bench = bench_of(cfg.sandbox, pool=pool, trees=cache_dir() / "trees", limit_s=cfg.verifier.execution_s)
        tests = await written_tests(session, bench) if cfg.verifier.tests_per_task else []
        session.say(f"running tests on {len(session.attempts)} attempts")
        found = await execute(
            bench,
            session.attempts,
            session.heldout,
            tests,
            regression=True,
            concurrency=cfg.sandbox.concurrency,
        )
    if cfg.verifier.tests_per_task:
        write_tests(run.dir.path / FILE_NAME, found.tests)
    update_candidates(run.dir.path, found.changes)
    session.say(found.summary({item.trajectory_id: item.passed for item in read_candidates(run.dir.path)}))


async def written_tests(session: Session, bench: ExecutionBench) -> list[WrittenTest]:
    """The tests of the test agent for every held-out task, each with its state on the unpatched program."""
    from swe_rl.cli.verify_stored import TEST_AGENT
    from swe_rl.evaluation.execution_agent import open_test_environment

    cfg = session.cfg
    if cfg.verifier.test_tasks:
        await train_test_agent(session)
    tasks = [task for part in session.run.eval_tasks.values() for task in part]
    prints = any(task.test_runner == "script" for task in tasks)
    attempts = await sample(
        session,
        tasks,
        cfg.verifier.tests_per_task,
        phase=TEST_AGENT,
        temperature=cfg.verifier.test_temperature,
        make_environment=partial(open_test_environment, cfg=cfg.agent, prints=prints),
        grade=bench.grade_tests,
    )
    places = asyncio.Semaphore(cfg.sandbox.concurrency)

    async def examine(attempt: Trajectory) -> list[WrittenTest]:
        async with places:
            task = session.heldout[attempt.task_id]
            return await bench.written_tests(task, attempt.patch or b"", name=attempt.trajectory_id)

    async with asyncio.TaskGroup() as group:
        found = [group.create_task(examine(attempt)) for attempt in attempts]
    return [test for task in found for test in task.result()]


async def train_test_agent(session: Session) -> Path:
    """The policy imitates test-writing demonstrations; the engine then samples with its weights."""
    from swe_rl.cli.verify_stored import TEST_AGENT
    from swe_rl.training import checkpoint

    run = session.run
    directory = run.dir.phase_weights(TEST_AGENT)
    if (directory / "model.safetensors").is_file():
        version = run.backend.policy_version + 1
        run.backend.load_weights(checkpoint.load_weights(directory), policy_version=version)
    else:
        demonstrations = await demonstrate_tests(session)
        await asyncio.to_thread(_imitate, session, demonstrations)
        checkpoint.export(
            directory, run.backend.weights(), model_config=run.backend.model.config, tokenizer=run.tokenizer
        )
    await run.publisher.publish()
    return directory


async def demonstrate_tests(session: Session) -> list[Trajectory]:
    """Test-writing demonstrations at training tasks, played in real sandboxes, ungraded."""
    from swe_rl.agents.formats import FORMATS
    from swe_rl.agents.toolsets import make_toolset
    from swe_rl.cli.verify_stored import TEST_AGENT
    from swe_rl.cli.verify_train import renderer_of
    from swe_rl.evaluation.execution_agent import TestDemonstrator, open_test_environment
    from swe_rl.rollout.demonstrations import DemonstratorPolicy, collect_demonstrations, sessions
    from swe_rl.rollout.wiring import no_patch, ungraded
    from swe_rl.sample_streams import step_tasks

    cfg, run = session.cfg, session.run
    phase = f"{TEST_AGENT}-demonstrations"
    chosen = step_tasks(run.train_tasks, step=0, count=cfg.verifier.test_tasks, seed=cfg.seed, phase=phase)
    scripts = {
        name: partial(
            TestDemonstrator,
            task,
            cfg.seed * 1_000_003 + attempt,
            num_asserts=cfg.verifier.test_asserts,
            toolset=cfg.agent.toolset,
        )
        for name, task, attempt in sessions(chosen, samples_per_task=1, phase=phase)
    }
    action_format = FORMATS[cfg.agent.action_format].bind(make_toolset(cfg.agent).signatures)
    policy = DemonstratorPolicy(scripts, renderer=renderer_of(session), action_format=action_format)
    changes: dict[str, Any] = {
        "make_environment": partial(open_test_environment, cfg=cfg.agent, prints=False),
        "extract_patch": no_patch,
        "grade": ungraded,
    }
    collector = run.use(run.make_collector(cfg, policy=policy, journal=None, **changes))
    run.progress.begin(phase, rollouts_per_step=len(chosen))
    found = await collect_demonstrations(collector, chosen, samples_per_task=1, phase=phase)
    if run.stopping:
        raise KeyboardInterrupt
    return found


def _imitate(session: Session, demonstrations: Sequence[Trajectory]) -> None:
    """Trains the policy's own backend, with the settings of the verifier's phase."""
    import torch

    from swe_rl.batching.samples import to_samples
    from swe_rl.cli.verify_stored import TEST_AGENT
    from swe_rl.config import phase_config
    from swe_rl.evaluation.verifier_training import train_supervised
    from swe_rl.metrics import Progress

    run = session.run
    phase = PhaseConfig(
        name=TEST_AGENT,
        data="demonstrations",
        epochs=session.cfg.verifier.test_epochs,
        batch_size=session.phase.batch_size,
        overrides=session.phase.overrides,
    )
    cfg = phase_config(session.cfg, phase)
    run.backend.new_phase(cfg.trainer, algo=cfg.algo, objective="cross_entropy", dtype=getattr(torch, cfg.model.dtype))
    samples = [sample for t in demonstrations for sample in to_samples(t, 1.0, mask_format_errors=True)]

    def on_step(step: int, steps: int, stats: StepStats) -> None:
        run.metrics.log({"train/loss": stats.loss}, phase=TEST_AGENT, step=step)
        run.metrics.progress(Progress(phase=TEST_AGENT, step=step, num_steps=steps))
        if run.stopping:
            raise KeyboardInterrupt

    train_supervised(run.backend, samples, phase, cfg, on_step=on_step)
