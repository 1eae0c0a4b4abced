"""What a token costs a model, as far as the choice of a layout and the balance between ranks need it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel


def pair_cost(model: PreTrainedModel) -> float:
    """FLOPs of attention for one (query, key) pair over those of the matrix products of one token, in all layers.

    A pair takes 2 multiply-adds per element of every query head (scores and values), a token one per weight of the
    layers; forward and backward have the same ratio within a quarter. Weights of experts that a token does not visit
    count as well, so mixtures of experts look more expensive per token than they are.
    """
    config = model.config.get_text_config()
    heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    embeddings = {
        id(p)
        for part in (model.get_input_embeddings(), model.get_output_embeddings())
        if part is not None
        for p in part.parameters()
    }
    weights = sum(p.numel() for p in model.parameters() if p.ndim >= 2 and id(p) not in embeddings)
    return 2.0 * heads * head_dim * config.num_hidden_layers / max(weights, 1)
