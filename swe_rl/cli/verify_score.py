"""`swe-rl verify score RUN`: fills the candidates of a run with what verifiers say about them.

--verifier DIR    the execution-free score, by a directory that `swe-rl verify train` wrote; with --server, by weights
                  that a server has, of which the directory holds tokenizer and verifier.json
--regression      existing tests that pass without any patch, run with each candidate
--tests FILE      written tests, run with each candidate
"""

from __future__ import annotations

import asyncio
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swe_rl.cli.arguments import ArgumentParser
from swe_rl.errors import ConfigError

if TYPE_CHECKING:
    from swe_rl.cli.verify_stored import StoredRun
    from swe_rl.evaluation.candidates import Candidate
    from swe_rl.evaluation.execution_tests import WrittenTest
    from swe_rl.evaluation.verifier_service import TrainedVerifier

EXAMPLE = "swe-rl verify score runs/EVAL --verifier runs/VERIFIER/phases/verifier --regression"


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code. Raises ConfigError for bad input."""
    arguments = _parser().parse_args(argv)
    if not (arguments.verifier or arguments.regression or arguments.tests):
        raise ConfigError("nothing to score with: give --verifier DIR, --regression or --tests FILE")
    if bool(arguments.server) != bool(arguments.model) or (arguments.server and not arguments.verifier):
        raise ConfigError(
            "--server URL and --model NAME go together, with --verifier DIR for tokenizer and verifier.json"
        )
    for name in ("max_tokens", "limit", "concurrency"):
        if not getattr(arguments, name) > 0:
            raise ConfigError(f"--{name.replace('_', '-')} must be positive, got {getattr(arguments, name)}")
    from swe_rl.cli.verify_stored import open_stored
    from swe_rl.evaluation.candidates import read_candidates

    stored, candidates = open_stored(arguments.run), read_candidates(arguments.run)
    if arguments.verifier:
        candidates = _execution_free(stored, candidates, arguments)
    if arguments.regression or arguments.tests:
        asyncio.run(_execution_based(stored, candidates, arguments))
    return 0


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="swe-rl verify score",
        description="Fills the candidates of a run (candidates.jsonl) with the opinion of verifiers.",
        example=EXAMPLE,
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run directory of `swe-rl eval` or `verify`")
    parser.add_argument("--verifier", type=Path, metavar="DIR", help="weights that `swe-rl verify train` wrote")
    parser.add_argument("--server", default="", metavar="URL", help="an OpenAI-compatible server that has the weights")
    parser.add_argument("--model", default="", help="with --server: the name that it serves the verifier under")
    parser.add_argument("--regression", action="store_true", help="run the existing tests with each candidate")
    parser.add_argument("--tests", type=Path, metavar="FILE", help="written tests, or the run directory with them")
    parser.add_argument("--max-tokens", type=int, default=16384, help="tokens of one batch (default 16384)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of the verifier")
    parser.add_argument("--limit", type=float, default=60.0, metavar="SECONDS", help="of all tests on one candidate")
    parser.add_argument("--concurrency", type=int, default=8, help="sandboxes at a time (default 8)")
    return parser


def _execution_free(stored: StoredRun, candidates: Sequence[Candidate], arguments: Namespace) -> list[Candidate]:
    from swe_rl.cli.verify_quality import write_quality
    from swe_rl.evaluation.candidates import update_candidates

    verifier = _verifier(stored, arguments)
    trajectories = stored.trajectories(ids=[item.trajectory_id for item in candidates])
    tasks = stored.tasks(trajectories)
    verifier.check(tasks.values())
    scores = verifier.judge_all(trajectories, tasks)
    changes = {name: {"ef_score": found.p_yes, "ef_flag": found.flag} for name, found in scores.items()}
    updated = update_candidates(arguments.run, changes)
    print(f"scored {len(scores)} candidates, {sum(bool(found.flag) for found in scores.values())} flagged")
    if any(item.passed is not None for item in updated):
        print(write_quality(arguments.run, updated))
    return updated


def _verifier(stored: StoredRun, arguments: Namespace) -> TrainedVerifier:
    from swe_rl.config.evaluation import ServerConfig
    from swe_rl.evaluation.verifier_service import open_served, open_verifier

    if arguments.server:
        return open_served(
            arguments.verifier,
            url=arguments.server,
            cfg=ServerConfig(model=arguments.model, api="completions"),
            agent=stored.agent,
            policy=stored.renderer(),
            concurrency=arguments.concurrency,
        )
    return open_verifier(
        arguments.verifier,
        agent=stored.agent,
        policy=stored.renderer(),
        max_batch_tokens=arguments.max_tokens,
        dtype=arguments.dtype,
    )


async def _execution_based(stored: StoredRun, candidates: Sequence[Candidate], arguments: Namespace) -> None:
    from swe_rl.cli.paths import cache_dir
    from swe_rl.evaluation.candidates import update_candidates
    from swe_rl.evaluation.execution_scores import bench_of, execute
    from swe_rl.evaluation.execution_tests import read_tests, write_tests
    from swe_rl.rollout.wiring import sandbox_pool

    trajectories = stored.trajectories(ids=[item.trajectory_id for item in candidates])
    tasks = stored.tasks(trajectories)
    tests: list[WrittenTest] = read_tests(arguments.tests) if arguments.tests else []
    sandbox: Any = replace(stored.sandbox, concurrency=arguments.concurrency)
    async with sandbox_pool(sandbox) as pool:
        bench = bench_of(sandbox, pool=pool, trees=cache_dir() / "trees", limit_s=arguments.limit)
        found = await execute(
            bench, trajectories, tasks, tests, regression=arguments.regression, concurrency=arguments.concurrency
        )
    update_candidates(arguments.run, found.changes)
    if arguments.tests:
        write_tests(arguments.run / "tests.jsonl", found.tests)
    print(found.summary({item.trajectory_id: item.passed for item in candidates}))
