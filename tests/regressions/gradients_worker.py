"""The batch of the split-invariance tests, and what one torchrun rank does with its share of it.

Run as a script: `python gradients_worker.py OUT DTYPE SHARDED OBJECTIVE`; rank 0 writes gradients and weights to OUT.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from swe_rl.algorithms import count_rows, count_tokens, token_weights
from swe_rl.batching import pack
from swe_rl.config import AlgoConfig, TrainerConfig
from swe_rl.models.attention import PACKED, register
from swe_rl.training import mesh
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import PackedBatch, TrainSample

VOCAB = 61
LENGTHS = (3, 37, 12, 23, 5, 29, 2, 17)
MASKED = 3  # index of the row without a trained token
ALGO = AlgoConfig(clip_low=0.1, clip_high=0.15, entropy_coeff=0.03, correction="tis", correction_cap=1.2)
MAX_TOKENS = 64  # constant length normaliser


def build_model(dtype: torch.dtype, *, attention: str = PACKED) -> Any:
    """A tiny tied Qwen3; in fp64 its norms compute in fp64 too (transformers' own would round to fp32)."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    register()
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        intermediate_size=40,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        use_cache=False,
    )
    torch.manual_seed(0)
    model = Qwen3ForCausalLM._from_config(config, attn_implementation=attention, dtype=torch.float32)
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(4.0) if param.ndim == 2 else param.add_(0.1 * torch.randn_like(param))
    model = model.to(dtype)
    if dtype == torch.float64:
        exact_norms(model)
    return model


def exact_norms(model: nn.Module) -> None:
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child).__name__.endswith("RMSNorm"):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=child.weight.dtype)
                norm.weight = child.weight
                setattr(parent, name, norm)


def make_samples(mode: str = "seq_sum_const") -> list[TrainSample]:
    """Uneven lengths, one fully masked row, two temperatures, masks with holes."""
    rng = random.Random(5)
    samples = []
    for index, length in enumerate(LENGTHS):
        mask = [False] + [index != MASKED and rng.random() < 0.6 for _ in range(length - 1)]
        mask[-1] = index != MASKED
        samples.append(
            TrainSample(
                trajectory_id=f"t{index}",
                input_ids=[rng.randrange(VOCAB) for _ in range(length)],
                loss_mask=mask,
                rollout_logprobs=[-rng.uniform(1.0, 6.0) if m else 0.0 for m in mask],
                advantages=[rng.choice((-0.7, 1.3)) if m else 0.0 for m in mask],
                turn_ids=[0 if m else -1 for m in mask],
                policy_version=0,
                temperature=0.7 if index % 3 == 0 else 1.0,
            )
        )
    rows, tokens = count_rows(samples, mode), count_tokens(samples)
    return token_weights(samples, mode, max_tokens=MAX_TOKENS, num_rows_global=rows, num_tokens_global=tokens)


def old_logprobs() -> dict[str, list[float]]:
    """Old logprobs per trajectory, at the token's own place; far enough from the model's that the clip acts."""
    rng = random.Random(9)
    return {f"t{index}": [-rng.uniform(2.5, 5.5) for _ in range(n)] for index, n in enumerate(LENGTHS)}


def with_old(batches: Sequence[PackedBatch]) -> list[PackedBatch]:
    """The batches with old_logprobs at label positions, NaN in every slot that does not train."""
    table = old_logprobs()
    filled = []
    for batch in batches:
        values = [v for name in batch.trajectory_ids for v in [*table[name][1:], 0.0]]
        old = torch.tensor(values, dtype=torch.float32).masked_fill(~batch.loss_mask, float("nan"))
        filled.append(replace(batch, old_logprobs=old))
    return filled


def backend(dtype: torch.dtype, *, sharded: bool = False, **settings: Any) -> TorchBackend:
    cfg = TrainerConfig(fsdp=sharded, **settings)
    return TorchBackend(build_model(dtype), cfg, algo=ALGO)


def rank_share(samples: Sequence[TrainSample], *, rank: int, world: int) -> list[PackedBatch]:
    """Uneven on purpose: rank 0 gets one short micro-batch per sample, the last rank all others in one row."""
    if world == 1:
        return with_old(pack(samples, max_tokens=1000))
    first = [s for i, s in enumerate(samples) if i % 4 == 0]
    others = [s for i, s in enumerate(samples) if i % 4]
    if rank == 0:
        return with_old(pack(first, max_tokens=1))
    return with_old(pack(others, max_tokens=1000)) if rank == world - 1 else []


def largest_difference(left: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    return max(float((a - b).nan_to_num().abs().max()) for a, b in zip(left, right, strict=True))


def main() -> None:
    out, dtype, sharded, objective = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3] == "sharded", sys.argv[4]
    torch.set_num_threads(1)
    mesh.init_distributed(device="cpu")
    trainer = backend(dtype, sharded=sharded)
    batches = rank_share(make_samples(), rank=mesh.rank(), world=mesh.world_size())
    totals = trainer.backward(batches, objective=objective)
    gradients: dict[str, Tensor] = {n: g.clone() for n, g in trainer.gradients().items()}
    scores = trainer.logprobs(batches)
    stats = trainer.train_step(batches, learning_rate=1e-2, objective=objective)
    rescored = trainer.logprobs(batches)
    moved = {n: w.clone() for n, w in trainer.weights().items()}
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    changed = largest_difference(scores, rescored)
    trainer.load_weights({n: 1.1 * w if "embed" in n else w for n, w in moved.items()})  # of the root module
    reloaded = largest_difference(rescored, trainer.logprobs(batches))
    if mesh.is_main():
        result = {
            "gradients": gradients,
            "weights": moved,
            "tokens": totals.num_loss_tokens,
            "changed": min(changed, reloaded),
        }
        torch.save({**result, "loss": stats.loss, "grad_norm": stats.grad_norm, "optimizer": state["optimizer"]}, out)
    mesh.barrier()
    mesh.shutdown()
    mesh.exit_rank(0)


if __name__ == "__main__":
    main()
