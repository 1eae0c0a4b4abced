"""vLLM's scheduler under a name of ours: it makes vLLM's engine process import this module (cpu_experts.py)."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler

from swe_rl.inference.vllm.cpu_experts import pass_the_check


class ExpertsScheduler(Scheduler):
    """As vLLM's."""


pass_the_check()
