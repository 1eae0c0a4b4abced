"""Trajectories as JSON objects (journal) and as Parquet rows (per step), both exact in both directions.

Parquet, one row per rollout: scalars; `token_ids`, `loss_mask`, `rollout_logprobs` as flat lists over the whole
trajectory [N] (mask True and a logprob exactly on sampled tokens); `turns` as structs that say how to cut them.
Logprobs are fp32 there, as the engines report them.
"""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Mapping
from typing import Any

from swe_rl.types import Completion, Reward, StopReason, ToolCall, Trajectory, Turn

_PLAIN_COLUMNS = ("trajectory_id", "task_id", "group_id", "rollout_index", "detail", "temperature", "patch")


def to_json(trajectory: Trajectory) -> dict[str, Any]:
    """JSON-able form; the patch is base64."""
    data = dataclasses.asdict(trajectory)
    data["patch"] = None if trajectory.patch is None else base64.b64encode(trajectory.patch).decode()
    return data


def from_json(data: Mapping[str, Any]) -> Trajectory:
    """The inverse of `to_json`. Raises KeyError or TypeError for anything else."""
    fields = dict(data)
    fields["turns"] = [_turn(turn) for turn in fields["turns"]]
    fields["stop_reason"] = StopReason(fields["stop_reason"])
    fields["patch"] = None if fields["patch"] is None else base64.b64decode(fields["patch"])
    fields["reward"] = None if fields["reward"] is None else Reward(**fields["reward"])
    return Trajectory(**fields)


def to_row(trajectory: Trajectory) -> dict[str, Any]:
    """One Parquet row."""
    reward = trajectory.reward
    return {
        "trajectory_id": trajectory.trajectory_id,
        "task_id": trajectory.task_id,
        "group_id": trajectory.group_id,
        "rollout_index": trajectory.rollout_index,
        "stop_reason": str(trajectory.stop_reason),
        "detail": trajectory.detail,
        "temperature": trajectory.temperature,
        "reward": None if reward is None else reward.value,
        "tests_passed": None if reward is None else reward.tests_passed,
        "tests_total": None if reward is None else reward.tests_total,
        "reward_json": None if reward is None else json.dumps(dataclasses.asdict(reward)),
        "patch": trajectory.patch,
        "timings_json": json.dumps(dict(trajectory.timings_s)),
        "token_ids": trajectory.token_ids,
        "loss_mask": _flat(trajectory, context=False, sampled=lambda turn: [True] * len(turn.completion.token_ids)),
        "rollout_logprobs": _flat(trajectory, context=0.0, sampled=lambda turn: turn.completion.rollout_logprobs),
        "turns": [_turn_row(turn) for turn in trajectory.turns],
    }


def from_row(row: Mapping[str, Any]) -> Trajectory:
    """The inverse of `to_row` (logprobs as fp32)."""
    turns, position = [], 0
    for turn in row["turns"]:
        start, end = position + turn["num_context"], position + turn["num_context"] + turn["num_sampled"]
        turns.append(
            {
                "context_ids": row["token_ids"][position:start],
                "completion": {
                    "token_ids": row["token_ids"][start:end],
                    "rollout_logprobs": row["rollout_logprobs"][start:end],
                    **{key: turn[key] for key in ("finish_reason", "policy_version", "policy_version_max")},
                    "routing": turn.get("routing") or "",
                },
                "tool_call": json.loads(turn["tool_call_json"]),
                "observation": turn["observation"],
                "format_error": turn["format_error"],
                "repaired": turn.get("repaired"),
                "kept_context": turn.get("kept_context"),
            }
        )
        position = end
    return Trajectory(
        **{key: row[key] for key in _PLAIN_COLUMNS},
        turns=[_turn(turn) for turn in turns],
        stop_reason=StopReason(row["stop_reason"]),
        reward=None if row["reward_json"] is None else Reward(**json.loads(row["reward_json"])),
        timings_s=json.loads(row["timings_json"]),
    )


def parquet_schema() -> Any:
    """pyarrow schema of `to_row`."""
    import pyarrow as pa

    text, ids = pa.string(), pa.list_(pa.int32())
    turn = {
        "num_context": pa.int32(),
        "num_sampled": pa.int32(),
        "finish_reason": text,
        "policy_version": pa.int64(),
        "policy_version_max": pa.int64(),
        "tool_call_json": text,
        "observation": text,
        "format_error": pa.bool_(),
        "repaired": text,
        "kept_context": pa.int32(),
        "routing": text,
    }
    columns = {
        **dict.fromkeys(("trajectory_id", "task_id", "group_id"), text),
        "rollout_index": pa.int64(),
        **dict.fromkeys(("stop_reason", "detail"), text),
        **dict.fromkeys(("temperature", "reward"), pa.float64()),
        **dict.fromkeys(("tests_passed", "tests_total"), pa.int64()),
        "reward_json": text,
        "patch": pa.binary(),
        "timings_json": text,
        "token_ids": ids,
        "loss_mask": pa.list_(pa.bool_()),
        "rollout_logprobs": pa.list_(pa.float32()),
        "turns": pa.list_(pa.struct(turn)),
    }
    return pa.schema(columns)


def _turn_row(turn: Turn) -> dict[str, Any]:
    completion = turn.completion
    return {
        "num_context": len(turn.context_ids),
        "num_sampled": len(completion.token_ids),
        "finish_reason": completion.finish_reason,
        "policy_version": completion.policy_version,
        "policy_version_max": completion.policy_version_max,
        "tool_call_json": json.dumps(None if turn.tool_call is None else dataclasses.asdict(turn.tool_call)),
        "observation": turn.observation,
        "format_error": turn.format_error,
        "repaired": turn.repaired,
        "kept_context": turn.kept_context,
        "routing": completion.routing,
    }


def _flat(trajectory: Trajectory, *, context: Any, sampled: Any) -> list[Any]:
    values: list[Any] = []
    for turn in trajectory.turns:
        values += [context] * len(turn.context_ids)
        values += sampled(turn)
    return values


def _turn(data: Mapping[str, Any]) -> Turn:
    call = data["tool_call"]
    return Turn(
        context_ids=list(data["context_ids"]),
        completion=Completion(**data["completion"]),
        tool_call=None if call is None else ToolCall(**call),
        observation=data["observation"],
        format_error=data["format_error"],
        repaired=data.get("repaired") or "",
        kept_context=data.get("kept_context"),
    )
