"""Inference at scale: vLLM 0.32 behind Policy. vLLM itself is imported when an engine is opened.

opening.open_vllm   the engine of a configuration
engine              sessions, turns, weight updates
fleet               which replicas can be asked; how lost and hung ones come back
router              which replica serves a session
replica             the seam; local (child processes), server (HTTP), ray_replica (actors) are behind it
requests, turn      what is asked and what came back
settings            the contract as vLLM's arguments; where published weights lie
weight_transfer     the transfer over shared memory, in vLLM's workers
device_transfer     weights from GPU to GPU (NCCL, CUDA IPC), the trainer's side; device_worker is the workers'
owner               engine processes end with their owner
"""

from swe_rl.inference.vllm.engine import VllmCounters, VllmEngine
from swe_rl.inference.vllm.opening import open_vllm

__all__ = ["VllmCounters", "VllmEngine", "open_vllm"]
