"""Which experts vLLM chose, without a GPU: what its newer model runner does for routed experts, for the older one.

vLLM 0.32 returns routed experts from model runner V2 alone, which needs Triton; on a CPU it runs V1. The scheduler, the
capture in the routers, the store behind the prefix cache and the answers are vLLM's own; here is the part between two
steps of the runner, and the way past the check that refuses the two together.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

RETURN_EXPERTS = "enable_return_routed_experts"  # of vLLM's engine arguments
# Another one of them, with RETURN_EXPERTS and without a GPU: vLLM's engine process checks its configuration once more,
# after it has imported this.
EXPERTS_SCHEDULER = {"scheduler_cls": "swe_rl.inference.vllm.cpu_scheduler.ExpertsScheduler"}


def pass_the_check() -> None:
    """In this process, and without a GPU, vLLM no longer refuses to return experts from its older runner. Idempotent.

    What else it checks there our own configuration has checked: a mixture of experts, with the prefix cache.
    """
    from vllm.config import VllmConfig
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        checked: Any = VllmConfig
        checked._verify_aux_output_compatibility = lambda self: None


def let_the_cpu_runner_return_experts() -> None:
    """In a worker's process, before its runner is made. Idempotent; does nothing for engines that return none."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    runner_class: Any = CPUModelRunner
    if not hasattr(runner_class, "_swe_rl_experts"):
        runner_class._swe_rl_experts = None
        _wrap(runner_class)


def _wrap(runner_class: Any) -> None:
    initialize, execute, sample = (
        runner_class.initialize_kv_cache,
        runner_class.execute_model,
        runner_class.sample_tokens,
    )

    def initialize_kv_cache(self: Any, kv_cache_config: Any, is_profiling: bool = False, **options: Any) -> None:
        initialize(self, kv_cache_config, is_profiling, **options)
        if self.vllm_config.aux_output_config.enabled and not is_profiling:
            from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

            self._swe_rl_experts = get_aux_output_connector(self.model, self.vllm_config, kv_cache_config)

    def execute_model(self: Any, scheduler_output: Any, *arguments: Any, **options: Any) -> Any:
        if self._swe_rl_experts is not None:
            self._swe_rl_experts.begin_step(scheduler_output.aux_output_connector_metadata)
        output = execute(self, scheduler_output, *arguments, **options)
        if self._swe_rl_experts is not None:
            self._swe_rl_batch = batch_of(self.input_batch, scheduler_output)
        return output

    def sample_tokens(self: Any, grammar_output: Any) -> Any:
        output = sample(self, grammar_output)
        if self._swe_rl_experts is not None and output is not None:
            pending = self._swe_rl_experts.prepare_output(self._swe_rl_batch)
            if pending is not None:
                sampled = np.array([len(ids) for ids in output.sampled_token_ids], dtype=np.int32)
                pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
                output.aux_output_connector_output = pending.process_output()
        return output

    runner_class.initialize_kv_cache = initialize_kv_cache
    runner_class.execute_model, runner_class.sample_tokens = execute_model, sample_tokens


def batch_of(input_batch: Any, scheduler_output: Any) -> SimpleNamespace:
    """The step's requests in the order of the forward pass, in the words of the newer runner: how many tokens each had
    before it, and where its rows begin and end."""
    requests = list(input_batch.req_ids)
    lengths = [scheduler_output.num_scheduled_tokens.get(request, 0) for request in requests]
    return SimpleNamespace(
        req_ids=requests,
        query_start_loc_np=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32),
        num_computed_tokens_np=np.array(input_batch.num_computed_tokens_cpu[: len(requests)]),
    )
