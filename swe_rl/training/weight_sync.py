"""From the trainer to the engines: one version of the weights at a time.

    publisher = WeightPublisher(backend, [engine], mode="delta", dtype="bfloat16")
    report = await publisher.publish()          # the engine holds backend.policy_version, bit by bit

Start, buckets, finish (inference.weight_update). While one bucket is sent the next one is compared and gathered. A
delta that an engine cannot use (it lost a version, or its checksums differ afterwards) is followed by everything.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from swe_rl.errors import ConfigError, EngineError, SweRlError
from swe_rl.inference.weight_update import IN_FLIGHT, UpdatePlan, WeightBucket, WeightReceiver
from swe_rl.protocols import TrainerBackend
from swe_rl.training import mesh
from swe_rl.training.weight_source import SyncTotals, WeightSource

log = logging.getLogger(__name__)

MODES = ("full", "delta")
BUCKET_BYTES = 256 << 20


class WholeReceiver(Protocol):
    """An engine that takes all weights in one call; every token it samples afterwards carries `version`."""

    async def update_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Copies what it needs before it returns: the trainer changes these tensors in its next step."""
        ...


async def publish(backend: TrainerBackend, engine: WholeReceiver, *, version: int | None = None) -> int:
    """Gives the engine of this rank the trainer's current full weights and returns their version.

    `version` defaults to backend.policy_version. Collective: under torchrun every rank publishes to its own engine.
    """
    published = backend.policy_version if version is None else version
    await engine.update_weights(await mesh.in_thread(backend.weights), published)
    return published


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """What one `publish` did. Shares are of the bytes and elements of a dense update; of all ranks."""

    version: int
    delta: bool  # False: everything was sent
    resync: str  # why everything was sent although a delta was due; empty otherwise
    num_changed: int
    num_elements: int
    sent_bytes: int
    full_bytes: int
    seconds: float

    def metrics(self) -> dict[str, float]:
        """For the metrics of a step."""
        return {
            "sync/seconds": self.seconds,
            "sync/bytes": float(self.sent_bytes),
            "sync/byte_share": self.sent_bytes / max(self.full_bytes, 1),
            "sync/changed_share": self.num_changed / max(self.num_elements, 1),
            "sync/resync": float(bool(self.resync)),
        }


