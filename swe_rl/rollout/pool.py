"""The next pool of training tasks, from what earlier rollouts of the run achieved on them.

As in arXiv:2508.03501, section "Data": a second stage leaves out the tasks that the first one solved at a rate of 2/3
or more, and those that it never solved.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from swe_rl.rollout.journal import read_journal
from swe_rl.rollout.statistics import UNTESTED
from swe_rl.types import Reward, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Tally:
    """Graded attempts at one task; what the machine lost or nobody tested is in neither number."""

    passed: int
    graded: int


def measured_success(directory: Path, phase: str) -> dict[str, Tally]:
    """Tally by task id of all rollouts of a phase under `directory` (of one rank); {} when there are none."""
    found: dict[str, Tally] = {}
    for task_id, reward in _rewards(directory, quote(phase, safe="")):
        if reward is not None and UNTESTED not in reward.terms:
            found[task_id] = _sum([found.get(task_id), Tally(passed=int(reward.solved), graded=1)])
    return found


def merged(parts: Iterable[Mapping[str, Tally]]) -> dict[str, Tally]:
    """The tallies of all ranks as one."""
    listed = list(parts)
    names = dict.fromkeys(name for part in listed for name in part)
    return {name: _sum([part.get(name) for part in listed]) for name in names}


def next_pool(tasks: Sequence[Task], measured: Mapping[str, Tally], *, max_success: float) -> list[Task]:
    """The tasks, in their order, without those that were tried and never solved, and those solved in `max_success` or
    more of the attempts. Tasks that were not tried stay: nothing is known against them."""
    return [task for task in tasks if _stays(measured.get(task.task_id), max_success)]


def _stays(tally: Tally | None, max_success: float) -> bool:
    if tally is None:
        return True
    # 1e-9: a rate that equals the bound up to rounding reaches it (2/3 against 0.6667 written in a file does not)
    return tally.passed > 0 and tally.passed < (max_success - 1e-9) * tally.graded


def _sum(parts: Iterable[Tally | None]) -> Tally:
    given = [part for part in parts if part is not None]
    return Tally(passed=sum(part.passed for part in given), graded=sum(part.graded for part in given))


def _rewards(directory: Path, prefix: str) -> Iterable[tuple[str, Reward | None]]:
    """(task id, reward) of every rollout once: a step that was killed between two forms is in both."""
    import pyarrow.parquet as pq

    pattern = f"{prefix}-[0-9][0-9][0-9][0-9][0-9][0-9]"
    files = sorted(directory.glob(f"{pattern}.parquet"))
    for path in files:
        for row in pq.read_table(path, columns=["task_id", "reward_json"]).to_pylist():
            yield row["task_id"], Reward(**json.loads(row["reward_json"])) if row["reward_json"] else None
    compacted = {path.stem for path in files}
    for path in sorted(directory.glob(f"{pattern}.journal")):
        if path.stem not in compacted:
            yield from ((item.task_id, item.reward) for item in read_journal(path))
