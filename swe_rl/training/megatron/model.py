"""megatron-core's GPTModel of a Hugging Face config: local modules, our core attention and norm, our head as its loss.

GPTModel hands hidden states and the weight of the head to a function of ours instead of computing logits. Newer
versions have a hook for it (`output_processor`); in older ones the method that computes logits is overridden.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from swe_rl.config import TrainerConfig
from swe_rl.models.rope import rope_from_config
from swe_rl.training.megatron import host_device
from swe_rl.training.megatron.core_attention import layer_spec
from swe_rl.training.megatron.experts import expert_options, use_router
from swe_rl.training.megatron.grid import Grid
from swe_rl.training.megatron.norm import RowNorm
from swe_rl.training.planning.shapes import ModelShape

Head = Callable[[Tensor, Tensor], Tensor]  # (hidden [n, H] of this rank, weight of the head [V / R, H]) -> output


def build_chunks(
    hf_config: Any, shape: ModelShape, grid: Grid, cfg: TrainerConfig, *, dtype: torch.dtype
) -> nn.ModuleList:
    """The model of this process, uninitialised, in `dtype`: its stage, under an interleaved pipeline several of them.
    ConfigError for a model that does not fit."""
    grid.layout.check(shape)
    config = transformer_config(hf_config, shape, grid, cfg, dtype=dtype)
    count, last = shape.num_layers // grid.layout.num_stages, grid.layout.num_stages - 1
    chunks = nn.ModuleList()
    for virtual in range(grid.layout.virtual_pipeline):
        stage = virtual * grid.pipeline.size + grid.pipeline.rank
        specs = [_layer(hf_config, shape, cfg, layer) for layer in range(stage * count, (stage + 1) * count)]
        with host_device.building():
            chunk = gpt_class()(
                config,
                _block(specs),
                grid.layout.padded_vocab(shape.vocab),
                max_sequence_length=hf_config.max_position_embeddings,
                position_embedding_type="none",
                pre_process=stage == 0,
                post_process=stage == last,
                share_embeddings_and_output_weights=shape.tied,
                vp_stage=virtual if grid.layout.virtual_pipeline > 1 else None,
            )
        chunks.append(chunk.to(grid.device))
    return chunks


def _block(specs: list[Any]) -> Any:
    from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

    return TransformerBlockSubmodules(layer_specs=specs, layer_norm=RowNorm)


def transformer_config(hf: Any, shape: ModelShape, grid: Grid, cfg: TrainerConfig, *, dtype: torch.dtype) -> Any:
    """megatron-core's TransformerConfig: no dropout, no fused kernels of its own, losses that are only ever added."""
    from megatron.core.transformer import TransformerConfig

    options: dict[str, Any] = {}
    virtual = grid.layout.virtual_pipeline
    if shape.num_experts:
        options = expert_options(hf, shape.num_layers, shape.dense_layers)
        options |= {"expert_model_parallel_size": grid.expert.size, "expert_tensor_parallel_size": grid.tensor.size}
    if cfg.activation_checkpointing:
        options |= {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    return TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.intermediate,
        tensor_model_parallel_size=grid.tensor.size,
        sequence_parallel=grid.sequence_parallel,
        context_parallel_size=grid.context.size,
        pipeline_model_parallel_size=grid.pipeline.size,
        virtual_pipeline_model_parallel_size=virtual if virtual > 1 else None,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        variable_seq_lengths=True,  # rows are as long as their documents
        moe_token_dispatcher_type="alltoall",  # which alone allows that, experts or not
        gated_linear_unit=True,
        activation_func=F.silu,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        qk_layernorm=shape.qk_norm,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        calculate_per_token_loss=True,  # of a loss of three values nothing is divided: denominators are in the weights
        perform_initialization=False,  # weights are loaded
        **options,
    )


def _layer(hf: Any, shape: ModelShape, cfg: TrainerConfig, layer: int) -> Any:
    """The spec of one layer, by its number in the whole model."""
    spec = layer_spec(
        rope=rope_from_config(hf),
        attention_impl=cfg.attention,
        qk_layernorm=shape.qk_norm,
        normalization="RMSNorm",
        num_experts=shape.num_experts if shape.has_experts(layer) else None,
    )
    _use_row_norm(spec, qk_norm=shape.qk_norm)
    if shape.has_experts(layer):
        use_router(spec, normalize=hf.norm_topk_prob)
    return spec


def _use_row_norm(spec: Any, *, qk_norm: bool) -> None:
    spec.submodules.input_layernorm = spec.submodules.pre_mlp_layernorm = RowNorm
    if qk_norm:
        attention = spec.submodules.self_attention.submodules
        attention.q_layernorm = attention.k_layernorm = RowNorm


@functools.cache
def has_hook() -> bool:
    """Whether this megatron-core lets a function take the place of its logits (0.18 and newer)."""
    from megatron.core.models.gpt import GPTModel

    return "output_processor" in inspect.signature(GPTModel.forward).parameters


@functools.cache
def gpt_class() -> Any:
    """GPTModel, or where it has no hook a subclass whose last stage asks `head`."""
    from megatron.core.models.gpt import GPTModel

    if has_hook():
        return GPTModel

    class HeadGPTModel(GPTModel):
        head: Head

        def _postprocess(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
            if not self.post_process:
                return hidden_states
            return self.head(hidden_states.squeeze(1), head_weight(self))

    return HeadGPTModel


def run_stage(model: Any, input_ids: Tensor, packed_seq_params: Any, head: Head) -> Tensor:
    """One forward pass of a stage on the rows [n] of this rank: hidden states for the next stage, or what `head`
    returns on the last one."""
    hook: dict[str, Any] = {}
    if has_hook():
        hook["output_processor"] = lambda *, hidden_states, **_: head(hidden_states.squeeze(1), head_weight(model))
    else:
        model.head = head
    ids = input_ids[None]
    out: Tensor = model(ids, torch.zeros_like(ids), None, packed_seq_params=packed_seq_params, **hook)
    return out


def head_weight(model: Any) -> Tensor:
    """This rank's rows of the head on the last stage: of the embedding where they are tied and it is here."""
    tied = model.share_embeddings_and_output_weights
    weight: Tensor = model.shared_embedding_or_output_weight() if tied else model.output_layer.weight
    return weight
