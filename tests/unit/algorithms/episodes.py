"""Small rollouts with chosen tokens, logprobs and rewards, for tests of credit and loss."""

from __future__ import annotations

from collections.abc import Sequence

from swe_rl.types import Completion, Reward, StopReason, Trajectory, TrajectoryGroup, Turn


def episode(
    name: str,
    reward: float | None,
    turns: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    group: str = "g",
    index: int = 0,
    stop: StopReason = StopReason.SUBMITTED,
    logprobs: Sequence[Sequence[float]] | None = None,
    solved: bool | None = None,
) -> Trajectory:
    """`turns` are (ids added to the context, sampled ids); `logprobs` one list per turn, -1 everywhere by default."""
    terms = {} if solved is None else {"resolved": float(solved)}
    return Trajectory(
        trajectory_id=name,
        task_id=group,
        group_id=group,
        rollout_index=index,
        turns=[
            Turn(
                context_ids=list(context),
                completion=Completion(
                    token_ids=list(sampled),
                    rollout_logprobs=list(logprobs[place]) if logprobs else [-1.0] * len(sampled),
                    finish_reason="stop",
                    policy_version=0,
                    policy_version_max=0,
                ),
                tool_call=None,
                observation="",
            )
            for place, (context, sampled) in enumerate(turns)
        ],
        stop_reason=stop,
        temperature=1.0,
        reward=None if reward is None else Reward(value=reward, terms=terms),
    )


def plain(name: str, reward: float | None, *, num_turns: int = 1, length: int = 2, **options: object) -> Trajectory:
    """An episode whose tokens do not matter: `num_turns` turns of `length` sampled tokens each."""
    return episode(name, reward, [([1], [2] * length)] * num_turns, **options)  # type: ignore[arg-type]


def group_of(*members: Trajectory, name: str = "g") -> TrajectoryGroup:
    return TrajectoryGroup(group_id=name, task_id=name, trajectories=list(members))


def rewards_group(*rewards: float, name: str = "g") -> TrajectoryGroup:
    """One single-turn episode per reward."""
    return group_of(*(plain(f"{name}/{i}", r, group=name, index=i) for i, r in enumerate(rewards)), name=name)
