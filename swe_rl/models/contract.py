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
# nats, of the logprobs of sampled tokens: mean |trainer - engine|, and |mean (trainer - engine)|.
# In fp32 only the order of sums differs: 1e-5 on SmolLM2-135M. In bf16 both round after every operation, each in its
# own order. Measured on SmolLM2-135M (30 layers), 48 tokens sampled by vLLM on a CPU after 24 random ids and after 200
# ids of code, against an fp32 forward of the same bf16 weights:
#   trainer 0.034 and 0.030, vLLM 0.035 and 0.026 (0.040 and 0.027 where the same ids are a prompt), between them 0.042
#   and 0.031; hidden states are off by 0.4 % after the first layer and by 1.4 to 1.8 % after the last, on both sides.
#   vLLM itself gives the same ids, sampled or read as a prompt, logprobs that are 0.031 and 0.026 apart.
# So no operation stands out, and no trainer can be nearer to an engine than that is to fp32: one that keeps its
# residual stream in fp32 (0.026 and 0.014 from fp32) is still 0.046 and 0.029 from vLLM. The bound is 1.5 times the
# larger error of one side: what two independent roundings of that size differ by, and a little. The mean with its sign
# has no such floor: rounding has no sign; a temperature, a cut distribution or a dropped factor has.
BOUND_EXACT, BOUND_ROUNDED = 1e-3, 0.06
BIAS_EXACT, BIAS_ROUNDED = 1e-3, 0.02


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
        return BOUND_EXACT if self.exact else BOUND_ROUNDED

    @property
    def bias_bound(self) -> float:
        """How large the mean difference, with its sign, may be, nats."""
        return BIAS_EXACT if self.exact else BIAS_ROUNDED

    @property
    def exact(self) -> bool:
        """Both sides compute in fp32."""
        return self.trainer_dtype == self.engine_dtype == "float32"

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
