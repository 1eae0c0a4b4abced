"""Which tasks to train on: rules of published systems, caps and seeded subsets. Each says what it removed, and why.

A filter is a function Task -> reason to remove it, or "" to keep it. Cleaning is never neutral (it removes the hard
and the badly described alike), so `FilterReport` counts what goes by difficulty and by repository.
"""

from __future__ import annotations

import hashlib
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from swe_rl.curation.decontaminate import SWEBENCH_REPOS, Contamination
from swe_rl.errors import ConfigError
from swe_rl.tasks.sources.parsed_commit import is_test
from swe_rl.tasks.sources.patch_paths import FileChange, file_changes
from swe_rl.tasks.store import iter_tasks
from swe_rl.types import Task

Filter = Callable[[Task], str]
# In a failed validator's name: the tests ask for names that the issue does not give. The published rows of SWE-rebench
# have other validators (has_hyperlinks, has_many_modified_files, ...): those are for `failed_validator`.
REFERENCE_SIGNS = ("attributeerror", "importerror")
_WORST_SCORE = 3.0


@dataclass(slots=True)
class FilterReport:
    """What one filter saw and removed."""

    name: str
    seen: Counter[tuple[str, str]] = field(default_factory=Counter)  # (what, value) -> tasks: difficulty, repo
    removed: Counter[tuple[str, str]] = field(default_factory=Counter)
    reasons: Counter[str] = field(default_factory=Counter)
    num_seen: int = 0
    num_removed: int = 0

    def saw(self, task: Task, reason: str) -> None:
        keys = [("difficulty", difficulty(task)), ("repo", task.repo)]
        self.num_seen += 1
        self.seen.update(keys)
        if reason:
            self.num_removed += 1
            self.removed.update(keys)
            self.reasons[reason] += 1

    def shares(self, what: str) -> list[tuple[str, int, int]]:
        """(value, seen, removed) per difficulty or repo, the most removed first."""
        rows = [(value, count, self.removed[kind, value]) for (kind, value), count in self.seen.items() if kind == what]
        return sorted(rows, key=lambda row: (-row[2], -row[1], row[0]))


def difficulty(task: Task) -> str:
    """What the source says; otherwise by the size of the solution, in changed lines."""
    stated = task.meta.get("difficulty")
    if stated not in (None, ""):
        return str(stated)
    lines = sum(change.added + change.removed for change in file_changes(task.gold_patch))
    for limit in (0, 5, 20, 100):
        if lines <= limit:
            return "no patch" if limit == 0 else f"<= {limit} lines"
    return "> 100 lines"


def nebius(task: Task) -> str:
    """The rules of arXiv:2508.03501 for SWE-rebench that need no run: at most 7 files and under 500 changed lines, no
    quality score at its worst (3), no tests that ask for names which the issue does not give. Its fourth rule, 50
    repeated runs that agree, is the gate's."""
    changes = file_changes(task.gold_patch)
    if len(changes) > 7:
        return "more than 7 files"
    if sum(change.added + change.removed for change in changes) >= 500:
        return "500 changed lines or more"
    quality = task.meta.get("quality") or {}
    for name, score in (quality.get("llm_score") or {}).items():
        if isinstance(score, int | float) and score >= _WORST_SCORE:
            return f"worst {name}"
    for name in quality.get("failed_lite_validators") or ():
        if any(sign in name.lower().replace("_", "") for sign in REFERENCE_SIGNS):
            return f"validator {name}"
    return ""


def failed_validator(names: Iterable[str]) -> Filter:
    """Removes tasks that failed one of these validators of SWE-rebench's metadata."""
    wanted = set(names)

    def failed(task: Task) -> str:
        listed = (task.meta.get("quality") or {}).get("failed_lite_validators") or ()
        return next((f"validator {name}" for name in listed if name in wanted), "")

    return failed


def r2e_commit(task: Task) -> str:
    """The filter of R2E-Gym's SWE-GEN for commits: at most 5 files outside the tests, 100 edited lines, a patch of
    2,000 characters; at most 1 entity deleted, 3 added, 3 modified and 10 statements, where the row tells them."""
    changes = [change for change in file_changes(task.gold_patch) if not is_test(change.path)]
    if len(changes) > 5:
        return "more than 5 files"
    if _lines(changes) > 100:
        return "more than 100 edited lines"
    if len(task.gold_patch.decode("utf-8", "replace")) > 2000:
        return "patch over 2,000 characters"
    counts = _entities(task)
    for name, limit in (("deleted", 1), ("added", 3), ("modified", 3), ("statements", 10)):
        if counts[name] > limit:
            return f"more than {limit} {name}"
    return ""


def cap_per_repo(limit: int) -> Filter:
    """Keeps the first `limit` tasks of each repository: give them in `by_draw` order where theirs means something."""
    if limit < 1:
        raise ConfigError(f"per-repo={limit}: keep at least 1 task of a repository")
    kept: Counter[str] = Counter()

    def over(task: Task) -> str:
        kept[task.repo] += 1
        return f"over {limit} of its repository" if kept[task.repo] > limit else ""

    return over


