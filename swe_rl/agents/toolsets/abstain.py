"""The `abstain` tool: the policy says that it cannot solve the task, instead of handing in something wrong."""

from __future__ import annotations

from collections.abc import Mapping

from swe_rl.agents.toolset import Tool, Workspace
from swe_rl.protocols import EnvStep
from swe_rl.types import Reward, StopReason, Task


async def _abstain(workspace: Workspace, arguments: Mapping[str, str]) -> EnvStep:
    return EnvStep(observation=arguments["reason"], done=True, stop_reason=StopReason.ABSTAINED)


ABSTAIN = Tool(
    name="abstain",
    description="Ends the work without an answer. Better than a wrong one, when you cannot find the right one.",
    parameters={"reason": "why, in a few words"},
    handler=_abstain,
)


def abstained_reward(task: Task, *, value: float) -> Reward:
    """The reward of an episode that abstained: `value`, and never resolved. No test is run: nothing was handed in."""
    total = len(task.fail_to_pass) + len(task.pass_to_pass)
    return Reward(value=value, terms={"resolved": 0.0, "abstained": 1.0}, tests_total=total)
