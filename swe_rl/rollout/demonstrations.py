"""Demonstrations: episodes played in real sandboxes by a scripted demonstrator instead of a model.

They are ordinary trajectories (the same prompt, tools and observations as the policy will see), so supervised learning
on their sampled tokens needs nothing of its own.
"""

from __future__ import annotations

import ast
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol

from swe_rl.agents.edits import function_lines, insert_lines, num_lines, replace_function
from swe_rl.agents.formats import ActionFormat
from swe_rl.agents.rendering import Renderer
from swe_rl.errors import InvariantError
from swe_rl.protocols import SamplingParams
from swe_rl.rollout.collector import Collector
from swe_rl.rollout.journal import RolloutKey
from swe_rl.tasks.oracle_calls import (
    RUN_TESTS,
    edit_call,
    insert_call,
    look_call,
    replacement_between,
    run_call,
    submit_call,
)
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
        self._playing: dict[str, tuple[Demonstrator, list[int], str]] = {}  # session -> script, last ids, last tool

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str) -> Completion:
        """The script's next action as ids, ending with the stop token. Raises InvariantError for an unknown session."""
        if session not in self._playing:
            if session not in self._make:
                raise InvariantError(f"no demonstrator for {session}")
            demonstrator, observation, passed = self._make[session](), None, None
        else:
            demonstrator, last, tool = self._playing[session]
            observation = self._renderer.observation_text(_after(prompt_ids, last))
            passed = _passed(observation) if tool == "test" else None
        call = demonstrator.next_call(observation, passed)
        whole = self._renderer.action_ids(self._format.render(call.name, call.arguments))
        ids = whole[: params.max_new_tokens]
        self._playing[session] = (demonstrator, ids, call.name)
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


class TranslatedDemonstrator:
    """A demonstrator that speaks the minimal toolset, in the words of another one."""

    def __init__(self, demonstrator: Demonstrator, task: Task, *, toolset: str) -> None:
        """`toolset` is a name of agents.toolsets.TOOLSETS."""
        self._inner = demonstrator
        self._toolset = toolset
        self._files = dict(task.tree)  # as the edits so far have left them
        self._tested = False
        self._planned: list[ToolCall] = []  # the rest of an edit that takes several calls

    def next_call(self, last_observation: str | None, test_passed: bool | None) -> ToolCall:
        """The next action after what was last seen."""
        if self._planned:
            return self._planned.pop(0)
        passed = _passed(last_observation or "") if self._tested else None
        call = self._inner.next_call(last_observation, passed)
        self._tested = call.name == "test"
        if call.name == "edit_function":
            return self._edit(**call.arguments)
        if call.name == "submit":
            return submit_call(self._toolset)
        return run_call(self._toolset, RUN_TESTS if self._tested else call.arguments["command"])

    def _edit(self, path: str, name: str, body: str) -> ToolCall:
        """Takes the function out and writes a new one where the tools can do both: `old_str` would have to repeat the
        faulty line, where a small policy that knows the right one writes that."""
        before = self._files[path]
        after = self._files[path] = replace_function(before, name=name, body=body)
        rewrite = rewrite_calls(self._toolset, path, before, name=name, body=body)
        if rewrite is not None:
            first, *self._planned, self._files[path] = *rewrite.calls, rewrite.after
            return first
        edit = replacement_between(path, before.decode(), after.decode())
        if edit is None:  # it edits nothing: there is no such call of these tools
            return look_call(self._toolset, path, 1, num_lines(before))
        return edit_call(self._toolset, edit)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rewrite:
    """A function written anew, in several calls."""

    calls: list[ToolCall]
    after: bytes  # the file when all have been made


def rewrite_calls(toolset: str, path: str, before: bytes, *, name: str, body: str) -> Rewrite | None:
    """Takes a function out, from its `def` to its `return`, and puts `body` at the top of the file: no call repeats
    what is in it. None where the tools have no editor that inserts, for a file of more than functions, whose order may
    matter, and for a function that is a method, has decorators or goes on behind the first `return` that is not in a
    block."""
    if b"\r" in before or not before.isascii():
        return None
    if not all(isinstance(node, ast.FunctionDef) for node in ast.parse(before).body):
        return None
    lines = before.splitlines(keepends=True)
    starts = [i for i, line in enumerate(lines, 1) if line.startswith(f"def {name}(".encode())]
    ends = [i for i, line in enumerate(lines, 1) if line.startswith(b"    return") and starts and i > starts[0]]
    if len(starts) != 1 or not ends or (starts[0], ends[0]) != function_lines(before, name):
        return None
    text = body.strip("\n") + "\n\n\n"
    write = insert_call(toolset, path, after=0, text=text)
    if write is None:
        return None
    take_out = run_call(toolset, f"sed -i '/^def {name}(/,/^    return/d' {shlex.quote(path)}")
    rest = b"".join(lines[: starts[0] - 1] + lines[ends[0] :])
    return Rewrite(calls=[take_out, write], after=insert_lines(rest, after=0, text=text))


def _after(prompt_ids: Sequence[int], last: list[int]) -> Sequence[int]:
    """What the prompt has behind the last occurrence of `last`, wherever a shortened context has moved it."""
    for start in range(len(prompt_ids) - len(last), -1, -1):
        if prompt_ids[start] == last[0] and list(prompt_ids[start : start + len(last)]) == last:
            return prompt_ids[start + len(last) :]
    raise InvariantError("the prompt does not hold what the demonstrator said last")


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
