"""Which tokens to compute next. Synchronous and single-threaded; inference.embedded drives it from one thread.

An episode (session) owns a slot from its first request until it is released. The keys and values of its context stay
there, so a token is computed once: `Session.ids` are the ids whose keys and values are in the slot, and a request
computes only what lies behind them. The last token of the context is the input of the next decode step. Sessions
without a slot wait; when every slot is owned and no request runs, the session that was idle longest loses its slot and
is recomputed when it comes back, so nothing can wait forever.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field

import numpy as np
import torch
from torch import Tensor

from swe_rl.errors import EngineError, InvariantError
from swe_rl.inference.runner import Chunk, SlotRunner
from swe_rl.inference.sampling import sample, uniforms
from swe_rl.inference.weight_update import UpdatePlan, WeightBucket, WeightInbox
from swe_rl.protocols import SamplingParams
from swe_rl.types import Completion

MIN_SHARED = 16  # tokens; shorter common prefixes are computed again


@dataclass(slots=True)
class EngineCounters:
    """Since the engine was made."""

    tokens_computed: int = 0  # went through the model, recomputation included, padding not
    tokens_padded: int = 0
    tokens_sampled: int = 0
    tokens_shared: int = 0  # copied from another session's slot instead of being computed
    recomputed: int = 0  # part of tokens_computed: had been computed before
    decode_steps: int = 0  # forward passes that sampled
    forward_calls: int = 0
    preemptions: int = 0  # slots taken from idle sessions
    prefix_breaks: int = 0  # prompts that did not start with what their session had computed

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass(slots=True, eq=False)
class Request:
    session: str
    prompt_ids: list[int]
    params: SamplingParams
    deliver: Callable[[Completion | Exception], None]
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    version_first: int = -1
    version_last: int = -1


@dataclass(slots=True, eq=False)
class Session:
    name: str
    slot: int | None = None
    ids: list[int] = field(default_factory=list)  # computed under the present weights and resident in `slot`
    high_water: int = 0  # ids computed at least once for this session's present context
    request: Request | None = None
    context: list[int] = field(default_factory=list)  # prompt and sampled tokens of the running request
    last_used: int = 0

    @property
    def num_pending(self) -> int:
        """Tokens to prefill before the last one of the context can be decoded."""
        return len(self.context) - 1 - len(self.ids)


class SlotScheduler:
    """`submit`, `cancel`, `release`, `load_weights` and the three calls of an update between steps; `step` while
    `has_work`."""

    def __init__(self, runner: SlotRunner, *, policy_version: int = 0) -> None:
        self.runner = runner
        self.policy_version = policy_version
        self.counters = EngineCounters()
        self._sessions: dict[str, Session] = {}
        self._free = list(range(runner.num_slots))
        self._waiting: list[Session] = []  # have a request but no slot, first come first served
        self._running: list[Session] = []  # have a request and a slot
        self._clock = 0
        self._inbox: WeightInbox | None = None  # made with the first update
        self._plan: UpdatePlan | None = None
        self._aside: list[WeightBucket] = []  # of an update that leaves requests running
        self._standing = False  # no step while weights are neither the old nor the new ones

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting) and not self._standing

    def submit(self, request: Request) -> None:
        """Queues a request; its errors are delivered, not raised."""
        session = self._sessions.setdefault(request.session, Session(request.session))
        if session.request is not None:
            request.deliver(EngineError(f"session {request.session!r} already has a request running"))
            return
        session.request, session.context = request, list(request.prompt_ids)
        keep = min(_common_prefix(session.ids, session.context), len(session.context) - 1)
        if keep < len(session.ids):  # a different continuation: what follows is new
            self.counters.prefix_breaks += 1
            session.high_water = keep
        del session.ids[keep:]
        (self._running if session.slot is not None else self._waiting).append(session)

    def cancel(self, request: Request) -> None:
        """Ends a request with what it has; its session stays. Does nothing when it is over already."""
        session = self._sessions.get(request.session)
        if session is not None and session.request is request:
            self._finish(session, "cancelled")

    def release(self, name: str) -> None:
        """Forgets a session and frees its slot; a running request is cancelled. Idempotent."""
        session = self._sessions.pop(name, None)
        if session is None:
            return
        if session.request is not None:
            self._finish(session, "cancelled")
        if session.slot is not None:
            self._free.append(session.slot)

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """New weights: every cached key and value is forgotten, running requests are recomputed and go on."""
        self.runner.load_weights(weights)
        if self._inbox is not None:
            self._inbox.forget()
        self._use(version)

    def start_update(self, plan: UpdatePlan) -> bool:
        """As WeightReceiver.start_weight_update."""
        if self._inbox is None:
            self._inbox = WeightInbox(self.runner.parameters)
        if not self._inbox.start(plan):
            return False
        if plan.in_flight == "abort":
            self.fail_all(EngineError(f"aborted: version {plan.version} of the weights is on its way"))
        self._standing = self._standing or plan.in_flight != "keep"
        self._plan, self._aside = plan, []
        return True

    def receive(self, bucket: WeightBucket) -> None:
        """Writes a bucket, or keeps it until the update is finished if requests go on meanwhile."""
        if self._standing:
            self._started().receive(bucket)
        else:
            self._aside.append(bucket)

    def finish_update(self, checksums: Mapping[str, int]) -> list[str]:
        """As WeightReceiver.finish_weight_update."""
        inbox, plan = self._started(), self._plan
        assert plan is not None  # with the inbox
        for bucket in self._aside:
            inbox.receive(bucket)
        self._aside = []
        wrong = inbox.finish(checksums)
        self._standing = bool(wrong)
        if not wrong:
            self.runner.weights_changed()
            self._use(plan.version)
        return wrong

    def _started(self) -> WeightInbox:
        if self._inbox is None:
            raise EngineError("a weight update goes on that was not started")
        return self._inbox

    def _use(self, version: int) -> None:
        self.policy_version = version
        self._standing = False
        for session in self._sessions.values():
            session.ids.clear()

    def fail_all(self, error: Exception) -> None:
        """Delivers `error` to every request; sessions stay."""
        for session in [*self._running, *self._waiting]:
            request, session.request = session.request, None
            if request is not None:
                request.deliver(error)
        self._running.clear()
        self._waiting.clear()

    def step(self) -> None:
        """One forward call: a decode token of every session that is ready, and prefill tokens in the rows left."""
        self._admit()
        decoding = sorted((s for s in self._running if s.num_pending == 0), key=_slot)
        decode = [Chunk(_slot(s), len(s.ids), s.context[-1:]) for s in decoding]
        prefill, prefilling = self._plan_prefill(room=self.runner.row_counts[-1] - len(decode))
        if not decode and not prefill:
            return
        logits, padding = self.runner.forward(decode, prefill)
        self._count(padding, [*zip(decoding, decode, strict=True), *zip(prefilling, prefill, strict=True)])
        if decode:
            self._sample(logits, decoding)

    def _admit(self) -> None:
        """Gives slots to waiting sessions."""
        while self._waiting:
            if not self._free and not self._running:
                self._preempt()
            if not self._free:
                return
            session = self._waiting.pop(0)
            slot = min(self._free)  # low slots first: the attention of a decode step runs over neighbours
            self._free.remove(slot)
            session.slot = slot
            self._running.append(session)

    def _preempt(self) -> None:
        owners = [s for s in self._sessions.values() if s.slot is not None and s.request is None]
        if not owners:
            return
        victim = min(owners, key=lambda s: s.last_used)
        self._free.append(_slot(victim))
        victim.slot = None
        victim.ids.clear()
        self.counters.preemptions += 1

    def _plan_prefill(self, *, room: int) -> tuple[list[Chunk], list[Session]]:
        chunks: list[Chunk] = []
        sessions: list[Session] = []
        for session in self._running:
            if session.num_pending > 0 and not session.ids and self._share_prefix(session):
                continue
            count = min(session.num_pending, room)
            if count > 0:
                start = len(session.ids)
                chunks.append(Chunk(_slot(session), start, session.context[start : start + count]))
                sessions.append(session)
                room -= count
        return chunks, sessions

    def _share_prefix(self, session: Session) -> bool:
        """Copies the longest computed prefix that another slot holds; True when it is better to wait for one.

        The episodes of a group start from one prompt, so it is computed once. Only a session that is earlier in the
        queue is waited for, and the first waits for nobody.
        """
        limit = len(session.context) - 1
        donors = [(_common_prefix(s.ids, session.context), s) for s in self._sessions.values() if s.ids]
        length, donor = max(donors, key=lambda pair: pair[0], default=(0, None))
        earlier = self._running[: self._running.index(session)]
        coming = max((_common_prefix(s.context, session.context) for s in earlier if s.num_pending > 0), default=0)
        if min(coming, limit) >= length + MIN_SHARED:
            return True
        length = min(length, limit)
        if donor is not None and length >= MIN_SHARED:
            self.runner.cache.copy_prefix(source=_slot(donor), target=_slot(session), length=length)
            session.ids = session.context[:length]
            session.high_water = max(session.high_water, length)
            self.counters.tokens_shared += length
        return False

    def _count(self, padding: int, done: list[tuple[Session, Chunk]]) -> None:
        self.counters.forward_calls += 1
        self.counters.tokens_padded += padding
        for session, chunk in done:
            session.ids.extend(chunk.ids)
            self.counters.tokens_computed += len(chunk.ids)
            self.counters.recomputed += max(0, min(session.high_water, len(session.ids)) - chunk.start)
            session.high_water = max(session.high_water, len(session.ids))

    def _sample(self, logits: Tensor, sessions: list[Session]) -> None:
        """Draws the next token of each decoded session and ends the requests that are complete."""
        requests = [s.request for s in sessions if s.request is not None]
        seeds = np.array([r.params.seed & (2**64 - 1) for r in requests], dtype=np.uint64)
        counters = np.array([len(r.token_ids) for r in requests], dtype=np.uint64)
        temperatures = torch.tensor([r.params.temperature for r in requests], device=logits.device)
        draws = torch.from_numpy(uniforms(seeds, counters)).to(logits.device)
        ids, logprobs = sample(logits[: len(requests)], temperatures, draws)
        self.counters.decode_steps += 1
        self.counters.tokens_sampled += len(requests)
        for session, token, logprob in zip(sessions, ids.tolist(), logprobs.tolist(), strict=True):
            self._append(session, token, logprob)

    def _append(self, session: Session, token: int, logprob: float) -> None:
        request = session.request
        if request is None:
            return
        if not math.isfinite(logprob):
            raise InvariantError(
                f"non-finite logprob in session {session.name!r}, policy version {self.policy_version}"
            )
        if request.version_first < 0:
            request.version_first = self.policy_version
        request.version_last = self.policy_version
        request.token_ids.append(token)
        request.logprobs.append(logprob)
        session.context.append(token)
        if token in request.params.stop_ids:
            self._finish(session, "stop")
        elif len(request.token_ids) >= request.params.max_new_tokens or len(session.context) >= self.runner.max_context:
            self._finish(session, "length")

    def _finish(self, session: Session, reason: str) -> None:
        request = session.request
        if request is None:
            return
        session.request = None
        (self._running if session.slot is not None else self._waiting).remove(session)
        self._clock += 1
        session.last_used = self._clock
        version = self.policy_version
        request.deliver(
            Completion(
                token_ids=request.token_ids,
                rollout_logprobs=request.logprobs,
                finish_reason=reason,  # type: ignore[arg-type]
                policy_version=request.version_first if request.token_ids else version,
                policy_version_max=request.version_last if request.token_ids else version,
            )
        )


def _slot(session: Session) -> int:
    if session.slot is None:
        raise InvariantError(f"session {session.name!r} runs without a slot")
    return session.slot


def _common_prefix(a: list[int], b: list[int]) -> int:
    n = min(len(a), len(b))
    if a[:n] == b[:n]:
        return n
    return next(i for i in range(n) if a[i] != b[i])
