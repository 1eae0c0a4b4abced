"""Messages to token ids, once, for each family of chat models. What was sampled is kept as ids and is never turned into
text and back."""

from __future__ import annotations

from typing import Any

from swe_rl.agents.rendering.base import Renderer, Tokenizer, token_id
from swe_rl.agents.rendering.chatml import ChatRenderer
from swe_rl.agents.rendering.harmony import HarmonyRenderer
from swe_rl.agents.rendering.llama3 import Llama3Renderer, Llama31Renderer
from swe_rl.errors import ConfigError

__all__ = [
    "ChatRenderer",
    "HarmonyRenderer",
    "Llama3Renderer",
    "Llama31Renderer",
    "Renderer",
    "Tokenizer",
    "make_renderer",
]


def make_renderer(tokenizer: Any, *, thinking: str = "accumulated", observations: str = "user") -> Renderer:
    """The renderer for the family that the tokenizer's special tokens name.

    Llama 3.0 and 3.1 have the same tokens; the chat template tells them apart, and 3.1 is taken without one. Raises
    ConfigError for a tokenizer of no known family, or for settings that the family does not have.
    """
    if token_id(tokenizer, "<|im_start|>") is not None:
        return ChatRenderer(tokenizer, thinking=thinking, observations=observations)
    return _other_family(tokenizer, thinking, observations)


def _other_family(tokenizer: Any, thinking: str, observations: str) -> Renderer:
    if observations != "user":
        raise ConfigError(f"agent.observations={observations} is for ChatML models (Qwen): set agent.observations=user")
    if token_id(tokenizer, "<|channel|>") is not None and token_id(tokenizer, "<|return|>") is not None:
        return HarmonyRenderer(tokenizer, thinking=thinking)
    if token_id(tokenizer, "<|start_header_id|>") is None:
        return ChatRenderer(tokenizer)  # says which tokens are missing
    if thinking != "accumulated":
        raise ConfigError(f"agent.thinking={thinking}: Llama 3 does not think: set agent.thinking=accumulated")
    template = getattr(tokenizer, "chat_template", None)
    old = isinstance(template, str) and "Today Date" not in template
    return Llama3Renderer(tokenizer) if old else Llama31Renderer(tokenizer)
