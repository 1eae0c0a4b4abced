"""Ranks of megatron-core that load what the converter wrote: `python convert_megatron_worker.py RANKS...`.

Each RANKS is a directory of the converter. So many gloo ranks as it has files per model chunk build their GPTModel, and
the names and shapes of its state must be those of their files, to the last one.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer import TransformerConfig
from megatron_worker import without_cuda
from safetensors.torch import load_file

from swe_rl.training.megatron.convert import rank_file, read_layout
from swe_rl.training.megatron.convert_units import MegatronLayout, Rank
from swe_rl.training.planning.shapes import ModelShape, shape_from_directory


def build(shape: ModelShape, layout: MegatronLayout, *, stage: int, virtual: int) -> Any:
    """The model chunk of this process, as Megatron itself would cut it."""
    experts: dict[str, Any] = {}
    if shape.num_experts:
        experts = {
            "num_moe_experts": shape.num_experts,
            "moe_router_topk": shape.experts_per_token,
            "moe_ffn_hidden_size": shape.expert_intermediate,
            "expert_model_parallel_size": layout.expert_parallel,
            "expert_tensor_parallel_size": layout.tensor_parallel,
        }
    virtual_sizes = {"virtual_pipeline_model_parallel_size": layout.virtual_pipeline}
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        pipeline_dtype=torch.float32,
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        use_cpu_initialization=True,
        **(virtual_sizes if layout.virtual_pipeline > 1 else {}),
        **experts,
    )
    spec = get_gpt_layer_local_spec(
        num_experts=shape.num_experts or None, qk_layernorm=shape.qk_norm, normalization="RMSNorm"
    )
    return GPTModel(
        config,
        spec,
        layout.padded_vocab(shape.vocab),
        max_sequence_length=64,
        position_embedding_type="none",
        pre_process=stage == 0,
        post_process=stage == layout.num_stages - 1,
        share_embeddings_and_output_weights=shape.tied,
        vp_stage=virtual if layout.virtual_pipeline > 1 else None,
    )


def check(directory: Path) -> None:
    """AssertionError that names the tensors unless the files of this process are its model's state."""
    shape, layout = shape_from_directory(directory), read_layout(directory)
    pipeline = parallel_state.get_pipeline_model_parallel_rank()
    for virtual in range(layout.virtual_pipeline):
        rank = Rank(
            tensor=parallel_state.get_tensor_model_parallel_rank(),
            pipeline=pipeline,
            virtual=virtual,
            expert=parallel_state.get_expert_model_parallel_rank(),
        )
        model = build(shape, layout, stage=virtual * layout.pipeline_parallel + pipeline, virtual=virtual)
        state = {name: tuple(value.shape) for name, value in model.state_dict().items() if value is not None}
        stored = load_file(directory / rank_file(rank))
        shapes = {name: tuple(value.shape) for name, value in stored.items()}
        assert shapes == state, (rank, set(shapes.items()) ^ set(state.items()))
        assert not model.load_state_dict(stored, strict=False).unexpected_keys


def start(rank: int, size: int, directory: Path, store: str) -> None:
    torch.set_num_threads(1)
    layout = read_layout(directory)
    dist.init_process_group("gloo", store=dist.FileStore(store, size), rank=rank, world_size=size)
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor_parallel,
        pipeline_model_parallel_size=layout.pipeline_parallel,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        expert_model_parallel_size=layout.expert_parallel,
        expert_tensor_parallel_size=layout.tensor_parallel,
    )
    with without_cuda(), mock.patch("torch.Tensor.cuda", lambda self, *_, **__: self):
        check(directory)
    dist.barrier()
    dist.destroy_process_group()


def main(directories: list[Path]) -> int:
    context = multiprocessing.get_context("fork")
    for directory in directories:
        layout = read_layout(directory)
        size = layout.tensor_parallel * layout.pipeline_parallel * layout.expert_parallel
        with tempfile.TemporaryDirectory() as folder:
            ranks = [
                context.Process(target=start, args=(rank, size, directory, f"{folder}/store")) for rank in range(size)
            ]
            for process in ranks:
                process.start()
            for process in ranks:
                process.join()
        if any(process.exitcode for process in ranks):
            print(f"failed: {directory}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main([Path(word) for word in sys.argv[1:]]))
