"""Episodes of other systems as trajectories: mini-swe-agent's .traj.json (formats 1 and 1.1) and SWE-bench predictions.

Their tokens are those of our renderer, since the files hold text; logprobs are unknown (NaN). Only for evaluation.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swe_rl.agents.rendering import Renderer
from swe_rl.errors import ConfigError
from swe_rl.evaluation.predictions import read_predictions
from swe_rl.rollout.journal import RolloutKey
from swe_rl.types import Completion, StopReason, ToolCall, Trajectory, Turn

_COMMAND = re.compile(r"```(?:bash|sh|mswea_bash_command)\s*\n(.*?)\n?```", re.DOTALL)
# Of mini-swe-agent; any other status is the name of an exception: trouble of the machine or of the model's server.
EXIT_STATUS: Mapping[str, StopReason] = {
    "Submitted": StopReason.SUBMITTED,
    "LimitsExceeded": StopReason.MAX_TURNS,
    "StepLimitExceeded": StopReason.MAX_TURNS,
    "CostLimitExceeded": StopReason.MAX_TOKENS,
    "ContextWindowExceededError": StopReason.CONTEXT_LIMIT,
    "TimeExceeded": StopReason.TIMEOUT,
    "FormatError": StopReason.FORMAT_ERROR,
    "RepeatedFormatError": StopReason.FORMAT_ERROR,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Foreign:
    """One episode of another system."""

    task_id: str
    patch: bytes
    stop_reason: StopReason
    detail: str = ""
    messages: Sequence[Mapping[str, Any]] = ()  # {"role", "content", "tool_calls"?}
    model: str = ""

    def trajectory(self, key: RolloutKey, renderer: Renderer) -> Trajectory:
        """The episode under our key, not graded."""
        return Trajectory(
            trajectory_id=key.trajectory_id,
            task_id=key.task_id,
            group_id=key.group_id,
            rollout_index=key.rollout_index,
            turns=_turns(self.messages, renderer),
            stop_reason=self.stop_reason,
            temperature=math.nan,
            detail=self.detail,
            patch=None if self.stop_reason.is_infra else self.patch,
        )


def read_foreign(path: Path) -> list[Foreign]:
    """All episodes of a file, or of the .traj.json files below a folder. ConfigError for what is neither."""
    if path.is_dir():
        files = sorted(path.rglob("*.traj.json")) or sorted(path.rglob("preds.json"))
        if not files:
            raise ConfigError(f"{path} has no *.traj.json and no preds.json below it")
        return [item for file in files for item in read_foreign(file)]
    if path.name.endswith(".traj.json"):
        return [mini_swe_agent(_read(path), where=str(path))]
    if path.suffix in (".json", ".jsonl"):
        return [
            Foreign(task_id=task, patch=patch, stop_reason=StopReason.SUBMITTED)
            for task, patch in read_predictions(path).items()
        ]
    raise ConfigError(f"{path} is no *.traj.json of mini-swe-agent and no .json or .jsonl file of predictions")


def mini_swe_agent(document: Any, *, where: str) -> Foreign:
    """A .traj.json of mini-swe-agent. ConfigError when it does not say of which task it is or how it ended."""
    if not isinstance(document, dict) or not isinstance(document.get("info"), dict):
        raise ConfigError(f"{where} holds messages only: without info.submission there is nothing to grade")
    info, task_id = document["info"], document.get("instance_id")
    if not isinstance(task_id, str) or not isinstance(document.get("messages"), list):
        raise ConfigError(f"{where} needs instance_id and messages, as mini-swe-agent writes them for benchmarks")
    status = str(info.get("exit_status") or "")
    model = ((info.get("config") or {}).get("model") or {}).get("model_name") or ""
    return Foreign(
        task_id=task_id,
        patch=_patch(str(info.get("submission") or "")),
        stop_reason=EXIT_STATUS.get(status, StopReason.INFRA_ERROR),
        detail="" if status in EXIT_STATUS else f"mini-swe-agent ended with {status or 'no exit status'}",
        messages=document["messages"],
        model=str(model),
    )


def _patch(text: str) -> bytes:
    """A diff ends with a newline; agents that print theirs often lose it."""
    return (text if text.endswith("\n") or not text.strip() else text + "\n").encode("utf-8", "surrogateescape")


def _turns(messages: Sequence[Mapping[str, Any]], renderer: Renderer) -> list[Turn]:
    """One turn per assistant message; what stands between two of them is the observation of the first."""
    places = [i for i, message in enumerate(messages) if message.get("role") == "assistant"]
    if not places:
        return []
    opening = [{"role": str(m.get("role")), "content": _text(m)} for m in messages[: places[0]]]
    context = renderer.initial_ids(opening)
    turns: list[Turn] = []
    for place, after in zip(places, [*places[1:], None], strict=True):
        calls = _commands(messages[place])
        text = _text(messages[place])
        if messages[place].get("tool_calls"):
            text = "\n\n".join([text, *(f"```bash\n{call}\n```" for call in calls)]).lstrip("\n")
        ids = renderer.action_ids(text)
        between = [] if after is None else messages[place + 1 : after]
        observation = "\n".join(_text(message) for message in between)
        turns.append(
            Turn(
                context_ids=context,
                completion=Completion(
                    token_ids=ids,
                    rollout_logprobs=[math.nan] * len(ids),
                    finish_reason="stop",
                    policy_version=0,
                    policy_version_max=0,
                ),
                tool_call=ToolCall(name="bash", arguments={"command": "\n".join(calls)}) if calls else None,
                observation=observation,
                format_error=not calls,
            )
        )
        context = renderer.observation_ids(observation)
    return turns


def _commands(message: Mapping[str, Any]) -> list[str]:
    """The shell commands of an assistant message: its tool calls, else its one code block."""
    if calls := message.get("tool_calls"):
        return [command for call in calls if (command := _argument(call))]
    return _COMMAND.findall(_text(message))


def _argument(call: Mapping[str, Any]) -> str:
    function = call.get("function") or {}
    try:
        arguments = json.loads(function.get("arguments") or "{}")
    except ValueError:
        return ""
    return str(arguments.get("command") or "") if isinstance(arguments, dict) else ""


def _text(message: Mapping[str, Any]) -> str:
    """The content, of parts where it is a list of them."""
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in content)
    return "" if content is None else str(content)


def _read(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as err:
        raise ConfigError(f"{path} cannot be read: {err}") from err
