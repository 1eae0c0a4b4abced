"""What is asked of a vLLM replica and what comes back, as plain data: the same for a process, a server and a Ray actor.

Every sampling parameter is written out: a default of vLLM, or of a model's generation_config.json, never decides
(top_k=20 of Qwen's has ruined published runs).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from swe_rl.errors import InvariantError
from swe_rl.protocols import SamplingParams

STREAM_INTERVAL = 8  # tokens per message: what is lost and sampled again when a replica dies is less than this


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRequest:
    """One request to one replica. Several may serve one turn, each from the prefix that the one before left."""

    request_id: str
    prompt_ids: list[int]
    sampling: Mapping[str, Any]  # keyword arguments of vLLM's SamplingParams
    cache_salt: str  # blocks of the prefix cache are shared among equal salts only; holds the version of the weights


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaChunk:
    """The next sampled tokens of a request."""

    token_ids: list[int]
    logprobs: list[float]  # of the sampled ids
    finish_reason: str | None = None  # "stop", "length" or "abort" with the last chunk
    cached_tokens: int = 0  # of the prompt, taken from the prefix cache
    routed_experts: Any = (
        None  # last chunk: integers [n, layers, experts per token] of the tokens from routing_start on
    )
    spans: list[tuple[int, int]] = field(default_factory=list)  # last chunk: (first token, version) where it changes


def sampling_fields(
    params: SamplingParams, *, max_tokens: int, seed: int, routing_start: int | None = None
) -> dict[str, Any]:
    """Keyword arguments of vLLM's SamplingParams, none of those that shape the distribution left out."""
    return {
        **({} if routing_start is None else {"routed_experts_prompt_start": routing_start}),
        "n": 1,
        "temperature": params.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        "seed": seed & (2**63 - 1),
        "stop_token_ids": list(params.stop_ids),
        "ignore_eos": True,  # the contract's stop ids decide, not the model's configuration
        "min_tokens": 0,
        "max_tokens": max_tokens,
        "logprobs": 0,  # of the sampled token alone
        "detokenize": False,
        "skip_special_tokens": False,
        "stream_interval": STREAM_INTERVAL,
    }


def sampled_logprobs(token_ids: Sequence[int], per_position: Sequence[Mapping[int, Any]]) -> list[float]:
    """The logprob of each sampled id, looked up by id: the first entry of a position need not be the sampled token.

    `per_position` maps ids to objects with a `logprob`. Raises InvariantError when one is missing.
    """
    if len(per_position) != len(token_ids):
        raise InvariantError(f"vLLM returned {len(token_ids)} ids with {len(per_position)} logprobs")
    found = [position.get(token) for token, position in zip(token_ids, per_position, strict=True)]
    if None in found:
        raise InvariantError(f"vLLM returned no logprob for sampled token {token_ids[found.index(None)]}")
    return [float(entry.logprob) for entry in found]  # type: ignore[union-attr]
