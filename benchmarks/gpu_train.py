"""A training step on one GPU: an RL update of Qwen3-0.6B's shape, random weights, by both trainers. A section of
gpu_suite.

One document that fills the row, every token trained (the dearest case for the head), recomputed activations, bf16 with
fp32 masters and AdamW. Limits are what prime-rl published for one H100 (in its own benchmarks/baselines, January 2026:
RL, all weights, recomputed activations, FlashAttention 3; 11,896 and 10,147 tokens/s, 12.5 and 19.6 GiB). Whether its
rows train as many of their tokens is not said there.
"""

from __future__ import annotations

import gc
import importlib.util
import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

if TYPE_CHECKING:
    from gpu_suite import Suite

    from swe_rl.types import PackedBatch

MODEL = "Qwen/Qwen3-0.6B"
GIB = 1 << 30
REPEATS = 3


class Published(NamedTuple):
    tokens_per_s: float
    peak_gib: float


PUBLISHED = {16_384: Published(11_896, 12.5), 65_536: Published(10_147, 19.6)}
PACKAGES = {"torch": ("transformers",), "megatron": ("transformers", "megatron")}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainCase:
    """`changes` are fields of transformers' config in place of the model's."""

    backend: str
    tokens: int
    device: str = "cuda"
    dtype: str = "bfloat16"
    changes: tuple[tuple[str, int], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """Of the median step; peak is what tensors took on the device at most, 0 on a CPU."""

    seconds: float
    mfu: float  # without recomputation, of an H100 or H200
    peak_bytes: int


def train_section(suite: Suite) -> None:
    """Time, tokens per second, MFU and memory of a step."""
    for backend in PACKAGES:
        for tokens in PUBLISHED:
            _measure(suite, TrainCase(backend=backend, tokens=tokens))


def _measure(suite: Suite, case: TrainCase) -> None:
    label, published = f"{case.backend} T={case.tokens}", PUBLISHED[case.tokens]
    limit = case.tokens / published.tokens_per_s
    found: list[StepCosts] = []

    def seconds() -> float:
        found.append(measured(case))
        return found[0].seconds

    absent = [name for name in PACKAGES[case.backend] if importlib.util.find_spec(name) is None]
    reason = suite.obstacle() or (f"no package {absent[0]}" if absent else "")
    if reason:
        suite.skip(f"{label} step", "s", reason, limit=limit)
    else:
        suite.measure(
            f"{label} step", "s", seconds, limit=limit, detail=f"published {published.tokens_per_s:g} tokens/s"
        )
    rows = (("throughput", "tokens/s", None), ("MFU", "%", None), ("peak memory", "GiB", published.peak_gib))
    if not found:
        for name, unit, bound in rows:
            suite.skip(f"{label} {name}", unit, reason or "no step", limit=bound)
        return
    values = (case.tokens / found[0].seconds, 100 * found[0].mfu, found[0].peak_bytes / GIB)
    for (name, unit, bound), value in zip(rows, values, strict=True):
        suite.record(f"{label} {name}", unit, value, limit=bound)


def measured(case: TrainCase) -> StepCosts:
    """One step to warm up, then the median of some. RuntimeError when a step did not move the weights."""
    gc.collect()  # a Megatron model is a cycle of references: that of the case before would count in this one's peak
    if case.device == "cuda":
        torch.cuda.empty_cache()
    backend, row = open_backend(case), make_row(case)
    backend.train_step([row], learning_rate=1e-6)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    times = []
    for _ in range(REPEATS):
        started = time.perf_counter()
        stats = backend.train_step([row], learning_rate=1e-6)  # which waits for the device
        times.append(time.perf_counter() - started)
        if stats.skipped:
            raise RuntimeError(f"the step was skipped: gradient norm {stats.grad_norm}")
    seconds = statistics.median(times)
    peak = torch.cuda.max_memory_allocated() if case.device == "cuda" else 0
    return StepCosts(seconds=seconds, mfu=utilization_of(case, seconds), peak_bytes=peak)


def utilization_of(case: TrainCase, seconds: float) -> float:
    """MFU of a step that takes so long: planning.times has the formula."""
    from swe_rl.training.planning.hardware import DEVICES
    from swe_rl.training.planning.shapes import shape_from_config
    from swe_rl.training.planning.times import StepTokens, utilization

    shape = shape_from_config(config_of(case), name=MODEL)
    step = StepTokens(documents=1, mean_tokens=case.tokens, spread=1.0, trained_share=1.0)
    return utilization(shape, step, DEVICES["h100"], gpus=1, seconds=seconds)


def config_of(case: TrainCase) -> Any:
    from transformers import Qwen3Config

    from swe_rl.training.planning.shapes import PUBLISHED as SHAPES

    shape = SHAPES[MODEL]
    sizes = {
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate,
    }
    sizes |= dict(case.changes)
    return Qwen3Config(**sizes, max_position_embeddings=case.tokens, tie_word_embeddings=shape.tied, use_cache=False)


def open_backend(case: TrainCase) -> Any:
    """The trainer, with random weights."""
    from transformers import AutoModelForCausalLM

    from swe_rl.config import AlgoConfig, TrainerConfig
    from swe_rl.models.attention import PACKED, register
    from swe_rl.training.megatron.backend import MegatronBackend
    from swe_rl.training.torch_backend import TorchBackend

    register()
    torch.manual_seed(0)
    made = AutoModelForCausalLM.from_config(config_of(case), attn_implementation=PACKED)
    cfg = TrainerConfig(backend=case.backend, activation_checkpointing=True)
    kind = MegatronBackend if case.backend == "megatron" else TorchBackend
    return kind(made, cfg, algo=AlgoConfig(), device=case.device, dtype=getattr(torch, case.dtype))


def make_row(case: TrainCase) -> PackedBatch:
    """One document; old logprobs are those of a model that knows nothing, so ratios stay near 1."""
    from swe_rl.batching.packing import pack_row
    from swe_rl.types import TrainSample

    rng, vocab = random.Random(1), config_of(case).vocab_size
    mask = [t > 0 for t in range(case.tokens)]
    known = [-float(torch.tensor(vocab).log()) if m else 0.0 for m in mask]
    sample = TrainSample(
        trajectory_id="0",
        input_ids=[rng.randrange(vocab) for _ in mask],
        loss_mask=mask,
        rollout_logprobs=known,
        old_logprobs=known,
        advantages=[rng.gauss(0, 1) if m else 0.0 for m in mask],
        turn_ids=[0 if m else -1 for m in mask],
        policy_version=0,
        temperature=1.0,
        token_weights=[1 / case.tokens if m else 0.0 for m in mask],
    )
    return pack_row([sample])
