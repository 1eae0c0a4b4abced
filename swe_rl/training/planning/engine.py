"""Memory and speed of the inference engine: how many episodes decode together, and how long an iteration samples.

Decoding is bound by memory: a step of one token for each running episode reads all weights of the replica once and the
keys and values of every context. Prefill is bound by arithmetic; with prefix caching a token is computed once.
"""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.training.planning.hardware import Device, Efficiency
from swe_rl.training.planning.parts import BYTES
from swe_rl.training.planning.shapes import ModelShape

STEP_OVERHEAD_S = 2e-3  # of the engine's scheduler and kernel launches, per decoded token of a batch
REDUCTION_S = 15e-6  # one small all-reduce over NVLink; two for each layer
ENGINE_OVERHEAD = 3 << 30  # CUDA context, graphs and activations of a vLLM process


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """replicas of tensor_parallel GPUs each; `memory` is what one GPU lets the engine have."""

    replicas: int
    tensor_parallel: int
    memory: int
    dtype: str
    max_running: int  # episodes of one replica at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """What is sampled in one iteration, over all replicas."""

    count: int
    mean_tokens: int  # context at the end of an episode
    max_tokens: int
    sampled_tokens: int  # of the mean_tokens, those that the policy wrote
    waiting_s: float  # tools of one episode
    longest_waiting_s: float  # of the one with most turns


def kv_bytes(shape: ModelShape, *, tensor_parallel: int, dtype: str) -> int:
    """Keys and values of one token on one GPU; a head is copied where there are fewer than GPUs."""
    heads = -(-shape.num_kv_heads // tensor_parallel)
    return 2 * BYTES[dtype] * heads * shape.head_dim * shape.num_layers


def weight_bytes(shape: ModelShape, *, tensor_parallel: int, dtype: str) -> int:
    return BYTES[dtype] * shape.num_params // tensor_parallel


def cache_tokens(shape: ModelShape, engine: Engine) -> int:
    """Tokens whose keys and values fit into one replica; negative when not even the weights fit."""
    size = kv_bytes(shape, tensor_parallel=engine.tensor_parallel, dtype=engine.dtype)
    weights = weight_bytes(shape, tensor_parallel=engine.tensor_parallel, dtype=engine.dtype)
    return (engine.memory - weights - ENGINE_OVERHEAD) // size


def running_episodes(shape: ModelShape, engine: Engine, episodes: Episodes) -> int:
    """Of one replica at a time: as many as the cache holds half-way through, at most max_running."""
    return max(0, min(engine.max_running, cache_tokens(shape, engine) * 2 // episodes.mean_tokens))


def rollout_seconds(
    shape: ModelShape, engine: Engine, episodes: Episodes, device: Device, efficiency: Efficiency
) -> float:
    """Of one iteration: decoding and prefill of all episodes, and at least the longest episode by itself.

    Episodes are run in waves of `running_episodes`; waiting for tools overlaps with the other episodes of a wave.
    """
    running = min(running_episodes(shape, engine, episodes), -(-episodes.count // engine.replicas))
    if not running:
        return float("inf")
    tensor = engine.tensor_parallel
    read = weight_bytes(shape, tensor_parallel=tensor, dtype=engine.dtype)
    if shape.num_experts:  # experts that no running episode visits are not read
        visited = 1 - (1 - shape.experts_per_token / shape.num_experts) ** running
        read = int(read * max(visited, shape.layer_matrices / shape.num_params))
    context = kv_bytes(shape, tensor_parallel=tensor, dtype=engine.dtype) * episodes.mean_tokens // 2
    fixed = STEP_OVERHEAD_S + (2 * shape.num_layers * REDUCTION_S if tensor > 1 else 0.0)
    step = (read + running * context) / (device.bandwidth * efficiency.memory) + fixed
    prefill = 2.0 * (shape.layer_matrices + shape.embedding) * episodes.mean_tokens
    prefill /= device.flops * efficiency.matmul * tensor
    each = episodes.sampled_tokens * step + running * prefill  # a wave's prefills share the GPUs
    waves = episodes.count / engine.replicas / running
    longest = episodes.max_tokens / episodes.mean_tokens * episodes.sampled_tokens * step + episodes.longest_waiting_s
    return max(waves * (each + episodes.waiting_s), longest)
