"""The file of scored candidates: one line of JSON per rollout, which verifiers fill in and selection reads.

RUN/candidates.jsonl, in a run directory of `swe-rl eval` (or `train`). Everything goes by trajectory id: a score never
finds its rollout by the order of lines or of completion. A field that nobody has filled is null.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError
from swe_rl.evaluation.equivalence import normal_patch, patch_digest
from swe_rl.training.run_dir import write_atomic
from swe_rl.types import Task, Trajectory

FILE_NAME = "candidates.jsonl"
PASSED, RESOLVED = "passed", "resolved"  # the statuses that count, matched exactly


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """One finished rollout, with what is known about it. Only `passed` comes from hidden tests."""

    trajectory_id: str  # unique in the file
    task_id: str
    repository: str
    passed: bool | None = None  # ground truth; a selector never reads it
    patch: str = ""  # normalised diff, "" when nothing was changed
    patch_digest: str = ""  # equal exactly for equivalent patches of one task
    num_turns: int = 0
    num_tokens: int = 0  # sampled
    num_context_tokens: int = 0  # all that the episode holds: prompt, sampled, observations
    seconds: float = 0.0  # of the episode
    stop_reason: str = ""
    mean_logprob: float | None = None  # of the sampled tokens: minus an estimate of the policy's entropy, nats
    ef_score: float | None = None  # execution-free verifier: chance of YES, 0 to 1
    ef_flag: str = ""  # why ef_score is not to be trusted, as when neither answer was among the likely tokens
    regression: Mapping[str, str] | None = None  # existing test -> status with the patch; "passed" counts
    reproduction: Mapping[str, str] | None = None  # written test -> status with the patch; "resolved" counts

    @property
    def regression_passed(self) -> int | None:
        """Existing tests that pass with the patch; None when they were not run."""
        return None if self.regression is None else sum(status == PASSED for status in self.regression.values())

    @property
    def reproduction_resolved(self) -> int | None:
        """Written tests that call the issue resolved; None when they were not run."""
        return None if self.reproduction is None else sum(status == RESOLVED for status in self.reproduction.values())

    @property
    def trusted_score(self) -> float | None:
        """`ef_score`, unless it is flagged: what a verifier said without meaning it, or of a log that gave the answer
        away, is no opinion."""
        return None if self.ef_flag else self.ef_score

    @property
    def abstained(self) -> bool:
        return self.stop_reason == "abstained"


def candidate_of(trajectory: Trajectory, task: Task) -> Candidate:
    """The unscored candidate of a finished rollout. Raises ValueError for one that the machine lost, or of another
    task."""
    if trajectory.task_id != task.task_id:
        raise ValueError(f"{trajectory.trajectory_id} is of task {trajectory.task_id}, not {task.task_id}")
    if trajectory.stop_reason.is_infra:
        raise ValueError(f"{trajectory.trajectory_id} was lost to the machine: it is no candidate")
    patch = normal_patch(trajectory.patch or b"")
    logprobs = [x for turn in trajectory.turns for x in turn.completion.rollout_logprobs if math.isfinite(x)]
    return Candidate(
        trajectory_id=trajectory.trajectory_id,
        task_id=task.task_id,
        repository=task.repo,
        passed=None if trajectory.reward is None else trajectory.reward.solved,
        patch=patch.decode("utf-8", "surrogateescape"),
        patch_digest=patch_digest(trajectory.patch or b"", base=task.tree),
        num_turns=len(trajectory.turns),
        num_tokens=trajectory.num_sampled_tokens,
        num_context_tokens=len(trajectory.token_ids),
        seconds=trajectory.timings_s.get("episode", 0.0),
        stop_reason=str(trajectory.stop_reason),
        mean_logprob=math.fsum(logprobs) / len(logprobs) if logprobs else None,
    )


def write_candidates(path: Path, candidates: Iterable[Candidate]) -> None:
    """Replaces the file. Raises ValueError when two candidates have one id."""
    ordered = list(candidates)
    _by_id(ordered, where=str(path))
    lines = [json.dumps(dataclasses.asdict(item), allow_nan=False) for item in ordered]
    write_atomic(path, "".join(f"{line}\n" for line in lines).encode())


def read_candidates(path: Path) -> list[Candidate]:
    """The candidates of a file, or of the run directory that holds it. ConfigError: none, or a line is malformed."""
    file = path / FILE_NAME if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(f"{file} does not exist: `swe-rl eval` writes it into its run directory")
    found = [_candidate(line, f"{file}:{number}") for number, line in enumerate(_lines(file), 1)]
    _by_id(found, where=str(file))
    return found


def update_candidates(path: Path, changes: Mapping[str, Mapping[str, Any]]) -> list[Candidate]:
    """Sets fields (name -> value) of candidates by trajectory id, in place, and returns all of them.

    One writer at a time; a reader sees the old or the new file. Raises ConfigError for an id that the file does not
    have, TypeError for a field that candidates do not have.
    """
    file = path / FILE_NAME if path.is_dir() else path
    known = read_candidates(file)
    if unknown := sorted(set(changes) - {item.trajectory_id for item in known}):
        raise ConfigError(f"{file} has no candidate {unknown[0]}: score the rollouts of the same run")
    changed = [dataclasses.replace(item, **changes.get(item.trajectory_id, {})) for item in known]
    write_candidates(file, changed)
    return changed


def by_task(candidates: Iterable[Candidate]) -> dict[str, list[Candidate]]:
    """Candidates per task, ordered by trajectory id: nothing depends on the order in which they finished."""
    found: dict[str, list[Candidate]] = {}
    for item in sorted(candidates, key=lambda item: item.trajectory_id):
        found.setdefault(item.task_id, []).append(item)
    return found


def _by_id(candidates: Sequence[Candidate], *, where: str) -> None:
    seen: set[str] = set()
    for item in candidates:
        if item.trajectory_id in seen:
            raise ConfigError(
                f"{where}: candidate {item.trajectory_id} is there twice, so scores cannot tell them apart"
            )
        seen.add(item.trajectory_id)


def _lines(file: Path) -> list[str]:
    return file.read_text(encoding="utf-8").splitlines()


def _candidate(line: str, where: str) -> Candidate:
    try:
        values = json.loads(line)
        item = Candidate(**values)
    except (ValueError, TypeError) as err:
        raise ConfigError(f"{where} is no candidate: {err}") from err
    if not isinstance(item.trajectory_id, str) or item.passed not in (None, True, False):
        raise ConfigError(f"{where}: trajectory_id must be a string, passed true, false or null")
    return item