def apply_filter(tasks: Iterable[Task], rule: Filter, name: str) -> tuple[list[Task], FilterReport]:
    """(tasks kept, in order; what the filter did)."""
    report = FilterReport(name)
    kept = []
    for task in tasks:
        reason = rule(task)
        report.saw(task, reason)
        if not reason:
            kept.append(task)
    return kept, report


def _removes(rule: Filter, report: FilterReport, task: Task) -> bool:
    reason = rule(task)
    report.saw(task, reason)
    return bool(reason)


def _brief(task: Task) -> Task:
    return replace(
        task,
        problem_statement="",
        fail_to_pass=(),
        pass_to_pass=(),
        gold_patch=b"",
        tree={},
        hidden_files={},
        test_patch=b"",
        test_cmd="",
        expected_status={},
        meta={"difficulty": difficulty(task)},
    )


def by_draw(tasks: Iterable[Task], seed: int) -> list[Task]:
    """The tasks in the seed's order. A task's place depends on its id and the seed alone."""
    return sorted(tasks, key=lambda task: hashlib.sha256(f"{seed}/{task.task_id}".encode()).digest())


def subset(tasks: Iterable[Task], count: int, *, seed: int) -> tuple[list[Task], FilterReport]:
    """`count` tasks by the seed, in their order. Subsets of a grown set mostly stay what they were, and a larger subset
    contains a smaller one."""
    if count < 1:
        raise ConfigError(f"subset={count}: keep at least 1 task")
    everything = list(tasks)
    chosen = {task.task_id for task in by_draw(everything, seed)[:count]}
    return apply_filter(everything, lambda task: "" if task.task_id in chosen else "not drawn", f"subset, seed {seed}")


@dataclass(frozen=True, slots=True, kw_only=True)
class FilterPlan:
    """Which filters run, in this order."""

    nebius: bool = False
    validators: tuple[str, ...] = ()  # failing one of them removes a task
    r2e: bool = False
    swebench_repos: bool = False  # SWE-bench's twelve, those of Verified
    against: tuple[str, ...] = ()  # task sets of evaluation
    similarity: float = 0.5
    per_repo: int | None = None
    subset: int | None = None
    seed: int = 0  # of per_repo and subset


def run_plan(tasks: Iterable[Task], plan: FilterPlan, *, brief: bool = False) -> tuple[list[Task], list[FilterReport]]:
    """(tasks left, in order; one report per filter). Raises ConfigError for a plan that filters nothing.

    `tasks` is read once and not held. brief: of a task left only its id, repository and difficulty are, for sets that
    do not fit into memory.
    """
    if not 0 < plan.similarity <= 1:
        raise ConfigError(f"similarity={plan.similarity} is no share: give more than 0, at most 1")
    for name, limit in (("per-repo", plan.per_repo), ("subset", plan.subset)):
        if limit is not None and limit < 1:
            raise ConfigError(f"{name}={limit}: keep at least 1 task")
    rules = [(rule, FilterReport(name)) for name, rule in _rules(plan)]
    reports = [report for _, report in rules]
    kept = [_brief(task) if brief else task for task in tasks if not any(_removes(*rule, task) for rule in rules)]
    if plan.per_repo is not None:
        order = {task.task_id: place for place, task in enumerate(kept)}
        name = f"at most {plan.per_repo} per repository, seed {plan.seed}"
        chosen, report = apply_filter(by_draw(kept, plan.seed), cap_per_repo(plan.per_repo), name)
        kept = sorted(chosen, key=lambda task: order[task.task_id])
        reports.append(report)
    if plan.subset is not None:
        kept, report = subset(kept, plan.subset, seed=plan.seed)
        reports.append(report)
    if not reports:
        raise ConfigError("no filter was asked for: name at least one")
    return kept, reports


def _rules(plan: FilterPlan) -> list[tuple[str, Filter]]:
    rules: list[tuple[str, Filter]] = []
    if plan.nebius:
        rules.append(("nebius", nebius))
    if plan.validators:
        rules.append(("validators", failed_validator(plan.validators)))
    if plan.r2e:
        rules.append(("r2e commits", r2e_commit))
    if plan.swebench_repos or plan.against:
        held = Contamination(issue_similarity=plan.similarity, patch_similarity=plan.similarity)
        held.add_repos(SWEBENCH_REPOS if plan.swebench_repos else ())
        for path in plan.against:
            for task in iter_tasks(path):
                held.add(task)
        rules.append(("contamination", held.reason))
    return rules


def _lines(changes: Iterable[FileChange]) -> int:
    return sum(change.added + change.removed for change in changes)


def _entities(task: Task) -> Mapping[str, int]:
    """Functions, classes and statements outside the tests that were deleted, added or modified, as the import counted
    them (sources/r2e_gym.py); none where the row did not tell."""
    counts: defaultdict[str, int] = defaultdict(int)
    counts.update(task.meta.get("entities") or {})
    return counts
