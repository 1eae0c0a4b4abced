"""What trainer and engine must agree on, in one record that both are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from swe_rl.config import EngineConfig, ModelConfig
from swe_rl.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

HEAD_DTYPE = "float32"  # logits are fp32 products on both sides, whatever the body computes in
# nats, mean |trainer - engine| of the logprobs of sampled tokens. In fp32 only the order of sums differs; in bf16 both
# round after every operation, each in its own order.
BOUND_EXACT, BOUND_ROUNDED = 1e-3, 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyContract:
    """One policy, whoever computes it. `rope` is transformers' rope_parameters, as both sides read it."""

    vocab_size: int  # rows of the head
    stop_ids: tuple[int, ...]
    temperature: float
    max_context: int  # tokens of prompt and completion
    trainer_dtype: str
    engine_dtype: str
    rope: Mapping[str, Any]
    head_dtype: str = HEAD_DTYPE

    @property
    def bound(self) -> float:
        """How far the two may be apart: mean |difference of logprobs|, nats."""
        exact = self.trainer_dtype == self.engine_dtype == "float32"
        return BOUND_EXACT if exact else BOUND_ROUNDED

    @property
    def original_context(self) -> int:
        """Tokens beyond which a stretched rotary embedding is at work; 0 when it is not stretched."""
        return int(self.rope.get("original_max_position_embeddings") or 0)


def policy_contract(
    config: PretrainedConfig,
    *,
    model: ModelConfig,
    engine: EngineConfig,
    stop_ids: tuple[int, ...],
    temperature: float,
    max_context: int,
    tokenizer_size: int,
) -> PolicyContract:
    """The contract of a loaded model. Raises ConfigError when its tokenizer has ids that the head has no row for."""
    rows: int = config.vocab_size
    if tokenizer_size > rows or max(stop_ids, default=0) >= rows:
        raise ConfigError(
            f"model.name={model.name!r}: the tokenizer has {tokenizer_size} ids, the output head {rows} rows: they "
            "are of different models"
        )
    return PolicyContract(
        vocab_size=rows,
        stop_ids=stop_ids,
        temperature=temperature,
        max_context=max_context,
        trainer_dtype=model.dtype,
        engine_dtype=engine.dtype,
        rope=dict(getattr(config, "rope_parameters", None) or {}),
    )
