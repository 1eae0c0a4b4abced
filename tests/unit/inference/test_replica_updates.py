"""One update as each kind of replica tells it to vLLM: in one call, and in parts as it comes from another GPU."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from swe_rl.errors import EngineError
from swe_rl.inference.vllm.local import LocalReplica
from swe_rl.inference.vllm.server import ServerReplica


class FakeLLM:
    """Says what it was asked; `kept` blocks of the prefix cache cannot be dropped."""

    errored = False

    def __init__(self) -> None:
        self.log: list[Any] = []
        self.paused, self.kept = False, False

    async def is_paused(self) -> bool:
        return self.paused

    async def pause_generation(self, *, mode: str, clear_cache: bool) -> None:
        self.paused = True
        self.log.append(("pause", mode, clear_cache))

    async def init_weight_transfer_engine(self, request: Any) -> None:
        self.log.append(("init", request.init_info))

    async def start_weight_update(self) -> None:
        self.log.append("start")

    async def update_weights(self, request: Any) -> None:
        self.log.append(("update", request.update_info))

    async def finish_weight_update(self, version: str | None = None) -> None:
        self.log.append(("finish", version))

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


async def test_over_http(monkeypatch: pytest.MonkeyPatch) -> None:
    replica, log = ServerReplica("r0", url="http://a:1"), list[Any]()

    async def call(method: str, path: str, body: Any = None, *, timeout_s: float = 0.0) -> Any:
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
