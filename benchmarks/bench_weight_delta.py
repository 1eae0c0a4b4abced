"""Speed of weight deltas on one core, and how much of a model changes in a real RL step.

    python benchmarks/bench_weight_delta.py [--elements 67108864] [--record]
    python benchmarks/bench_weight_delta.py --rl smollm2-135m [--steps 3] [--learning-rate 1e-6] [--record]

The first form times compare (without update), apply and checksum on bf16 tensors of which a share changed, the compiled
code and torch in alternation, one thread; speeds are bytes of one version of the tensor per second, in wall time and in
time on the CPU (which a busy machine disturbs less). `--record` appends to baselines/weight_delta.csv.

The second form samples answers with the embedded engine (bf16), rewards them, takes one policy-gradient step (AdamW,
fp32 masters) and publishes deltas, step by step; every version is compared bit by bit with the rounded masters.
`--record` appends to baselines/weight_sync.csv.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from measure import Times, interleaved
from recording import append_row

from swe_rl.algorithms import token_weights
from swe_rl.batching import pack
from swe_rl.cli.paths import cache_dir
from swe_rl.config import AlgoConfig, EngineConfig, ModelConfig, TrainerConfig
from swe_rl.inference import EmbeddedEngine
from swe_rl.models.loading import load_model
from swe_rl.ops import weight_delta
from swe_rl.protocols import SamplingParams
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.training.weight_sync import WeightPublisher
from swe_rl.types import Completion, PackedBatch, TrainSample

BASELINES = Path(__file__).parent / "baselines"
SHARES = (0.0, 0.01, 0.05, 0.2)
COMMON = ("date", "commit", "machine", "load_1m")
SPEED_COLUMNS = (*COMMON, "operation", "impl", "elements", "changed_share", "gb_per_s", "gb_per_cpu_s", "delta_share")
SYNC_COLUMNS = (
    *(*COMMON, "model", "threads", "step", "learning_rate", "tokens", "grad_norm", "delta", "resync", "changed_share"),
    *("byte_share", "sent_mib", "full_mib", "sync_s", "lossless"),
)
PROMPTS = (
    "Name three animals.",
    "Write one sentence about the sea.",
    "What is a list in Python?",
    "Give a short piece of advice.",
)
GROUP, ANSWER_TOKENS = 4, 40


def speeds(elements: int, repeats: int) -> Iterator[dict[str, Any]]:
    """One row per share, operation and implementation."""
    old = torch.randn(elements, generator=torch.Generator().manual_seed(0)).bfloat16()
    for share in SHARES:
        generator = torch.Generator().manual_seed(1)
        new = torch.where(torch.rand(elements, generator=generator) < share, -old, old)
        found = weight_delta.compare(old, new)
        steps = {}
        for impl in ("cpu", "reference"):
            steps["compare", impl] = functools.partial(weight_delta.compare, old, new, impl=impl)
            steps["apply", impl] = functools.partial(weight_delta.apply, old.clone(), found, impl=impl)
            steps["checksum", impl] = functools.partial(weight_delta.checksum, new, impl=impl)
        for (operation, impl), times in interleaved(steps, repeats, device="cpu").items():  # type: ignore[arg-type]
            yield {
                "operation": operation,
                "impl": impl,
                "elements": elements,
                "changed_share": share,
                "gb_per_s": f"{2e-9 * elements / times.quantile(0.5):.2f}",
                "gb_per_cpu_s": f"{2e-9 * elements / _median_cpu(times):.2f}",
                "delta_share": f"{found.num_bytes / (2 * elements):.4f}",
            }


def _median_cpu(times: Times) -> float:
    return sorted(times.cpu)[len(times.cpu) // 2]


async def rl_steps(args: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per published version."""
    model, tokenizer = load_model(ModelConfig(name=args.rl), cache_dir=cache_dir() / "models")
    engine_cfg = EngineConfig(num_slots=16, dtype="bfloat16", weight_sync="delta")
    async with EmbeddedEngine(model, engine_cfg, max_context=256) as engine:
        trainer = TorchBackend(model, TrainerConfig(learning_rate=args.learning_rate), algo=AlgoConfig())
        publisher = WeightPublisher(trainer, [engine], mode="delta", dtype="bfloat16")
        rows = [await _published(args, publisher, engine, trainer, {"step": 0})]
        for step in range(args.steps):
            batches = await _rollouts(engine, tokenizer, seed=step)
            stats = await asyncio.to_thread(trainer.train_step, batches, learning_rate=args.learning_rate)
            found = {"step": step + 1, "tokens": stats.num_loss_tokens, "grad_norm": f"{stats.grad_norm:.4f}"}
            rows.append(await _published(args, publisher, engine, trainer, found))
            print(rows[-1], flush=True)
        return rows


