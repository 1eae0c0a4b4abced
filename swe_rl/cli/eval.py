"""`swe-rl eval`: a policy on tasks, n times each. Also compares runs, shows one, and imports those of other systems."""

from __future__ import annotations

import asyncio
import importlib
import logging
from collections.abc import Callable, Sequence

from swe_rl.cli.hydra_entry import Composed, hydra_main
from swe_rl.cli.train import on_interrupt
from swe_rl.config.evaluation import EvaluationConfig, validate_evaluation

WORDS = {  # first word -> what else the command does
    "compare": "swe_rl.cli.eval_compare:main",
    "show": "swe_rl.cli.eval_show:main",
    "import": "swe_rl.cli.eval_import:main",
}


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code. Raises ConfigError for bad input."""
    if argv and argv[0] in WORDS:
        module, function = WORDS[argv[0]].split(":")
        other: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
        return other(argv[1:])
    from swe_rl.cli.eval_policy import spelt_out, with_settings_of_run

    return hydra_main(
        spelt_out(with_settings_of_run(argv)),
        command="eval",
        schema=EvaluationConfig,
        config_name="eval",
        run=run_evaluation,
        validate=validate_evaluation,
    )


def run_evaluation(composed: Composed[EvaluationConfig]) -> int:
    """Evaluates as a checked configuration says and returns the exit code."""
    logging.getLogger("swe_rl").setLevel(logging.INFO)
    return asyncio.run(_evaluate(composed))


async def _evaluate(composed: Composed[EvaluationConfig]) -> int:
    from swe_rl.cli.eval_run import evaluate_policy, open_evaluation

    async with open_evaluation(composed.config, config_yaml=composed.yaml) as evaluation:
        on_interrupt(evaluation.drain)
        return 0 if await evaluate_policy(evaluation) else 130
