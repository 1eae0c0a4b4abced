"""A replica in a child process, without vLLM: starts that nobody waits for, and calls to a dead one."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from types import ModuleType
from typing import Any, ClassVar

import pytest

from swe_rl.inference.vllm.local import LocalReplica, prepare_environment
from swe_rl.inference.vllm.replica import ReplicaLost


class FakeLLM:
    made: ClassVar[list[FakeLLM]] = []
    first_may_go_on = threading.Event()
    first_is_starting = threading.Event()

    def __init__(self) -> None:
        self.ended, self.errored = False, False

    @classmethod
    def from_engine_args(cls, args: object) -> FakeLLM:
        cls.made.append(cls())
        os.environ["LD_PRELOAD"] = "libtcmalloc.so"  # as vLLM does for its own processes
        if len(cls.made) == 1:
            cls.first_is_starting.set()
            assert cls.first_may_go_on.wait(20)
        return cls.made[-1]

    def shutdown(self, timeout: float) -> None:
        self.ended = True

    async def get_weight_version(self) -> str:
        raise RuntimeError("engine core died")

    async def sleep(self, level: int, mode: str) -> None:
        raise RuntimeError("engine core died")

    async def wake_up(self, tags: object) -> None:
        raise RuntimeError("engine core died")


@pytest.fixture(autouse=True)
def _fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    arguments, engine = ModuleType("vllm.engine.arg_utils"), ModuleType("vllm.v1.engine.async_llm")
    arguments.AsyncEngineArgs = lambda **args: args  # type: ignore[attr-defined]
    engine.AsyncLLM = FakeLLM  # type: ignore[attr-defined]
    for module in (arguments, engine):
        monkeypatch.setitem(sys.modules, module.__name__, module)
        for name in ("vllm", "vllm.engine", "vllm.v1", "vllm.v1.engine"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
    FakeLLM.made = []
    FakeLLM.first_may_go_on.clear()
    FakeLLM.first_is_starting.clear()


async def test_a_cancelled_start_is_ended_even_when_another_one_was_begun_meanwhile() -> None:
    replica = LocalReplica("r0", {})
    first = asyncio.create_task(replica.start())
    await asyncio.to_thread(FakeLLM.first_is_starting.wait, 20)
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    second = asyncio.create_task(replica.start())
    await asyncio.sleep(0.05)
    FakeLLM.first_may_go_on.set()
    await second
    assert [llm.ended for llm in FakeLLM.made] == [True, False]
    await replica.close()
    assert [llm.ended for llm in FakeLLM.made] == [True, True]


@pytest.mark.parametrize("call", [("version",), ("sleep", 2), ("wake",)])
async def test_every_call_to_a_dead_engine_says_that_it_is_lost(call: tuple[Any, ...]) -> None:
    FakeLLM.first_may_go_on.set()
    replica = LocalReplica("r0", {})
    await replica.start()
    FakeLLM.made[0].errored = True
    with pytest.raises(ReplicaLost, match="r0 has ended"):
        await getattr(replica, call[0])(*call[1:])


async def test_a_start_leaves_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    FakeLLM.first_may_go_on.set()
    before = dict(os.environ)
    await LocalReplica("replica", {}, gpus=[]).start()
    assert dict(os.environ) == before


async def test_what_the_trainer_needs_of_cuda_is_not_the_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """One hardware queue is for Megatron's order of sends and products."""
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    seen: list[str | None] = []

    def started(cls: type[FakeLLM], args: object) -> FakeLLM:
        seen.append(os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS"))
        return FakeLLM()

    monkeypatch.setattr(FakeLLM, "from_engine_args", classmethod(started))
    await LocalReplica("replica", {}, gpus=[]).start()
    assert seen == [None]
    assert os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    prepare_environment(child := dict(os.environ), gpus=[])
    assert "CUDA_DEVICE_MAX_CONNECTIONS" not in child
