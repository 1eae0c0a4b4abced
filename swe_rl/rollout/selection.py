"""Which rollouts rejection fine-tuning imitates: those that passed, each once, not too many of one task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence

from swe_rl.types import Trajectory


def _sampled(trajectory: Trajectory) -> Hashable:
    return tuple(token for turn in trajectory.turns for token in turn.completion.token_ids)


SAME: dict[str, Callable[[Trajectory], Hashable]] = {  # what makes two attempts at a task the same
    "none": lambda trajectory: trajectory.trajectory_id,
    "sampled": _sampled,
    "patch": lambda trajectory: trajectory.patch,
}


def select_passed(
    trajectories: Sequence[Trajectory], *, dedupe: str = "none", max_per_task: int = 0
) -> tuple[list[Trajectory], dict[str, float]]:
    """(the trajectories to imitate in their order, metrics of what became of all of them).

    Kept are those whose hidden tests passed; of equal ones of a task (`dedupe`: none, sampled ids or patch) the first;
    of those the first `max_per_task` of a task (0: all), which favours nothing, as the attempts of a task are
    exchangeable. KeyError for an unknown `dedupe`.
    """
    same = SAME[dedupe]
    passed = [t for t in trajectories if t.reward is not None and t.reward.solved]
    first: dict[tuple[str, Hashable], Trajectory] = {}
    for trajectory in passed:
        first.setdefault((trajectory.task_id, same(trajectory)), trajectory)
    taken: Counter[str] = Counter()
    kept = []
    for trajectory in first.values():
        taken[trajectory.task_id] += 1
        if not max_per_task or taken[trajectory.task_id] <= max_per_task:
            kept.append(trajectory)
    masked = sum(turn.format_error for trajectory in kept for turn in trajectory.turns)
    counts = {
        "rollout/num_trajectories": len(trajectories),
        "rollout/num_passed": len(passed),
        "rft/num_duplicates": len(passed) - len(first),
        "rft/num_over_cap": len(first) - len(kept),
        "rft/num_kept": len(kept),
        "rft/num_tasks_kept": len(taken),
        "rft/num_masked_turns": masked,  # turns that could not be parsed: they stay as context and do not train
    }
    return kept, {name: float(value) for name, value in counts.items()}
