"""Demonstrations: episodes played in real sandboxes by a scripted demonstrator instead of a model.

They are ordinary trajectories (the same prompt, tools and observations as the policy will see), so supervised learning
on their sampled tokens needs nothing of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Protocol

from swe_rl.agents.formats import ActionFormat
from swe_rl.agents.rendering import Renderer
from swe_rl.errors import InvariantError
from swe_rl.protocols import SamplingParams
from swe_rl.rollout.collector import Collector
from swe_rl.rollout.journal import RolloutKey
from swe_rl.types import Completion, Task, ToolCall, Trajectory


class Demonstrator(Protocol):
    """Plays one episode by a script. One object per episode."""

    def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
        """The next action after what was last seen; both are None at the start."""
        ...


class DemonstratorPolicy:
    """A Policy whose tokens come from scripts. Its logprobs are 0 (probability 1): scripts are deterministic."""

    def __init__(
        self,
        demonstrators: Mapping[str, Callable[[], Demonstrator]],
        *,
        renderer: Renderer,
        action_format: ActionFormat,
    ) -> None:
        """`demonstrators` maps a session (trajectory id) to the script to play in it."""
        self._make = demonstrators
        self._renderer = renderer
        self._format = action_format
        self._playing: dict[str, tuple[Demonstrator, int, str]] = {}  # session -> script, ids seen so far, last tool

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """The script's next action as ids, ending with the stop token. Raises InvariantError for an unknown session."""
        if session not in self._playing:
            if session not in self._make:
                raise InvariantError(f"no demonstrator for {session}")
            self._playing[session] = (self._make[session](), len(prompt_ids), "")
            observation, passed = None, None
            demonstrator = self._playing[session][0]
        else:
            demonstrator, seen, tool = self._playing[session]
            observation = self._renderer.observation_text(prompt_ids[seen:])
            passed = _passed(observation) if tool == "test" else None
        call = demonstrator.next_call(observation, passed)
        whole = self._renderer.action_ids(self._format.render(call.name, call.arguments))
        ids = whole[: params.max_new_tokens]
        self._playing[session] = (demonstrator, len(prompt_ids) + len(ids), call.name)
        return Completion(
            token_ids=ids,
            rollout_logprobs=[0.0] * len(ids),
            finish_reason="stop" if len(ids) == len(whole) else "length",
            policy_version=0,
            policy_version_max=0,
        )

    async def release(self, session: str) -> None:
        """Forgets the script of `session`. Idempotent."""
        self._playing.pop(session, None)


def _passed(observation: str) -> bool:
    return "passed" in observation and "failed" not in observation


async def collect_demonstrations(
    collector: Collector, tasks: Sequence[Task], *, samples_per_task: int, phase: str
) -> list[Trajectory]:
    """All attempts on all tasks, in the order of tasks and attempts, whatever order they finished in.

    After `collector.drain` only what had finished until then.
    """
    found: list[Trajectory] = []
    groups = collector.groups(tasks, group_size=samples_per_task, phase=phase, step=0, ordered=True)
    async with aclosing(groups):
        async for group in groups:
            found += group.trajectories
    return found


def sessions(tasks: Sequence[Task], *, samples_per_task: int, phase: str) -> list[tuple[str, Task, int]]:
    """(session, task, attempt) of every demonstration, with as many spare attempts for lost ones."""
    return [
        (RolloutKey(phase, 0, task.task_id, attempt).trajectory_id, task, attempt)
        for task in tasks
        for attempt in range(2 * samples_per_task)
    ]
