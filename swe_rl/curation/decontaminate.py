"""Keeps the evaluation set out of training: by repository, by the same change, by a similar issue text.

Similarity is the resemblance of Broder, "On the resemblance and containment of documents" (1997): the Jaccard index of
the sets of shingles, here every run of five words of an issue, and every changed line of a patch. It is computed
exactly, through an index from shingle to the evaluation tasks that have it.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

from swe_rl.types import Task

# The twelve repositories of SWE-bench and of its Verified part.
SWEBENCH_REPOS = (
    "astropy/astropy", "django/django", "matplotlib/matplotlib", "mwaskom/seaborn", "pallets/flask", "psf/requests",
    "pydata/xarray", "pylint-dev/pylint", "pytest-dev/pytest", "scikit-learn/scikit-learn", "sphinx-doc/sphinx",
    "sympy/sympy",
)  # fmt: skip
WORDS = 5  # per shingle of an issue
_WORD = re.compile(r"[a-z0-9_]+")


@dataclass(slots=True)
class Contamination:
    """What must not be trained on. `add` takes the evaluation tasks, `reason` judges a training task.

    issue_similarity, patch_similarity: from which on, in (0, 1], a task counts as the same.
    """

    repos: set[str] = field(default_factory=set)
    issue_similarity: float = 0.5
    patch_similarity: float = 0.5
    _issues: _Index = field(default_factory=lambda: _Index())
    _patches: _Index = field(default_factory=lambda: _Index())

    def add_repos(self, names: Iterable[str]) -> None:
        """Repositories by "owner/name"."""
        self.repos.update(name.lower() for name in names)

    def add(self, task: Task, *, repo: bool = True) -> None:
        """One task of the evaluation set. repo: the whole repository is off limits, too."""
        if repo:
            self.add_repos([task.repo])
        self._issues.add(task.task_id, issue_shingles(task.problem_statement))
        self._patches.add(task.task_id, patch_shingles(task.gold_patch))

    def reason(self, task: Task) -> str:
        """Why the task is contaminated, "" when it is not."""
        if self.holds_repo(task.repo):
            return "repository of the evaluation set"
        if self._patches.nearest(patch_shingles(task.gold_patch))[0] >= self.patch_similarity:
            return "solution like one of the evaluation set"
        if self._issues.nearest(issue_shingles(task.problem_statement))[0] >= self.issue_similarity:
            return "issue like one of the evaluation set"
        return ""

    def holds_repo(self, repo: str) -> bool:
        """Whether a repository is off limits. A mirror such as "swesmith/django__django.abc1234" and a bare name such
        as "sympy" count as the repository they copy."""
        names = {name.rpartition("/")[2] for name in self.repos}
        return bool(_aliases(repo) & (self.repos | names))


def issue_shingles(text: str) -> frozenset[int]:
    """Hashes of every run of five words; a shorter text is one shingle."""
    words = _WORD.findall(text.lower())
    count = max(1, len(words) - WORDS + 1) if words else 0
    return frozenset(_hash(" ".join(words[i : i + WORDS])) for i in range(count))


def patch_shingles(patch: bytes) -> frozenset[int]:
    """Hashes of the changed lines with their sign, blanks left out: where a hunk lies does not matter."""
    lines = patch.decode("utf-8", "replace").splitlines()
    changed = [line for line in lines if line[:1] in "+-" and not line.startswith(("+++ ", "--- "))]
    bare = ["".join(line.split()) for line in changed]
    return frozenset(_hash(line) for line in bare if len(line) > 1)


class _Index:
    """Sets of shingles by name, and for each shingle the sets that have it."""

    def __init__(self) -> None:
        self._sizes: dict[str, int] = {}
        self._holders: defaultdict[int, list[str]] = defaultdict(list)

    def add(self, name: str, shingles: frozenset[int]) -> None:
        if name in self._sizes:
            return
        self._sizes[name] = len(shingles)
        for shingle in shingles:
            self._holders[shingle].append(name)

    def nearest(self, shingles: frozenset[int]) -> tuple[float, str]:
        """(similarity, name) of the most similar set; (0, "") when none shares a shingle."""
        shared = Counter(name for shingle in shingles for name in self._holders.get(shingle, ()))
        ranked = ((count / (len(shingles) + self._sizes[name] - count), name) for name, count in shared.items())
        return max(ranked, default=(0.0, ""))


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "replace"), digest_size=7).digest(), "big")


def _aliases(repo: str) -> set[str]:
    """Names under which `repo` may be listed: itself, its last part, and what a mirror's name says it copies."""
    name = repo.lower()
    last = name.rpartition("/")[2]
    found = {name, last} if "/" not in name else {name}
    if "__" in last:
        owner, _, rest = last.partition("__")
        found.add(f"{owner}/{rest.rpartition('.')[0] or rest}")
    return found
