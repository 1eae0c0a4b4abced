"""What a gloo rank does in test_megatron_attention: GPTModels on packed rows, transformers, and Megatron by itself.

Run as a script: `python megatron_worker.py FOLDER SIZE...` starts SIZE ranks, for one size of tensor parallelism after
the other; each writes FOLDER/SIZE-RANK.pt. Ranks are forks: libraries are imported once. Megatron asks for CUDA in
places that have nothing to do with these tests; `without_cuda` answers for it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from torch import Tensor
from transformers import Qwen3Config, Qwen3ForCausalLM

from swe_rl.models.rope import rope_from_config
from swe_rl.training.megatron.core_attention import layer_spec

VOCAB, HIDDEN, HEADS, GROUPS, HEAD_DIM, FFN, LAYERS = 96, 48, 4, 2, 12, 80, 2
LENGTHS = (1, 37, 5, 64, 23)
ROPES = {
    "plain": {"rope_type": "default", "rope_theta": 1e4},
    "yarn": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16},
}
NORM = {"qk_layernorm": True, "normalization": "RMSNorm"}


@contextlib.contextmanager
def without_cuda() -> Iterator[None]:
    """torch.cuda as Megatron sees it on a machine without one; random states of a device that is not there."""
    random = "megatron.core.tensor_parallel.random"
    tracker = mock.Mock(get_states=dict)
    tracker.fork.return_value = contextlib.nullcontext()
    places = [
        mock.patch("torch.cuda.current_device", return_value=torch.device("cpu")),
        mock.patch("megatron.core.tensor_parallel.get_cuda_rng_tracker", return_value=tracker),
        mock.patch(f"{random}.get_cuda_rng_tracker", return_value=tracker),
        mock.patch(f"{random}._get_cuda_rng_state", return_value=torch.zeros(1)),
        mock.patch(f"{random}._set_cuda_rng_state"),
    ]
    with contextlib.ExitStack() as stack:
        for place in places:
            stack.enter_context(place)
        yield


def documents() -> list[Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(0, VOCAB, (length,), generator=generator) for length in LENGTHS]


def coefficients() -> Tensor:
    """[T, V] that logits are multiplied by for the loss."""
    return torch.randn(sum(LENGTHS), VOCAB, generator=torch.Generator().manual_seed(1))


def transformers_model(rope: str, *, dtype: torch.dtype) -> Any:
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        intermediate_size=FFN,
        rope_parameters=ROPES[rope],
        max_position_embeddings=64,
        tie_word_embeddings=False,
        use_cache=False,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = Qwen3ForCausalLM._from_config(config, attn_implementation="eager", dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.to(dtype)


def megatron_tensors(named: dict[str, Tensor], *, rank: int, size: int) -> dict[str, Tensor]:
    """Tensors by transformers name (weights or gradients) as this rank of Megatron holds them."""

    def own(tensor: Tensor, dim: int = 0) -> Tensor:
        return tensor.chunk(size, dim)[rank]

    found = {
        "embedding.word_embeddings.weight": own(named["model.embed_tokens.weight"]),
        "output_layer.weight": own(named["lm_head.weight"]),
        "decoder.final_layernorm.weight": named["model.norm.weight"],
    }
    for layer in range(LAYERS):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        q, k, v = (named[f"{theirs}self_attn.{x}_proj.weight"] for x in "qkv")
        grouped = [x.unflatten(0, (GROUPS, -1)) for x in (q, k, v)]  # a group's queries, its key, its value
        gate, up = (own(named[f"{theirs}mlp.{x}_proj.weight"]) for x in ("gate", "up"))
        found |= {
            f"{ours}self_attention.linear_qkv.weight": own(torch.cat(grouped, dim=1).flatten(0, 1)),
            f"{ours}self_attention.linear_proj.weight": own(named[f"{theirs}self_attn.o_proj.weight"], 1),
            f"{ours}self_attention.q_layernorm.weight": named[f"{theirs}self_attn.q_norm.weight"],
            f"{ours}self_attention.k_layernorm.weight": named[f"{theirs}self_attn.k_norm.weight"],
            f"{ours}input_layernorm.weight": named[f"{theirs}input_layernorm.weight"],
            f"{ours}pre_mlp_layernorm.weight": named[f"{theirs}post_attention_layernorm.weight"],
            f"{ours}mlp.linear_fc1.weight": torch.cat([gate, up]),
            f"{ours}mlp.linear_fc2.weight": own(named[f"{theirs}mlp.down_proj.weight"], 1),
        }
    return found


def megatron_model(spec: Any, weights: dict[str, Tensor], *, size: int, positions: str, **changes: Any) -> Any:
    config: Any = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=HIDDEN,
        num_attention_heads=HEADS,
        num_query_groups=GROUPS,
        kv_channels=HEAD_DIM,
        ffn_hidden_size=FFN,
        tensor_model_parallel_size=size,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        layernorm_epsilon=1e-6,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        use_cpu_initialization=True,
        **{**NORM, **changes},
    )
    if positions == "yarn":  # fields that only other configs of Megatron have
        yarn = {"rotary_scaling_factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0}
        yarn |= {"beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0, "correction_range_round_to_int": True}
        for key, value in yarn.items():
            setattr(config, f"yarn_{key}", value)
    model = GPTModel(config, spec, VOCAB, max_sequence_length=64, position_embedding_type=positions)
    own = dict(model.named_parameters())
    assert own.keys() == weights.keys(), own.keys() ^ weights.keys()
    with torch.no_grad():
        for name, parameter in own.items():
            parameter.copy_(weights[name])
    return model.train()


def packed(model: Any) -> Tensor:
    """Logits [T, V of this rank] of all documents in one row."""
    borders = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    ids = torch.cat(documents())[None]
    return model(ids, torch.zeros_like(ids), None, packed_seq_params=params)[0]


def one_by_one(model: Any) -> Tensor:
    """The same, each document a call of its own with Megatron's mask: True where nothing is seen."""
    rows = []
    for document in documents():
        hidden = torch.ones(len(document), len(document), dtype=torch.bool).triu(1)[None, None]
        rows.append(model(document[None], torch.arange(len(document))[None], hidden)[0])
    return torch.cat(rows)


