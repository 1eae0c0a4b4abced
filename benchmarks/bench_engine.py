"""Sampled tokens per second of the embedded engine, on multi-turn episodes with a shared prompt per group.

    python benchmarks/bench_engine.py [--slots 32] [--chunk 64] [--threads 2] [--record]

`--record` appends the row to baselines/engine.csv. The model is nano with random weights (1.4 M parameters). An
episode has a prompt of 120 tokens, 5 turns of 8 to 24 sampled tokens, and observations of 5 to 30 tokens that arrive
after 5 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import csv
import os
import platform
import random
import subprocess
import time
from pathlib import Path

import torch

from swe_rl.config import EngineConfig, ModelConfig
from swe_rl.inference import EmbeddedEngine
from swe_rl.models.nano import build_model
from swe_rl.protocols import SamplingParams

BASELINE = Path(__file__).parent / "baselines" / "engine.csv"
CONTEXT, PROMPT, TURNS, ENV_S = 512, 120, 5, 0.005


async def episode(engine: EmbeddedEngine, index: int, *, group_size: int, vocab: int) -> None:
    shared, own = random.Random(index // group_size), random.Random(-index - 1)
    ids = [shared.randrange(vocab) for _ in range(PROMPT)]
    for turn in range(TURNS):
        params = SamplingParams(max_new_tokens=own.randrange(8, 25), stop_ids=(), seed=1000 * index + turn)
        ids += (await engine.generate(ids, params, session=str(index))).token_ids
        await asyncio.sleep(ENV_S)
        ids += [own.randrange(vocab) for _ in range(own.randrange(5, 31))]
    await engine.release(str(index))


async def run(args: argparse.Namespace) -> dict[str, object]:
    cfg = ModelConfig()
    engine_cfg = EngineConfig(num_slots=args.slots, prefill_chunk=args.chunk, dtype=args.dtype)
    async with EmbeddedEngine(build_model(cfg), engine_cfg, max_context=CONTEXT) as engine:
        gate = asyncio.Semaphore(args.slots)

        async def one(index: int) -> None:
            async with gate:
                await episode(engine, index, group_size=args.group, vocab=cfg.vocab_size)

        await asyncio.gather(*(one(-1 - i) for i in range(args.slots)))  # warm-up
        before, start, cpu = engine.counters.as_dict(), time.perf_counter(), time.process_time()
        await asyncio.gather(*(one(i) for i in range(args.episodes)))
        wall, cpu = time.perf_counter() - start, time.process_time() - cpu
        after = engine.counters.as_dict()
    done = {name: after[name] - before[name] for name in after}
    return {
        "cpu": _cpu_name(),
        "threads": args.threads,
        "load_1m": round(os.getloadavg()[0], 1),  # above the number of cores: others were running, figures are low
        "commit": _commit(),
        "dtype": args.dtype,
        "slots": args.slots,
        "chunk": args.chunk,
        "episodes": args.episodes,
        "sampled_per_s": round(done["tokens_sampled"] / wall),
        "computed_per_s": round(done["tokens_computed"] / wall),
        "shared_tokens": done["tokens_shared"],
        "padded_share": round(done["tokens_padded"] / (done["tokens_padded"] + done["tokens_computed"]), 3),
        "ms_per_call": round(1000 * wall / done["forward_calls"], 2),
        "cpu_ms_per_call": round(1000 * cpu / done["forward_calls"], 2),
    }


def _cpu_name() -> str:
    lines = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return lines[0].split(":", 1)[1].strip() if lines else platform.machine()


def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return done.stdout.strip() or "unknown"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--slots", type=int, default=32)
    parser.add_argument("--chunk", type=int, default=64)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--group", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    row = asyncio.run(run(args))
    print("  ".join(f"{name}={value}" for name, value in row.items()))
    if args.record:
        new = not BASELINE.exists()
        with BASELINE.open("a", newline="") as file:
            writer = csv.DictWriter(file, fieldnames=list(row))
            if new:
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