async def _published(
    args: argparse.Namespace, publisher: WeightPublisher, engine: EmbeddedEngine, trainer: TorchBackend, row: Any
) -> dict[str, Any]:
    report = await publisher.publish()
    held = engine._scheduler.runner.parameters
    lossless = all(torch.equal(held[name], weight.bfloat16()) for name, weight in trainer.weights().items())
    return {
        **row,
        "model": args.rl,
        "threads": torch.get_num_threads(),
        "learning_rate": args.learning_rate,
        "delta": report.delta,
        "resync": report.resync,
        "changed_share": f"{report.num_changed / report.num_elements:.5f}",
        "byte_share": f"{report.sent_bytes / report.full_bytes:.5f}",
        "sent_mib": f"{report.sent_bytes / 2**20:.2f}",
        "full_mib": f"{report.full_bytes / 2**20:.2f}",
        "sync_s": f"{report.seconds:.3f}",
        "lossless": lossless,
    }


async def _rollouts(engine: EmbeddedEngine, tokenizer: Any, *, seed: int) -> list[PackedBatch]:
    """Answers to every prompt in groups; the reward is the share of the letter e, the advantage leaves one out."""
    stop = int(tokenizer.eos_token_id)
    jobs = []
    for index, prompt in enumerate(PROMPTS):
        text = f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer.encode(text, add_special_tokens=False)
        jobs += [(index, member, ids) for member in range(GROUP)]

    async def answer(index: int, member: int, ids: list[int]) -> Completion:
        session = f"{seed}-{index}-{member}"
        params = SamplingParams(max_new_tokens=ANSWER_TOKENS, stop_ids=(stop,), seed=1000 * seed + 100 * index + member)
        completion = await engine.generate(ids, params, session=session)
        await engine.release(session)
        return completion

    completions = await asyncio.gather(*(answer(*job) for job in jobs))
    rewards = [_reward(tokenizer.decode(completion.token_ids)) for completion in completions]
    samples = []
    for start in range(0, len(jobs), GROUP):
        own = rewards[start : start + GROUP]
        advantages = [r - (sum(own) - r) / (GROUP - 1) for r in own]
        for job, completion, advantage in zip(
            jobs[start : start + GROUP], completions[start : start + GROUP], advantages, strict=True
        ):
            samples.append(_sample(f"{seed}-{job[0]}-{job[1]}", job[2], completion, advantage))
    weighed = token_weights(
        samples,
        "seq_sum_const",
        max_tokens=ANSWER_TOKENS,
        num_rows_global=len(samples),
        num_tokens_global=sum(sum(sample.loss_mask) for sample in samples),
    )
    return pack(weighed, max_tokens=1024)


def _reward(text: str) -> float:
    return text.count("e") / max(len(text), 1)


def _sample(name: str, prompt: list[int], completion: Completion, advantage: float) -> TrainSample:
    before, count = len(prompt), len(completion.token_ids)
    return TrainSample(
        trajectory_id=name,
        input_ids=[*prompt, *completion.token_ids],
        loss_mask=[False] * before + [True] * count,
        rollout_logprobs=[0.0] * before + list(completion.rollout_logprobs),
        advantages=[0.0] * before + [advantage] * count,
        turn_ids=[-1] * before + [0] * count,
        policy_version=completion.policy_version,
        temperature=1.0,
    )


def _common() -> dict[str, Any]:
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    machine = names[0].split(":")[1].strip() if names else platform.machine()
    return {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit,
        "machine": machine,
        "load_1m": f"{os.getloadavg()[0]:.1f}",
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=1 << 26)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--rl", help="a model: measures what changes in RL steps")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--learning-rate", type=float, default=1e-6)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    name, columns = ("weight_sync.csv", SYNC_COLUMNS) if args.rl else ("weight_delta.csv", SPEED_COLUMNS)
    rows = asyncio.run(rl_steps(args)) if args.rl else speeds(args.elements, args.repeats)
    for row in rows:
        full = {**dict.fromkeys(columns, ""), **_common(), **row}
        print(", ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        if args.record:
            append_row(BASELINES / name, columns, full)
    return 0


if __name__ == "__main__":
    sys.exit(main())
