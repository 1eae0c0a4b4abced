"""The seams of the system. Everything behind one of these is replaceable; swe_rl.testing has a fake of each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from swe_rl.types import Completion, ExecResult, PackedBatch, Reward, StepStats, Task, ToolCall, Trajectory

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """All that decides how tokens are sampled; nothing is left to an engine's default."""

    temperature: float = 1.0  # 0 is greedy
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    seed: int  # of this one turn; see rollout.seeds


class Policy(Protocol):
    """Token ids in, token ids out."""

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """Samples after `prompt_ids`. `session` is the trajectory: its earlier prompt and completion are a prefix."""
        ...

    async def release(self, session: str) -> None:
        """The episode is over; frees what the engine keeps for it. Idempotent."""
        ...


@runtime_checkable
class OutageClock(Protocol):
    """A Policy that may be unable to sample for a while: that time is not the agent's to lose."""

    async def outage_s(self) -> float:
        """Seconds so far in which it could sample for nobody, or hung for some; never falls. Raises EngineError when it
        cannot be asked."""
        ...


class Sandbox(Protocol):
    """One isolated machine. An async context manager; leaving it removes every trace."""

    async def exec(
        self, command: str, *, timeout_s: float | None = None, cwd: str | None = None, stdin: bytes | None = None
    ) -> ExecResult: ...
    async def read_file(self, path: str) -> bytes: ...
    async def write_file(self, path: str, data: bytes) -> None: ...
    async def fork(self) -> Sandbox: ...
    async def close(self) -> None: ...
    async def __aenter__(self) -> Self: ...
    async def __aexit__(self, *exc: object) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    observation: str
    done: bool = False
    stop_reason: str | None = None  # a StopReason value when the environment itself ended the episode


class Environment(Protocol):
    """What the episode loop sees: text out, actions in. The SWE one is agents.SweEnvironment."""

    async def reset(self, task: Task) -> list[Mapping[str, str]]:
        """Opening messages: [{"role": "system" | "user", "content": ...}]."""
        ...

    async def step(self, call: ToolCall) -> EnvStep: ...


class TaskSource(Protocol):
    def load(self, *, split: str, num_tasks: int, seed: int) -> list[Task]: ...


class RewardFn(Protocol):
    async def __call__(self, task: Task, patch: bytes) -> Reward: ...


class TrainerBackend(Protocol):
    """Owns the trained weights and the optimiser. Collective under torchrun: every rank calls every method."""

    policy_version: int

    def train_step(self, batches: Sequence[PackedBatch], *, learning_rate: float) -> StepStats:
        """One optimiser step over all micro-batches of this rank; gradients are summed over ranks."""
        ...

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Scoring without gradient: [T] fp32 per batch, at each token's temperature, NaN where not trained."""
        ...

    def weights(self) -> Mapping[str, Tensor]:
        """Full (unsharded) parameters by Hugging Face name, for weight sync and export."""
        ...

    def state_dict(self) -> Mapping[str, Any]: ...
    def checkpoint_state(self, *, own: bool = False) -> Mapping[str, Any]:
        """What this rank gives to training.checkpoint.save: its part of state_dict; with `own` copies in host memory,
        which stay as they are when training goes on. Collective."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None: ...


class Verifier(Protocol):
    async def score(self, task: Task, trajectory: Trajectory) -> float: ...
