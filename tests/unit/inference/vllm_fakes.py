"""Replicas without vLLM: they sample by a rule, and can be lost, hang, or come back with other weights."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

import torch

from swe_rl.config import EngineConfig
from swe_rl.errors import EngineError
from swe_rl.inference.vllm.engine import VllmEngine
from swe_rl.inference.vllm.replica import STILL_OPEN, ReplicaLost
from swe_rl.inference.vllm.requests import ReplicaChunk, ReplicaRequest
from swe_rl.inference.vllm.store import WeightStore, read_tensors
from swe_rl.models.contract import PolicyContract
from swe_rl.ops.weight_delta import checksum

VOCAB, STOP, MAX_CONTEXT = 50, 7, 64


async def eventually(condition: Any) -> None:
    """Waits five seconds for it at most."""
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came")


class FakeReplica:
    """Implements Replica. Token k after n ids is (n + k) % VOCAB, so a turn resumed from its prefix goes on as if
    nothing had happened; its logprob is -0.01 * token. `fail_after` tokens of a request it is lost, once each."""

    def __init__(self, name: str, *, chunk: int = 2, delay_s: float = 0.0) -> None:
        self.name, self.chunk, self.delay_s = name, chunk, delay_s
        self.fail_after: list[int] = []
        self.hang_after: list[int] = []
        self.refuse_start: list[str] = []  # reasons of starts that fail
        self.forget_weights = False  # as a server that was restarted behind the same URL
        self.held = -1
        self.weights: dict[str, torch.Tensor] = {}
        self.requests: list[ReplicaRequest] = []
        self.num_sampled = 0
        self.events: list[str] = []
        self.joined: list[dict[str, Any]] = []  # init info of transfers from GPU to GPU
        self.broadcasts: list[torch.Tensor] = []  # that have come and were not taken yet
        self.die_in_update = False
        self.expects = False  # weights: vLLM's rule of sessions of updates
        self.paused = asyncio.Event()
        self.paused.set()  # set: it computes
        self._aborted: set[str] = set()
        self.up = False

    async def start(self) -> None:
        self.events.append("start")
        await asyncio.sleep(0)
        if self.refuse_start:
            raise EngineError(self.refuse_start.pop(0))
        self.up, self.held, self.expects = True, -1, False

    async def stream(self, request: ReplicaRequest) -> AsyncIterator[ReplicaChunk]:
        self.requests.append(request)
        if not self.up:
            raise ReplicaLost(f"{self.name} is down")
        fail = self.fail_after.pop(0) if self.fail_after else None
        hang = self.hang_after.pop(0) if self.hang_after else None
        ids: list[int] = []
        spans: list[tuple[int, int]] = []
        limit, start = request.sampling["max_tokens"], len(request.prompt_ids)
        while True:
            await asyncio.sleep(self.delay_s)
            await self.paused.wait()
            if request.request_id in self._aborted:
                yield ReplicaChunk(token_ids=[], logprobs=[], finish_reason="abort", spans=spans)
                return
            part = [(start + len(ids) + i) % VOCAB for i in range(min(self.chunk, limit - len(ids)))]
            if STOP in part:
                part = part[: part.index(STOP) + 1]
            if fail is not None and len(ids) + len(part) > fail:
                self.up = False
                raise ReplicaLost(f"{self.name} was killed")
            if hang is not None and len(ids) + len(part) > hang:
                await asyncio.sleep(3600)
            if not spans or spans[-1][1] != self.held:
                spans.append((len(ids), self.held))
            ids += part
            self.num_sampled += len(part)
            done = "stop" if STOP in part else "length" if len(ids) == limit else None
            yield ReplicaChunk(
                token_ids=part,
                logprobs=[-0.01 * token for token in part],
                finish_reason=done,
                spans=spans if done else [],
            )
            if done:
                return

    async def abort(self, request_id: str) -> None:
        self._aborted.add(request_id)

    async def pause(self, *, abort: bool) -> None:
        self.events.append("abort" if abort else "pause")
        self.paused.clear()
        if abort:
            self._aborted |= {request.request_id for request in self.requests}
            self.paused.set()

    async def load(self, info: Mapping[str, Any], *, version: int) -> None:
        self.events.append(f"load {version}")
        self.weights = {name: t.clone() for name, t in read_tensors(info["path"], info["tensors"], version=version)}
        self.held = -1 if self.forget_weights else version
        self.forget_weights = False
        self.paused.set()

    async def join(self, info: Mapping[str, Any]) -> None:
        self.events.append("join")
        self.joined.append(dict(info))

    async def open_update(self) -> None:
        self.events.append("open")
        self.paused.clear()
        if self.expects:
            raise EngineError(STILL_OPEN)
        self.expects = True

    async def update(self, info: Mapping[str, Any]) -> None:
        """As the workers: over NCCL what is broadcast next, over IPC what lies at the handles, here the tensors."""
        self.events.append(f"update {' '.join(info['names'])}")
        if self.die_in_update:
            self.die_in_update = False
            self.up = False
            raise ReplicaLost(f"{self.name} was killed")
        self._check_session()
        for index, name in enumerate(info["names"]):
            while "handles" not in info and not self.broadcasts:
                await asyncio.sleep(0.001)
            tensor = info["handles"][index] if "handles" in info else self.broadcasts.pop(0)
            assert list(tensor.shape) == info["shapes"][index]
            assert str(tensor.dtype)[6:] == info["dtype_names"][index]
            assert checksum(tensor) == int(info["checksums"][index])
            self.weights[name] = tensor.clone()

    async def close_update(self, *, version: int) -> None:
        self.events.append(f"close_update {version}")
        self._check_session()
        self.expects = False
        self.held = version
        self.paused.set()

    async def abandon_update(self) -> None:
        self.events.append("abandon")
        self._check_session()
        self.expects = False

    def _check_session(self) -> None:
        if not self.expects:
            raise EngineError(f"{self.name}: an update without a matching start")

    async def version(self) -> int:
        return self.held

    async def sleep(self, level: int) -> None:
        self.events.append(f"sleep {level}")

    async def wake(self, tags: list[str] | None = None) -> None:
        self.events.append(f"wake {tags}")

    async def alive(self) -> bool:
        return self.up

    async def close(self) -> None:
        self.events.append("close")
        self.up = False


WEIGHTS = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.linspace(-1, 1, 5)}


def fake_engine(*replicas: FakeReplica, dtype: str = "float32", **changes: Any) -> VllmEngine:
    cfg = EngineConfig(backend="vllm", replicas=len(replicas), dtype=dtype, **changes)
    contract = PolicyContract(
        vocab_size=VOCAB,
        stop_ids=(STOP,),
        temperature=1.0,
        max_context=MAX_CONTEXT,
        trainer_dtype="float32",
        engine_dtype=dtype,
        rope={},
    )
    store = WeightStore({name: tensor.shape for name, tensor in WEIGHTS.items()}, dtype=dtype)
    return VllmEngine(replicas, cfg, contract=contract, store=store)
