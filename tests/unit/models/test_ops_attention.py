"""transformers models whose attention is ops.attention, on packed rows: the stock model, document by document."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from swe_rl.errors import ConfigError, InvariantError
from swe_rl.models import head_weight, packed_forward
from swe_rl.models.attention import PACKED, register
from swe_rl.ops.context_parallel import ContextGroup

SIZES = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 80, "use_cache": False}
HEADS = {"num_attention_heads": 4, "head_dim": 12}
# 37 and 64 tokens are beyond the 16 of pretraining, so YaRN's ramp and factor matter
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
KINDS = {
    "qwen3": (Qwen3Config, Qwen3ForCausalLM, {"num_key_value_heads": 2, "tie_word_embeddings": True}),
    "llama": (LlamaConfig, LlamaForCausalLM, {"num_key_value_heads": 1}),
}
ATTENTIONS = ("auto", "sdpa", "reference", "cpu")


def build(kind: str, *, attention: str = PACKED, dtype: torch.dtype = torch.float32) -> Any:
    register()
    config_class, model_class, options = KINDS[kind]
    config = config_class(**SIZES, **HEADS, **options, rope_parameters=YARN, max_position_embeddings=64)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        return model_class._from_config(config, attn_implementation=attention, dtype=torch.float32).to(dtype)


def coefficients(num_tokens: int) -> Tensor:
    """What logits are multiplied by, so that gradients are not of one sign."""
    return torch.randn(num_tokens, 97, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def stock(kind: str, documents: list[list[int]]) -> tuple[Tensor, dict[str, Tensor]]:
    """Logits [T, V] and gradients of the stock model with its own eager attention and mask, in fp64."""
    model = build(kind, attention="eager", dtype=torch.float64)
    logits = torch.cat([model(torch.tensor([document])).logits[0] for document in documents])
    (logits * coefficients(len(logits))).sum().backward()
    return logits.detach(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", list(KINDS))
@pytest.mark.parametrize("attention", ATTENTIONS)
@pytest.mark.parametrize("recompute", [False, True], ids=["stored", "recomputed"])
def test_logits_and_gradients_are_those_of_the_stock_model(
    kind: str, attention: str, recompute: bool, pack: Any, documents: list[list[int]]
) -> None:
    expected, gradients = stock(kind, documents)
    model = build(kind)
    if recompute:
        model.train()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    logits = packed_forward(model, pack(documents), attention=attention) @ head_weight(model).T
    torch.testing.assert_close(logits.double(), expected, rtol=0, atol=1e-5)
    (logits * coefficients(len(logits)).float()).sum().backward()
    for name, parameter in model.named_parameters():
        scale = float(gradients[name].abs().max())
        torch.testing.assert_close(parameter.grad.double(), gradients[name], rtol=0, atol=1e-5 * max(scale, 1.0))


def test_padding_behind_the_documents_is_seen_by_nobody(pack: Any, documents: list[list[int]]) -> None:
    model = build("qwen3")
    batch, padded = pack(documents), pack([*documents, [5, 6, 7]])
    kept = len(batch.input_ids)
    kv_end = padded.kv_end.clone()
    kv_end[kept:] = torch.arange(kept, kept + 3)
    hidden = packed_forward(model, replace(padded, kv_end=kv_end), attention="cpu")
    torch.testing.assert_close(hidden[:kept], packed_forward(model, batch, attention="cpu"), rtol=0, atol=1e-5)
    assert hidden.isfinite().all()


def test_a_tree_is_its_paths(pack: Any, documents: list[list[int]]) -> None:
    """A prompt with two answers in one row, against the prompt with either."""
    model = build("qwen3")
    prompt, first, second = documents[1], documents[4], documents[2]
    one, two = (packed_forward(model, pack([[*prompt, *answer]])) for answer in (first, second))
    length, borders = len(prompt), (len(prompt), len(prompt) + len(first))
    row = pack([[*prompt, *first, *second]])
    ends = [len(row.input_ids)] * length + [borders[1]] * len(first) + [len(row.input_ids)] * len(second)
    depths = [*range(borders[1]), *range(length, length + len(second))]
    tree = replace(
        row,
        kv_end=torch.tensor(ends, dtype=torch.int32),
        position_ids=torch.tensor(depths),
        target_rows=torch.arange(len(ends)),
    )
    hidden = packed_forward(model, tree)
    torch.testing.assert_close(hidden[: borders[1]], one, rtol=0, atol=1e-5)
    torch.testing.assert_close(hidden[borders[1] :], two[length:], rtol=0, atol=1e-5)
    with pytest.raises(ConfigError, match=r"trainer\.attention=sdpa computes plain documents"):
        packed_forward(model, tree, attention="sdpa")


def test_a_split_row_has_no_choice_of_attention(pack: Any, documents: list[list[int]]) -> None:
    batch = replace(pack(documents), context_rows=torch.zeros(1, 1, dtype=torch.int64))
    with pytest.raises(ConfigError, match=r"trainer\.attention=cpu does nothing for rows split over ranks"):
        packed_forward(build("qwen3"), batch, attention="cpu", context=ContextGroup(group=None))  # type: ignore[arg-type]


def test_plain_documents_whose_mask_says_otherwise_are_refused(pack: Any, documents: list[list[int]]) -> None:
    batch = pack(documents)
    with pytest.raises(InvariantError, match="kv_end describes a tree"):
        packed_forward(build("qwen3"), replace(batch, kv_end=batch.kv_end - 1), attention="sdpa")
    with pytest.raises(ValueError, match="kv_end"):
        packed_forward(build("qwen3"), replace(batch, kv_end=batch.kv_end - 2), attention="cpu")


def test_bf16_gradients_on_a_cpu_are_computed_in_fp32(pack: Any, documents: list[list[int]]) -> None:
    """The same rounding of inputs and outputs for both, so equal to what the documents alone give."""
    grads = []
    for attention in ("sdpa", "cpu"):
        model = build("qwen3", dtype=torch.bfloat16)
        packed_forward(model, pack(documents), attention=attention).float().square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name in grads[0]:
        torch.testing.assert_close(grads[0][name], grads[1][name], rtol=0.05, atol=0.05)