class WeightPublisher:
    """Sends versions of `backend`'s weights to the engines of this rank, none of which need be here (an empty list).

    mode: "full", or "delta": only the elements whose rounded value changed, when every engine holds the version before.
    dtype: of the engines' weights. in_flight: the default of `publish`. bucket_bytes bounds what is gathered and sent
    at once. Collective under torchrun: every rank makes one and publishes, also a rank without an engine.
    Raises ConfigError for a delta of fp32 weights, whose every element changes.
    """

    def __init__(
        self,
        backend: Any,
        engines: Sequence[WeightReceiver],
        *,
        mode: str = "full",
        dtype: str = "float32",
        in_flight: str = "keep",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        if mode not in MODES:
            raise ConfigError(f"mode={mode!r} is unknown: use one of {', '.join(MODES)}")
        if mode == "delta" and dtype != "bfloat16":
            raise ConfigError(f"mode=delta saves nothing with dtype={dtype}: set dtype=bfloat16 or mode=full")
        self.backend, self.engines, self.mode, self.dtype = backend, list(engines), mode, dtype
        self.in_flight, self._bucket_bytes = in_flight, bucket_bytes
        self._stream = uuid.uuid4().hex
        self._masters: Any = None
        self._source: WeightSource | None = None
        self._last: int | None = None  # the version that all engines hold and deltas are taken against
        self.report: SyncReport | None = None

    async def publish(self, *, version: int | None = None, in_flight: str | None = None) -> SyncReport:
        """Brings the engines to the trainer's present weights, under `version` (default: backend.policy_version).

        in_flight: what becomes of running requests, see UpdatePlan (default: what the publisher was made with). Raises
        EngineError when an engine failed or its checksums differ even after everything was sent: on every rank, so
        that none waits for another.
        """
        in_flight = self.in_flight if in_flight is None else in_flight
        if in_flight not in IN_FLIGHT:
            raise ConfigError(f"in_flight={in_flight!r} is unknown: use one of {', '.join(IN_FLIGHT)}")
        started = time.perf_counter()
        number = self.backend.policy_version if version is None else version
        source = self._current_source()
        base, self._last, why = self._last, None, ""
        if self.mode == "delta" and base is not None:
            totals, why = await self._update(source, number, base=base, in_flight=in_flight)
            if why:
                log.warning("version %d is sent as a whole: %s", number, why)
        if self.mode == "full" or base is None or why:
            totals, problem = await self._update(source, number, base=None, in_flight=in_flight)
            if problem:
                raise EngineError(f"version {number} of the weights did not arrive: {problem}")
        self._last = number
        self.report = SyncReport(
            version=number,
            delta=self.mode == "delta" and base is not None and not why,
            resync=why,
            num_changed=totals.num_changed,
            num_elements=totals.num_elements,
            sent_bytes=totals.sent_bytes,
            full_bytes=totals.full_bytes,
            seconds=time.perf_counter() - started,
        )
        return self.report

    def _current_source(self) -> WeightSource:
        """Of the backend's present masters: a phase with another dtype has new ones. A backend whose masters are no
        shards of whole tensors makes its own source."""
        make = getattr(self.backend, "weight_source", None)
        if make is not None:
            if self._source is None:
                remember = self.mode == "delta"
                self._source = make(dtype=self.dtype, bucket_bytes=self._bucket_bytes, remember=remember)
            return self._source
        masters = self.backend.masters.params
        if self._source is None or masters is not self._masters:
            self._masters, self._last = masters, None
            self._source = WeightSource(
                masters, dtype=self.dtype, bucket_bytes=self._bucket_bytes, remember=self.mode == "delta"
            )
        return self._source

    async def _update(
        self, source: WeightSource, version: int, *, base: int | None, in_flight: str
    ) -> tuple[SyncTotals, str]:
        """One whole update or delta. (what was sent, why it failed), the reason being the same on every rank."""
        plan = UpdatePlan(
            version=version,
            base_version=base,
            stream=self._stream,
            dtype=self.dtype,
            shapes=source.shapes,
            in_flight=in_flight,
        )
        totals = SyncTotals()
        if why := await self._agreed(await self._each(lambda engine: self._start(engine, plan))):
            return totals, why
        if why := await self._agreed(await self._send(source, totals, delta=base is not None)):
            return totals, why
        return totals, await self._agreed(await self._each(lambda engine: self._finish(engine, totals.checksums)))

    async def _start(self, engine: WeightReceiver, plan: UpdatePlan) -> str:
        ready = await engine.start_weight_update(plan)
        return "" if ready else f"an engine does not hold version {plan.base_version}"

    async def _send(self, source: WeightSource, totals: SyncTotals, *, delta: bool) -> str:
        """Sends bucket after bucket, the next one being made meanwhile. After a failure the rest is made and dropped:
        other ranks wait for this one's part of it."""
        buckets = source.buckets(totals, delta=delta)
        coming = asyncio.ensure_future(mesh.in_thread(next, buckets, None))
        failed = ""
        while (bucket := await coming) is not None:
            coming = asyncio.ensure_future(mesh.in_thread(next, buckets, None))
            if not failed:
                failed = await self._each(lambda engine, bucket=bucket: self._receive(engine, bucket))  # type: ignore[misc]
        return failed

    async def _receive(self, engine: WeightReceiver, bucket: WeightBucket) -> str:
        await engine.receive_weights(bucket)
        return ""

    async def _finish(self, engine: WeightReceiver, checksums: Mapping[str, int]) -> str:
        wrong = await engine.finish_weight_update(checksums)
        return f"{len(wrong)} tensors of an engine differ from the trainer's, {wrong[0]} for one" if wrong else ""

    async def _each(self, call: Callable[[WeightReceiver], Awaitable[str]]) -> str:
        """The first complaint of any engine of this rank; all are asked."""
        answers = await asyncio.gather(*(call(engine) for engine in self.engines), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, SweRlError):
                raise answer
        complaints = (a if isinstance(a, str) else str(a) or type(a).__name__ for a in answers)
        return next((complaint for complaint in complaints if complaint), "")

    async def _agreed(self, problem: str) -> str:
        """The first rank's problem that has one, on every rank; empty when none has. Collective."""
        if mesh.world_size() == 1:
            return problem
        return next((found for found in await mesh.in_thread(mesh.gather_objects, [problem]) if found), "")
