"""Finished attempts for tests of verifiers, in bytes as tokens."""

from __future__ import annotations

from collections.abc import Sequence

from swe_rl.agents.rendering import ChatRenderer
from swe_rl.config import AgentConfig, VerifierConfig
from swe_rl.evaluation.verifier_data import Reader
from swe_rl.testing import ByteTokenizer
from swe_rl.types import Completion, Reward, StopReason, Task, ToolCall, Trajectory, Turn

RENDERER = ChatRenderer(ByteTokenizer())
FIX = "<function=bash><parameter=command>sed -i 's/a - b/a + b/' calc.py</parameter></function>"
LOOK = "<function=bash><parameter=command>cat calc.py</parameter></function>"
SUBMIT = "<function=submit></function>"
PATCH = (
    b"diff --git a/calc.py b/calc.py\n--- a/calc.py\n+++ b/calc.py\n@@ -1,2 +1,2 @@\n def add(a, b):\n"
    b"-    return a - b\n+    return a + b\n"
)


def turn(text: str, observation: str = "") -> Turn:
    """One turn with this sampled text."""
    ids = RENDERER.action_ids(text)
    completion = Completion(
        token_ids=ids,
        rollout_logprobs=[-0.5] * len(ids),
        finish_reason="stop",
        policy_version=0,
        policy_version_max=0,
    )
    call = ToolCall(name="bash", arguments={})
    return Turn(context_ids=[1, 2], completion=completion, tool_call=call, observation=observation)


def attempt(
    task: Task,
    turns: Sequence[tuple[str, str]] = ((FIX, "ok"), (SUBMIT, "")),
    *,
    index: int = 0,
    solved: bool | None = True,
    patch: bytes | None = PATCH,
) -> Trajectory:
    """A finished attempt; `solved` None: not graded."""
    reward = None if solved is None else Reward(value=float(solved), terms={"resolved": float(solved)})
    return Trajectory(
        trajectory_id=f"phase/0/{task.task_id}/{index}",
        task_id=task.task_id,
        group_id=f"phase/0/{task.task_id}",
        rollout_index=index,
        turns=[turn(text, observation) for text, observation in turns],
        stop_reason=StopReason.SUBMITTED,
        temperature=1.0,
        patch=patch,
        reward=reward,
    )


def reader(**values: object) -> Reader:
    """Byte tokens on both sides."""
    cfg = VerifierConfig(**values)  # type: ignore[arg-type]
    return Reader(cfg=cfg, agent=AgentConfig(), policy=RENDERER, verifier=RENDERER)
