"""`swe-rl train`: composes and checks the configuration, builds the parts, runs the loop, closes everything."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from swe_rl.cli.hydra_entry import Composed, hydra_main
from swe_rl.config import TrainConfig, validate

if TYPE_CHECKING:
    from swe_rl.train_loop import Run

INTERRUPTS = (signal.SIGINT, signal.SIGTERM)


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code."""
    return hydra_main(
        argv, command="train", schema=TrainConfig, config_name="train", run=run_training, validate=validate
    )


def run_training(composed: Composed[TrainConfig]) -> int:
    """Runs the phases of a checked configuration and returns the exit code."""
    # Packed rows have a new length in every step; oneDNN keeps a kernel with its scratch memory for each of the last
    # 1,024 shapes unless told otherwise: gigabytes within an hour. Read when torch first uses it.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
    logging.getLogger("swe_rl").setLevel(logging.WARNING if os.environ.get("RANK", "0") != "0" else logging.INFO)
    return asyncio.run(_train(composed))


async def _train(composed: Composed[TrainConfig]) -> int:
    from swe_rl.cli.build import open_run
    from swe_rl.cli.table import results_table
    from swe_rl.train_loop import train
    from swe_rl.training import mesh

    async with open_run(composed.config, label=composed.label, config_yaml=composed.yaml) as run:
        install_interrupts(run)
        finished = await train(run)
        if mesh.is_main():
            run.metrics.message(results_table(run.dir.results()))
            run.metrics.message(f"run directory: {run.dir.path}")
        return 0 if finished else 130


def install_interrupts(run: Run) -> None:
    """First SIGINT or SIGTERM: the rollouts and the step under way, and a checkpoint. Second: out at once."""

    def drain() -> None:
        run.metrics.message("interrupted: finishing what runs, then a checkpoint; once more to stop at once")
        run.drain()

    on_interrupt(drain)


def on_interrupt(drain: Callable[[], None]) -> None:
    """First SIGINT or SIGTERM: drain. Second: out at once; sandboxes die with this process by themselves.

    Handlers of the process, not of the event loop: the loop takes its own away when it closes, and an interrupt
    between that and the end of the process would end a finished run with a traceback or by the signal.
    """
    loop = asyncio.get_running_loop()
    seen = 0

    def interrupt(_number: int, _frame: object) -> None:
        nonlocal seen
        seen += 1
        if seen > 1:
            os._exit(130)
        if not loop.is_closed():
            loop.call_soon_threadsafe(drain)

    for number in INTERRUPTS:
        signal.signal(number, interrupt)
