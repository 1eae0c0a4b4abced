"""One optimiser step of a two-layer model on ONE agent-shaped trajectory of up to 131,072 tokens, on a CPU.

    python benchmarks/long_step.py [--tokens 16384,32768,65536,131072] [--threads 2] [--attention auto] [--record]
    python benchmarks/long_step.py --check 8192      loss and gradient norm against fp64 with whole attention matrices

The trajectory has a prompt and turns of sampled tokens (20 % of all) and observations; the model is stretched by YaRN
with factor 4 from a quarter of the longest length. The step is the trainer's own: packing, PPO loss with old
logprobs, activation recomputation, clipping, AdamW. Every length runs in a process of its own; peak memory is all that
is resident in it, Python and torch included (`base_mib`: before the batch). `--record` appends to
baselines/long_step.csv. The exit code is 1 if memory is not linear in the number of tokens, or the check fails.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swe_rl.batching import pack
from swe_rl.config import AlgoConfig, ModelConfig, TrainerConfig
from swe_rl.models.nano import build_model
from swe_rl.models.rope import set_rope
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import PackedBatch, TrainSample

BASELINE = Path(__file__).parent / "baselines" / "long_step.csv"
LONGEST = 131_072
FACTOR = 4.0
TRAINED = 0.2
HEADS = {"num_heads": 3, "num_kv_heads": 1}  # of 64 dimensions
MODEL = ModelConfig(
    **HEADS,
    hidden_size=192,
    num_layers=2,
    intermediate_size=512,
    vocab_size=1024,
    yarn_factor=FACTOR,
    yarn_original_context=int(LONGEST / FACTOR),
)
LIMIT_MIB, LIMIT_S = 6 * 1024, 40 * 60
CHECKED = 1e-5  # relative difference to fp64
LINEAR = 1.15  # memory over base per token, from the shortest length to any longer one
LEARNING_RATE = 1e-4
Row = dict[str, Any]


def trajectory(num_tokens: int, *, seed: int = 0) -> TrainSample:
    """A prompt of 2,000 tokens (a quarter where that is too much), then turns: 50 to 400 sampled tokens each, and an
    observation that keeps the sampled share at 20 %."""
    rng = random.Random(seed)
    mask = [False] * min(2000, num_tokens // 4)
    while len(mask) < num_tokens:
        turn = rng.randint(50, 400)
        behind = round((sum(mask) + turn) / TRAINED) - len(mask) - turn
        mask += [False] * max(behind, 1) + [True] * turn
    mask = mask[-num_tokens:]
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, MODEL.vocab_size, (num_tokens,), generator=generator).tolist()
    # near those of an untrained model, so that ratios are near 1 and some are clipped
    old = (-math.log(MODEL.vocab_size) + 0.3 * torch.randn(num_tokens, generator=generator)).tolist()
    old = [value if trained else 0.0 for value, trained in zip(old, mask, strict=True)]
    signs = torch.randn(num_tokens, generator=generator).tolist()
    return TrainSample(
        trajectory_id="long",
        input_ids=ids,
        loss_mask=mask,
        rollout_logprobs=old,
        old_logprobs=old,
        advantages=[value if trained else 0.0 for value, trained in zip(signs, mask, strict=True)],
        turn_ids=[0 if trained else -1 for trained in mask],
        policy_version=0,
        temperature=1.0,
        token_weights=[1.0 / sum(mask) if trained else 0.0 for trained in mask],
    )


def batch_of(num_tokens: int) -> PackedBatch:
    (batch,) = pack([trajectory(num_tokens)], max_tokens=num_tokens)
    return batch


def stretched_model() -> Any:
    model = build_model(MODEL)
    model.config.max_position_embeddings = MODEL.yarn_original_context
    set_rope(model, MODEL)
    return model


def step(num_tokens: int, attention: str) -> Row:
    """Measures one optimiser step in this process."""
    cfg = TrainerConfig(activation_checkpointing=True, attention=attention)
    backend = TorchBackend(stretched_model(), cfg, algo=AlgoConfig(ratio_rule="ppo"), device="cpu")
    base = _status_mib("VmRSS")
    batch = batch_of(num_tokens)
    started, cpu = time.perf_counter(), time.process_time()
    stats = backend.train_step([batch], learning_rate=LEARNING_RATE)
    seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
    return {
        "tokens": num_tokens,
        "trained": stats.num_loss_tokens,
        "attention": attention,
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "base_mib": round(base),
        "peak_mib": round(_status_mib("VmHWM")),
        "loss": f"{stats.loss:.9g}",
        "grad_norm": f"{stats.grad_norm:.9g}",
    }


def exact(num_tokens: int) -> tuple[float, float]:
    """(loss, gradient norm) in fp64 by plain torch: a whole [T, T] matrix per head, whole logits, PPO written out."""
    from transformers import AttentionInterface

    AttentionInterface.register("whole_matrices", _whole_matrices)
    model, batch, algo = stretched_model().double(), batch_of(num_tokens), AlgoConfig()
    model.config._attn_implementation = "whole_matrices"
    rows = batch.loss_mask.nonzero()[:, 0]
    hidden = model.base_model(
        input_ids=batch.input_ids[None], position_ids=batch.position_ids[None], use_cache=False
    ).last_hidden_state[0]
    logits = hidden[rows] @ model.get_output_embeddings().weight.T
    logprobs = logits.log_softmax(-1).gather(1, batch.labels[rows, None])[:, 0]
    assert batch.old_logprobs is not None
    old, advantages, weights = (x[rows].double() for x in (batch.old_logprobs, batch.advantages, batch.token_weights))
    ratio = (logprobs - old).exp()
    clipped = ratio.clamp(1 - algo.clip_low, 1 + algo.clip_high)
    loss = (weights * -torch.minimum(ratio * advantages, clipped * advantages)).sum()
    loss.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return float(loss.detach()), float(nn.utils.get_total_norm(grads))


def _whole_matrices(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, *, scaling: float, **_: Any
) -> tuple[Tensor, None]:
    """One head after the other; the matrix is made again in the backward pass, as several of them would not fit."""
    shared = query.shape[1] // key.shape[1]
    heads = [
        torch.utils.checkpoint.checkpoint(
            _one_head, query[0, h], key[0, h // shared], value[0, h // shared], scaling, use_reentrant=False
        )
        for h in range(query.shape[1])
    ]
    return torch.stack(heads, dim=1)[None], None


def _one_head(q: Tensor, k: Tensor, v: Tensor, scaling: float) -> Tensor:
    scores = q @ k.T * scaling
    index = torch.arange(len(q))
    return scores.masked_fill(index[None, :] > index[:, None], -torch.inf).softmax(-1) @ v


def check(num_tokens: int, attention: str) -> bool:
    """Prints both, and whether they agree."""
    found, (loss, norm) = step(num_tokens, attention), exact(num_tokens)
    errors = [abs(float(found["loss"]) / loss - 1), abs(float(found["grad_norm"]) / norm - 1)]
    print(json.dumps({**found, "loss_fp64": loss, "grad_norm_fp64": norm, "errors": [f"{e:.1e}" for e in errors]}))
    return max(errors) <= CHECKED


def in_child(num_tokens: int, args: argparse.Namespace) -> Row:
    """`step` in a process of its own, whose large blocks go back to the system when they are freed."""
    command = [sys.executable, __file__, "--child", "--tokens", str(num_tokens), "--threads", str(args.threads)]
    environment = os.environ | {"MALLOC_MMAP_THRESHOLD_": str(1 << 20)}
    done = subprocess.run([*command, "--attention", args.attention], stdout=subprocess.PIPE, text=True, env=environment)
    if done.returncode:
        raise SystemExit(f"the step of {num_tokens} tokens ended with exit code {done.returncode}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def linear(rows: list[Row]) -> bool:
    """Whether memory over base grows at most in proportion to the number of tokens, and grows."""
    over = [(row["tokens"], row["peak_mib"] - row["base_mib"]) for row in rows]
    if any(later[1] <= earlier[1] for earlier, later in pairwise(over)):
        return False
    return all(mib / tokens <= LINEAR * over[0][1] / over[0][0] for tokens, mib in over)


def record(row: Row, threads: int) -> None:
    from recording import append_row

    about = {"date": time.strftime("%Y-%m-%d"), "threads": threads, "load_1m": round(os.getloadavg()[0], 1)}
    full = {**about, **row, "torch": torch.__version__}
    append_row(BASELINE, tuple(full), full)


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":")) / 1024


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="16384,32768,65536,131072", help="lengths, the shortest first")
    parser.add_argument("--check", type=int, default=0, metavar="TOKENS", help="only compare this length with fp64")
    parser.add_argument("--attention", default="auto", help="trainer.attention")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    lengths = [int(length) for length in args.tokens.split(",")]
    if max(lengths) > LONGEST or min(lengths) < 256:
        parser.error(f"--tokens: lengths from 256 to {LONGEST}")
    if args.child:
        print(json.dumps(step(lengths[0], args.attention)))
        return 0
    if args.check:
        return 0 if check(args.check, args.attention) else 1
    rows = []
    for length in lengths:
        rows.append(in_child(length, args))
        print(json.dumps(rows[-1]), flush=True)
        if args.record:
            record(rows[-1], args.threads)
    within = all(row["peak_mib"] <= LIMIT_MIB and row["seconds"] <= LIMIT_S for row in rows)
    print(f"memory linear in the number of tokens: {linear(rows)}; within {LIMIT_MIB} MiB and {LIMIT_S} s: {within}")
    return 0 if linear(rows) and within else 1


if __name__ == "__main__":
    sys.exit(main())
