"""One update as each kind of replica tells it to vLLM: in one call, and in parts as it comes from another GPU."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swe_rl.errors import EngineError
from swe_rl.inference.vllm.local import LocalReplica
from swe_rl.inference.vllm.replica import ReplicaLost
from swe_rl.inference.vllm.server import ServerReplica

ACTIVE = "start_weight_update called while a weight update is already active. Call finish_weight_update first."


class FakeLLM:
    """Says what it was asked; `kept` blocks of the prefix cache cannot be dropped; `active` is vLLM's rule."""

    errored = False

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.paused, self.kept, self.active = False, False, False

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self.log.append(("pause", mode, clear_cache))

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.log.append(("init", request.init_info))

    async def start_weight_update(self) -> None:
        self.log.append("start")
        if self.active:
            raise RuntimeError(ACTIVE)
        self.active = True

    async def update_weights(self, request: Any) -> None:
        self.log.append(("update", request.update_info))

    async def finish_weight_update(self, version: str | None = None) -> None:
        self.log.append(("finish", version))
        self.active = False

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.log.append(("reset", reset_running_requests))
        return not self.kept

    async def resume_generation(self) -> None:
        self.paused = False
        self.log.append("resume")


@pytest.fixture
def local(monkeypatch: pytest.MonkeyPatch) -> LocalReplica:
    name = "vllm.distributed.weight_transfer.base"
    records: Any = ModuleType(name)
    records.WeightTransferInitRequest = records.WeightTransferUpdateRequest = SimpleNamespace
    for end in range(1, 4):
        parent = ".".join(name.split(".")[:end])
        monkeypatch.setitem(sys.modules, parent, ModuleType(parent))
    monkeypatch.setitem(sys.modules, name, records)
    replica = LocalReplica("r0", {})
    replica._llm = FakeLLM()
    return replica


LOADED = ["start", ("update", {"path": "p"}), ("finish", "4"), ("reset", True), "resume"]


async def test_in_this_process(local: LocalReplica) -> None:
    await local.load({"path": "p"}, version=4)
    assert local._llm.log == [("pause", "keep", False), *LOADED]
    local._llm.log.clear()
    await local.pause(abort=True)
    await local.load({"path": "p"}, version=4)
    assert local._llm.log == [("pause", "abort", False), *LOADED], "what stands still is not paused again"
    local._llm.log.clear()
    await local.join({"packed": False})
    await local.open_update()
    await local.update({"names": ["a"]})
    await local.abandon_update()
    assert local._llm.log == [
        *(
            ("init", {"packed": False}),
            ("pause", "keep", False),
            "start",
            ("update", {"names": ["a"]}),
            ("finish", None),
        ),
    ]
    assert local._llm.paused


async def test_old_blocks_that_stay_are_an_error(local: LocalReplica) -> None:
    local._llm.kept = True
    with pytest.raises(EngineError, match="r0: the prefix cache of older weights could not be dropped"):
        await local.load({"path": "p"}, version=4)
    assert local._llm.paused


async def test_an_update_that_was_left_open_holds_up_no_other(local: LocalReplica) -> None:
    """Its trainer has ended, or its load was cancelled."""
    local._llm.active = local._llm.paused = True
    await local.load({"path": "p"}, version=4)
    assert local._llm.log == ["start", ("finish", None), *LOADED]
    server = ServerReplica("r0", url="http://a:1")
    server._http = http = FakeHttp()
    await server.open_update()
    http.paths.clear()
    await server.load({"path": "p"}, version=4)
    start, finish = "start_weight_update", "finish_weight_update"
    assert http.paths == ["pause", start, finish, start, "update_weights", finish, "reset_prefix_cache", "resume"]


