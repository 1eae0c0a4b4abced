"""From graded rollouts to what a verifier learns from and judges: prompts of token ids, with answers where known.

The order of the inputs decides nothing: everything goes by trajectory id.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

from swe_rl.agents.formats import FORMATS
from swe_rl.agents.prompts import load_prompt
from swe_rl.agents.rendering import Renderer
from swe_rl.agents.toolsets import make_toolset
from swe_rl.config import AgentConfig, VerifierConfig
from swe_rl.errors import ConfigError
from swe_rl.evaluation.verifier_leaks import LeakError, leaks
from swe_rl.evaluation.verifier_prompt import FORMS, Log, answer, condense, make_log, messages
from swe_rl.rollout.seeds import stable_seed
from swe_rl.tasks import minirepo, read_tasks
from swe_rl.types import Task, TrainSample, Trajectory

LEAVE_OUT = "leave this trajectory out, and find out how the agent came to see it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One trajectory as a verifier is asked about it."""

    trajectory_id: str
    task_id: str
    repository: str
    prompt_ids: list[int] = field(repr=False)  # up to where the answer begins
    solved: bool | None  # by the hidden tests; None when not graded
    thoughts_left_out: int = 0
    outputs_left_out: int = 0
    fits: bool = True
    leak: str = ""  # what the log gives away, "" for nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """Turns trajectories into questions: whose words they are, and in which form a verifier reads them."""

    cfg: VerifierConfig
    agent: AgentConfig  # of the rollouts
    policy: Renderer  # of the tokenizer that the rollouts were sampled with
    verifier: Renderer

    def log(self, trajectory: Trajectory, task: Task) -> Log:
        """The trajectory as text."""
        toolset = make_toolset(self.agent)
        action_format = FORMATS[self.agent.action_format].bind(toolset.signatures)
        opening = load_prompt(self.agent.prompt).messages(task, tools=toolset.tools, action_format=action_format)
        return make_log(trajectory, task, opening=opening, decode=self.policy.text, action_format=action_format)

    def question(self, trajectory: Trajectory, task: Task) -> Question:
        """Condensed to verifier.max_tokens. What is too long all the same says `fits` false, and is cut nowhere."""
        log, form = self.log(trajectory, task), FORMS[self.cfg.form]
        instruction = Path(self.cfg.instruction_file).read_text() if self.cfg.instruction_file else ""
        whole = self.verifier.initial_ids(messages(log, form, instruction=instruction))
        condensed = None
        if len(whole) > self.cfg.max_tokens:
            condensed = condense(
                log,
                budget=self.cfg.max_tokens,
                total=len(whole),
                count=lambda text: len(self.verifier.plain(text)),
            )
            whole = self.verifier.initial_ids(messages(condensed.log, form, instruction=instruction))
        return Question(
            trajectory_id=trajectory.trajectory_id,
            task_id=task.task_id,
            repository=repository_of(task),
            prompt_ids=whole,
            solved=None if trajectory.reward is None else trajectory.reward.solved,
            thoughts_left_out=condensed.thoughts if condensed else 0,
            outputs_left_out=condensed.outputs if condensed else 0,
            fits=len(whole) <= self.cfg.max_tokens,
            leak=next(leaks(log, task), ""),
        )


def repository_of(task: Task) -> str:
    """What a verifier may not have seen before: the repository. Those of minirepo are made anew for each task, under
    names from one short list; what its tasks share is the function and the kind of its bug."""
    return f"minirepo/{task.meta['pair']}" if task.source == "minirepo" else task.repo


