"""Bytes that autograd keeps for one more layer of megatron-core's GPTModel, by family and dtype, as JSON.

Own core attention, Megatron's modules otherwise, in one process on a CPU: no fused kernels. A storage counts once.
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import TransformerConfig
from megatron_worker import without_cuda
from torch import Tensor

from swe_rl.models.rope import Rope
from swe_rl.training.megatron.core_attention import layer_spec

TOKENS, VOCAB = 256, 128


def build(shape: dict[str, Any], *, layers: int, dtype: torch.dtype) -> Any:
    norm = {"qk_layernorm": shape["family"] == "qwen3", "normalization": "RMSNorm"}
    config = TransformerConfig(
        num_layers=layers,
        hidden_size=shape["hidden"],
        num_attention_heads=shape["num_heads"],
        num_query_groups=shape["num_kv_heads"],
        kv_channels=shape["head_dim"],
        ffn_hidden_size=shape["intermediate"],
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=shape["family"] == "qwen2",
        use_cpu_initialization=True,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        **norm,
    )
    spec = layer_spec(rope=Rope(theta=1e4, dim=shape["head_dim"]), **norm)
    model = GPTModel(config, spec, VOCAB, max_sequence_length=TOKENS, position_embedding_type="none")
    return model.to(dtype)


def kept_bytes(model: Any) -> int:
    """Of all tensors that one forward pass saves, parameters left out."""
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    held: list[Tensor] = []  # alive, so that no storage is counted under the address of another

    def pack(tensor: Tensor) -> Tensor:
        held.append(tensor)
        return tensor

    ids = torch.arange(TOKENS)[None] % VOCAB
    borders = torch.tensor([0, TOKENS], dtype=torch.int32)
    params = PackedSeqParams(qkv_format="thd", cu_seqlens_q=borders, cu_seqlens_kv=borders)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = model(ids, torch.zeros_like(ids), None, packed_seq_params=params)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    del result
    return sum(size for address, size in storages.items() if address not in parameters)


def main(shapes: list[dict[str, Any]]) -> None:
    torch.set_num_threads(1)
    found = []
    with tempfile.TemporaryDirectory() as folder, without_cuda():
        dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", 1), rank=0, world_size=1)
        parallel_state.initialize_model_parallel()
        for shape in shapes:
            for name in ("float32", "bfloat16"):
                sizes = [kept_bytes(build(shape, layers=n, dtype=getattr(torch, name))) for n in (1, 2)]
                found.append({"family": shape["family"], "dtype": name, "bytes": (sizes[1] - sizes[0]) / TOKENS})
        dist.destroy_process_group()
    print(json.dumps(found))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