def measure(model: Any, run: Callable[[Any], Tensor], *, rank: int, size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """(logits of this rank, gradients of its weights) of the loss over all ranks."""
    logits = run(model)
    (logits * coefficients().chunk(size, 1)[rank]).sum().backward()
    grads = {name: p.grad for name, p in model.named_parameters()}
    for name in grads:
        if "q_layernorm" in name or "k_layernorm" in name:  # every rank has other heads; Megatron sums them later
            dist.all_reduce(grads[name])
    return logits.detach(), grads


def results(rank: int, size: int) -> dict[str, Any]:
    """By rope and model: logits and gradients."""
    found: dict[str, Any] = {}
    for rope in ROPES:
        exact = transformers_model(rope, dtype=torch.float64)
        logits = torch.cat([exact(document[None]).logits[0] for document in documents()])
        (logits * coefficients().double()).sum().backward()
        grads = {name: p.grad for name, p in exact.named_parameters()}
        found[rope, "transformers"] = (
            logits.detach().chunk(size, 1)[rank],
            megatron_tensors(grads, rank=rank, size=size),
        )
        weights = dict(transformers_model(rope, dtype=torch.float32).named_parameters())
        shards = megatron_tensors(weights, rank=rank, size=size)
        described = rope_from_config(exact.config)
        ours = {"spec": layer_spec(rope=described, **NORM), "weights": shards, "size": size, "positions": "none"}
        selective = {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]}
        full = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
        parts = {"rank": rank, "size": size}
        found[rope, "ours packed"] = measure(megatron_model(**ours), packed, **parts)
        found[rope, "ours alone"] = measure(megatron_model(**ours), one_by_one, **parts)
        found[rope, "recompute core"] = measure(megatron_model(**ours, **selective), packed, **parts)
        found[rope, "recompute all"] = measure(megatron_model(**ours, **full), packed, **parts)
        own = {**ours, "spec": get_gpt_layer_local_spec(**NORM), "positions": "rope" if rope == "plain" else "yarn"}
        found[rope, "megatron"] = measure(megatron_model(**own), one_by_one, **parts)
    return found


def start(rank: int, size: int, folder: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(str(folder / f"store-{size}"), size), rank=rank, world_size=size
    )
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)
    with without_cuda():
        torch.save(results(rank, size), folder / f"{size}-{rank}.pt")
    dist.barrier()
    dist.destroy_process_group()


def main(folder: Path, sizes: list[int]) -> int:
    context = multiprocessing.get_context("fork")
    for size in sizes:
        ranks = [context.Process(target=start, args=(rank, size, folder)) for rank in range(size)]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), [int(size) for size in sys.argv[2:]]))