def training_questions(
    questions: Iterable[Question], *, balance: str, seed: int, chance_leaks: float = 0.0
) -> tuple[list[Question], dict[str, float]]:
    """(questions with known answers, balanced and shuffled; counts by name). `balance`: see `balanced`.

    Left out: what is not graded, and what does not fit. Raises LeakError for a log that holds hidden test output,
    hidden tests or the gold patch, ConfigError when nothing is left or an id is there twice. `chance_leaks`: so large a
    share of such logs is left out instead, for attempts that were just sampled where none of it was: there a policy can
    only have come upon a line by itself, which happens now and then among thousands.
    """
    counts: Counter[str] = Counter()
    found: dict[str, Question] = {}
    ordered = sorted(questions, key=lambda item: item.trajectory_id)
    leaked = [question for question in ordered if question.leak]
    if len(leaked) > chance_leaks * len(ordered):
        raise LeakError(f"{leaked[0].trajectory_id}: {leaked[0].leak}: {LEAVE_OUT}")
    for question in ordered:
        if question.trajectory_id in found:
            raise ConfigError(f"trajectory {question.trajectory_id} is there twice: name each run once")
        counts["seen"] += 1
        counts["leaked"] += bool(question.leak)
        counts["condensed"] += bool(question.thoughts_left_out or question.outputs_left_out)
        counts["ungraded"] += question.solved is None
        counts["too_long"] += not question.fits
        if question.solved is not None and question.fits and not question.leak:
            found[question.trajectory_id] = question
    kept = balanced(list(found.values()), balance, seed=seed)
    counts["kept"], counts["solved"] = len(kept), sum(bool(question.solved) for question in kept)
    if not kept:
        raise ConfigError(
            f"nothing is left to learn from ({dict(counts)}, verifier.balance={balance}): sample more tasks or more "
            "attempts, so that some are solved and some are not"
        )
    return kept, {f"verifier/num_{name}": float(value) for name, value in counts.items()}


def balanced(questions: Sequence[Question], how: str, *, seed: int) -> list[Question]:
    """As many solved as unsolved ones, in a shuffled order that the ids and the seed decide.

    all: of all tasks together; pairs: within each task, so that the task itself says nothing about the answer, and
    tasks that were always or never solved are left out; none: everything.
    """
    pools: dict[str, list[Question]] = {}
    for question in sorted(questions, key=lambda item: item.trajectory_id):
        pools.setdefault(question.task_id if how == "pairs" else "", []).append(question)
    kept = []
    for name, pool in pools.items():
        sides = [[q for q in pool if q.solved], [q for q in pool if not q.solved]]
        room = len(pool) if how == "none" else min(map(len, sides))
        for number, side in enumerate(sides):
            random.Random(stable_seed("verifier-balance", seed, name, number)).shuffle(side)
            kept += side[:room]
    random.Random(stable_seed("verifier-order", seed, how)).shuffle(kept)
    return kept


def to_sample(question: Question, verifier: Renderer) -> TrainSample:
    """The prompt as context and the answer, with the end of the turn, as what is learnt."""
    assert question.solved is not None
    ids = verifier.action_ids(answer(question.solved))
    context = len(question.prompt_ids)
    return TrainSample(
        trajectory_id=question.trajectory_id,
        input_ids=[*question.prompt_ids, *ids],
        loss_mask=[False] * context + [True] * len(ids),
        rollout_logprobs=[0.0] * (context + len(ids)),
        advantages=[0.0] * context + [1.0] * len(ids),
        turn_ids=[-1] * context + [0] * len(ids),
        policy_version=0,
        temperature=1.0,
    )


def tasks_by_id(source: str, ids: Iterable[str]) -> dict[str, Task]:
    """The tasks of rollouts, from where they came. ConfigError for one that is not there."""
    wanted = set(ids)
    found = _minirepo(wanted) if source == "minirepo" else {t.task_id: t for t in read_tasks(source)}
    if missing := sorted(wanted - set(found)):
        raise ConfigError(f"task.source={source} has no task {missing[0]}: name the source that the rollouts came from")
    return {task_id: found[task_id] for task_id in wanted}


def _minirepo(wanted: set[str]) -> dict[str, Task]:
    """Generated again: an id says split, seed and place."""
    places: dict[tuple[str, int], int] = {}
    for task_id in wanted:
        words = task_id.split("-")
        if len(words) != 4 or words[0] != "minirepo" or not (words[2] + words[3]).isdigit():
            continue
        key = (words[1], int(words[2]))
        places[key] = max(places.get(key, 0), int(words[3]))
    found = {}
    for (split, seed), last in places.items():
        for task in islice(minirepo.generate(split=split, seed=seed), last + 1):
            found[task.task_id] = task
    return found
