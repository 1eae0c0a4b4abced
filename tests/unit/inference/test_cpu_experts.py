"""What is put between two steps of vLLM's CPU runner, with a runner that stands in for it."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from swe_rl.errors import EngineError
from swe_rl.inference.vllm import cpu_experts, local


class Runner:
    """Its forward pass may bring requests into another order than they were scheduled in."""

    _swe_rl_experts: Any = None

    def __init__(self) -> None:
        self.input_batch = SimpleNamespace(req_ids=[], num_computed_tokens_cpu=np.zeros(8, dtype=np.int32))
        self.vllm_config = SimpleNamespace(aux_output_config=SimpleNamespace(enabled=True))
        self.model, self.log = "model", []  # type: ignore[var-annotated]

    def initialize_kv_cache(self, kv_cache_config: Any, is_profiling: bool = False, **options: Any) -> None:
        self.log.append(("initialize", kv_cache_config, is_profiling, options))

    def execute_model(self, scheduler_output: Any, intermediate_tensors: Any = None) -> None:
        self.log.append(("execute", scheduler_output.aux_output_connector_metadata))
        self.input_batch.req_ids = ["b", "a", "c"]
        self.input_batch.num_computed_tokens_cpu[:3] = [4, 0, 32]

    def sample_tokens(self, grammar_output: Any) -> Any:
        return SimpleNamespace(sampled_token_ids=[[7], [], [9]], aux_output_connector_output=None)


class Connector:
    def __init__(self) -> None:
        self.log: list[Any] = []

    def begin_step(self, metadata: Any) -> None:
        self.log.append(("begin", metadata))

    def prepare_output(self, batch: Any) -> Any:
        self.log.append(("prepare", batch))
        return self

    def enqueue_cpu_copy(self, sampled: Any, rejected: Any) -> None:
        self.log.append(("copy", sampled.tolist(), rejected.tolist()))

    def process_output(self) -> str:
        return "experts"


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = type("CPUModelRunner", (Runner,), {})
    cpu_experts._wrap(made)
    worker = ModuleType("vllm.distributed.aux_output_connector.worker")
    worker.get_aux_output_connector = lambda *arguments: Connector()  # type: ignore[attr-defined]
    parts = worker.__name__.split(".")
    for end in range(1, len(parts)):
        monkeypatch.setitem(sys.modules, ".".join(parts[:end]), ModuleType(parts[end - 1]))
    monkeypatch.setitem(sys.modules, worker.__name__, worker)
    return made()


SCHEDULED = SimpleNamespace(num_scheduled_tokens={"a": 5, "b": 1, "c": 3}, aux_output_connector_metadata="step 1")


def test_a_step_says_whose_rows_are_where(runner: Any) -> None:
    runner.initialize_kv_cache("blocks", kv_cache_allocation_context=None)
    runner.execute_model(SCHEDULED, None)
    output = runner.sample_tokens(None)
    assert output.aux_output_connector_output == "experts"
    begin, prepare, copy = runner._swe_rl_experts.log
    assert begin == ("begin", "step 1")
    assert runner.log[-1] == ("execute", "step 1")
    batch = prepare[1]
    assert batch.req_ids == ["b", "a", "c"]
    assert batch.query_start_loc_np.tolist() == [0, 1, 6, 9]
    assert batch.num_computed_tokens_np.tolist() == [4, 0, 32]
    assert copy == ("copy", [1, 0, 1], [0, 0, 0])
    runner.input_batch.num_computed_tokens_cpu[0] = 99
    assert batch.num_computed_tokens_np[0] == 4, "the next step changes the runner's own"


def test_an_engine_that_returns_none_is_left_as_it_is(runner: Any) -> None:
    runner.vllm_config.aux_output_config.enabled = False
    runner.initialize_kv_cache("blocks", is_profiling=True)
    runner.execute_model(SCHEDULED, intermediate_tensors=None)
    assert runner.sample_tokens(None).aux_output_connector_output is None
    assert runner.log[0] == ("initialize", "blocks", True, {})
    assert not hasattr(runner, "_swe_rl_batch"), "its steps cost what they did"


@pytest.mark.parametrize("cpu", [True, False])
async def test_the_check_is_passed_without_a_gpu_alone(monkeypatch: pytest.MonkeyPatch, cpu: bool) -> None:
    names = (
        "vllm",
        "vllm.config",
        "vllm.platforms",
        "vllm.engine",
        "vllm.engine.arg_utils",
        "vllm.v1",
        "vllm.v1.engine",
    )
    modules: dict[str, Any] = {name: ModuleType(name) for name in (*names, "vllm.v1.engine.async_llm")}

    class VllmConfig:
        def _verify_aux_output_compatibility(self) -> None:
            raise ValueError("requires Model Runner V2")

    class AsyncLLM:
        @staticmethod
        def from_engine_args(args: Any) -> Any:
            VllmConfig()._verify_aux_output_compatibility()
            return args

    modules["vllm.config"].VllmConfig = VllmConfig
    modules["vllm.platforms"].current_platform = SimpleNamespace(is_cpu=lambda: cpu)
    modules["vllm.engine.arg_utils"].AsyncEngineArgs = SimpleNamespace
    modules["vllm.v1.engine.async_llm"].AsyncLLM = AsyncLLM
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    replica = local.LocalReplica("r0", {"model": "m", cpu_experts.RETURN_EXPERTS: True})
    if cpu:
        await replica.start()
    else:
        with pytest.raises(EngineError, match="requires Model Runner V2"):
            await replica.start()
