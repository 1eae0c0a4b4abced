"""One turn while it is sampled: what came back so far, and the request that asks for the rest."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from swe_rl.errors import EngineError, InvariantError
from swe_rl.inference.vllm.requests import ReplicaChunk, ReplicaRequest, sampling_fields
from swe_rl.models.routing import encode_routing
from swe_rl.protocols import SamplingParams
from swe_rl.types import Completion

RESEED = 0x9E3779B97F4A7C15  # odd: the seeds of the parts of one turn differ


@dataclass(slots=True, eq=False)
class TurnProgress:
    """A turn may take several requests: its replica was lost, or the request was aborted by a weight update."""

    session: str
    prompt_ids: list[int]
    params: SamplingParams
    limit: int  # tokens at most
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_first: int = -1
    version_last: int = -1
    parts: int = 0  # requests made
    cached_tokens: int = 0  # of the first part's prompt
    finish_reason: str = ""  # "" while under way
    released: bool = False  # nobody wants the rest
    request_id: str = ""  # of the part under way
    routing_start: int | None = None  # position of the first token whose experts are asked for; None: nobody asks
    routed_experts: list[Any] = field(default_factory=list)  # of the tokens since then, a piece per part that said so
    _part_start: int = 0  # index of the first token of the part under way
    _part_pieces: int = 0  # of routed_experts before it

    def next_request(self, request_id: str, *, version: int) -> ReplicaRequest:
        """Asks for what is missing, after the prompt and the tokens that are there."""
        seed = (self.params.seed + self.parts * RESEED) & (2**63 - 1)
        self.parts += 1
        self.request_id, self._part_start = request_id, len(self.token_ids)
        self._part_pieces = len(self.routed_experts)
        start = None if self.routing_start is None else self.routing_start + sum(map(len, self.routed_experts))
        return ReplicaRequest(
            request_id=request_id,
            prompt_ids=[*self.prompt_ids, *self.token_ids],
            sampling=sampling_fields(
                self.params, max_tokens=self.limit - len(self.token_ids), seed=seed, routing_start=start
            ),
            cache_salt=f"v{version}",
        )

    def add(self, chunk: ReplicaChunk, *, version: int) -> None:
        """Takes the next tokens. `version` is the replica's, for a part that ends before it can say so itself.

        Raises InvariantError for logprobs that are not finite or do not belong to the ids, EngineError for a part that
        vLLM ended by a failure of its own: what it sampled until then is no answer.
        """
        if chunk.finish_reason not in (None, "stop", "length", "abort"):
            raise EngineError(f"vLLM ended a request of session {self.session!r} with {chunk.finish_reason!r}")
        if len(chunk.token_ids) != len(chunk.logprobs):
            raise InvariantError(f"vLLM returned {len(chunk.token_ids)} ids with {len(chunk.logprobs)} logprobs")
        if not all(map(math.isfinite, chunk.logprobs)):
            raise InvariantError(f"non-finite logprob in session {self.session!r}, policy version {version}")
        if self.parts == 1:
            self.cached_tokens = max(self.cached_tokens, chunk.cached_tokens)
        if chunk.routed_experts is not None:
            self.routed_experts.append(chunk.routed_experts)
        self.token_ids += chunk.token_ids
        self.logprobs += chunk.logprobs
        if chunk.token_ids or (chunk.spans and self.token_ids):
            self._stamp([v for _, v in chunk.spans], version)
        if chunk.finish_reason is not None and (chunk.finish_reason != "abort" or self.released):
            self.finish_reason = "cancelled" if chunk.finish_reason == "abort" else chunk.finish_reason
        if not self.finish_reason and len(self.token_ids) >= self.limit:
            self.finish_reason = "length"

    def _stamp(self, spans: list[int], version: int) -> None:
        """`spans`: versions of the whole part under way, with its last chunk only; `version` holds until then."""
        if self.version_first < 0 or (spans and self._part_start == 0):
            self.version_first = spans[0] if spans else version
        self.version_last = spans[-1] if spans else version

    def drop_part(self) -> None:
        """Forgets the tokens of the part under way: they were sampled by other weights than those asked for."""
        del self.token_ids[self._part_start :]
        del self.logprobs[self._part_start :]
        del self.routed_experts[self._part_pieces :]
        self.finish_reason = ""
        if not self.token_ids:
            self.version_first = self.version_last = -1

    def routing(self) -> str:
        """The experts of the tokens from `routing_start` to the last but one, encoded; "" when nobody asked."""
        if self.routing_start is None or not self.routed_experts:
            return ""
        return encode_routing(np.concatenate(self.routed_experts), first=self.routing_start)

    def completion(self, *, version: int) -> Completion:
        """What was sampled. `version` is for a turn that was ended before its first token."""
        return Completion(
            token_ids=self.token_ids,
            rollout_logprobs=self.logprobs,
            finish_reason=self.finish_reason,  # type: ignore[arg-type]
            policy_version=self.version_first if self.token_ids else version,
            policy_version_max=self.version_last if self.token_ids else version,
            routing=self.routing(),
        )