async def test_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, log = ServerReplica("r0", url="http://a:1"), list[Any]()

    async def call(http: Any, method: str, path: str, body: Any = None, *, timeout_s: float = 0.0) -> Any:
        log.append((path, body))
        return {"success": True}

    monkeypatch.setattr(replica, "_call", call)
    await replica.load({"path": "p"}, version=4)
    assert log == [
        ("/pause?mode=keep&clear_cache=false", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"path": "p"}}),
        ("/finish_weight_update", {"weight_version": "4"}),
        ("/reset_prefix_cache?reset_running_requests=true", None),
        ("/resume", None),
    ]
    log.clear()
    await replica.join({"rank_offset": 1})
    await replica.open_update()
    await replica.update({"names": ["a"]})
    await replica.abandon_update()
    assert log == [
        ("/init_weight_transfer_engine", {"init_info": {"rank_offset": 1}}),
        ("/pause?mode=keep&clear_cache=false", None),
        ("/start_weight_update", None),
        ("/update_weights", {"update_info": {"names": ["a"]}}),
        ("/finish_weight_update", {}),
    ]


CALLS: dict[str, Any] = {
    "pause": lambda replica: replica.pause(abort=False),
    "load": lambda replica: replica.load({"path": "p"}, version=4),
    "join": lambda replica: replica.join({}),
    "open": lambda replica: replica.open_update(),
    "update": lambda replica: replica.update({}),
    "close": lambda replica: replica.close_update(version=4),
    "abandon": lambda replica: replica.abandon_update(),
    "version": lambda replica: replica.version(),
    "sleep": lambda replica: replica.sleep(2),
    "wake": lambda replica: replica.wake(),
}


@pytest.mark.parametrize("call", CALLS)
async def test_what_is_closed_is_lost(local: LocalReplica, call: str) -> None:
    local._llm = None
    for replica in (local, ServerReplica("r0", url="http://a:1")):
        with pytest.raises(ReplicaLost, match="r0 is closed"):
            await CALLS[call](replica)
    await local.abort("r")


@pytest.mark.parametrize("last", ["is_paused", "start_weight_update", "update_weights", "finish_weight_update"])
async def test_an_update_does_not_go_on_in_another_start(
    local: LocalReplica, monkeypatch: pytest.MonkeyPatch, last: str
) -> None:
    other, own = FakeLLM(), getattr(local._llm, last)

    async def replaced(*arguments: Any) -> Any:
        local._llm = other
        return await own(*arguments)

    monkeypatch.setattr(local._llm, last, replaced)
    with pytest.raises(ReplicaLost, match="r0 is closed"):
        await local.load({"path": "p"}, version=4)
    assert other.log == []


async def test_an_engine_that_is_closed_in_a_call_is_lost(local: LocalReplica, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ended(request: Any) -> None:
        local._llm = None
        raise RuntimeError("cancelled")

    monkeypatch.setattr(local._llm, "update_weights", ended)
    with pytest.raises(ReplicaLost, match="r0 has ended"):
        await local.load({"path": "p"}, version=4)


class FakeHttp:
    """A session with a server that agrees to everything but a second start; `then` comes after `last`."""

    def __init__(self, *, last: str = "", then: Any = None) -> None:
        self.paths: list[str] = []
        self._active = False
        self._last, self._then = last, then

    @asynccontextmanager
    async def request(self, method: str, url: str, **options: Any) -> AsyncIterator[Any]:
        self.paths.append(url.removeprefix("http://a:1/").partition("?")[0])

        refused = self.paths[-1] == "start_weight_update" and self._active
        if self.paths[-1] in ("start_weight_update", "finish_weight_update"):
            self._active = self.paths[-1] == "start_weight_update"

        async def text() -> str:
            return ACTIVE if refused else '{"success": true}'

        yield SimpleNamespace(status=500 if refused else 200, text=text)
        if self.paths[-1] == self._last:
            self._then()


@pytest.mark.parametrize("last", ["pause", "start_weight_update", "update_weights", "finish_weight_update"])
async def test_an_update_does_not_go_on_in_another_start_of_a_server(last: str) -> None:
    replica, other = ServerReplica("r0", url="http://a:1"), FakeHttp()
    own = replica._http = FakeHttp(last=last, then=lambda: setattr(replica, "_http", other))
    with pytest.raises(ReplicaLost, match="r0 is closed"):
        await replica.load({"path": "p"}, version=4)
    assert (own.paths[-1], other.paths) == (last, [])
    await replica.load({"path": "p"}, version=4)
    assert other.paths[-1] == "resume"
