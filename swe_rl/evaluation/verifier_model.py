"""The model behind an execution-free verifier: what it must never judge, and the chance that it answers YES.

Where the answer stands is not counted but found: both answers are written as tokens, and the place is the first at
which they differ. What stands before it is given, so nothing is sampled and nothing can be missing from a list of
likely tokens. (A server that only tells its likeliest tokens is read by `answer_probability`.)
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from swe_rl.agents.rendering import Renderer
from swe_rl.batching.packing import assign_rows, pack_row
from swe_rl.config import ModelConfig
from swe_rl.errors import CheckpointError, ConfigError, InvariantError
from swe_rl.evaluation.verifier_prompt import CLOSE, NO, OPEN, YES, answer
from swe_rl.models.forward import head_weight, packed_forward
from swe_rl.models.loading import load_model
from swe_rl.training import checkpoint
from swe_rl.training.run_dir import write_atomic
from swe_rl.types import TrainSample

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MANIFEST = "verifier.json"
MISSING = -10_000.0  # natural log of the probability of an answer that is not among the likely tokens
MIN_MASS = 1e-3  # of YES and NO together: below it the model does not answer the question


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a verifier was made from: what it may judge follows."""

    form: str
    instruction_file: str
    max_tokens: int
    tasks: tuple[str, ...]  # it was trained on
    repositories: tuple[str, ...]

    def check(self, pairs: Iterable[tuple[str, str]]) -> None:
        """(task id, repository) of what shall be judged. ConfigError when the verifier was trained on one of them."""
        tasks, repositories = frozenset(self.tasks), frozenset(self.repositories)
        for task_id, repository in pairs:
            if task_id in tasks or repository in repositories:
                what = f"task {task_id}" if task_id in tasks else f"repository {repository} (of task {task_id})"
                raise ConfigError(
                    f"the verifier was trained on {what}, so its scores there are worthless: judge other tasks, or "
                    "train it without"
                )


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Beside the weights."""
    values = {name: getattr(manifest, name) for name in Manifest.__slots__}
    write_atomic(directory / MANIFEST, json.dumps(values, indent=1).encode())


def read_manifest(directory: Path) -> Manifest:
    """Raises CheckpointError when the directory holds no verifier of ours: what it was trained on is not known then."""
    try:
        values = json.loads((directory / MANIFEST).read_text(encoding="utf-8"))
        return Manifest(**{**values, **{key: tuple(values[key]) for key in ("tasks", "repositories")}})
    except (OSError, ValueError, KeyError, TypeError) as err:
        raise CheckpointError(
            f"{directory} has no readable {MANIFEST}: give a directory that `swe-rl verify train` wrote ({err})"
        ) from err


@dataclass(frozen=True, slots=True, kw_only=True)
class Answers:
    """Both answers as ids: what they share at the start, and where they part."""

    shared: tuple[int, ...]
    yes: int
    no: int


def answers_of(renderer: Renderer) -> Answers:
    """Raises InvariantError when the tokenizer cannot tell the answers apart."""
    yes, no = renderer.action_ids(answer(True)), renderer.action_ids(answer(False))
    place = next((i for i, (a, b) in enumerate(zip(yes, no, strict=False)) if a != b), None)
    if place is None:
        raise InvariantError(f"the tokenizer writes {answer(True)} and {answer(False)} alike")
    return Answers(shared=tuple(yes[:place]), yes=yes[place], no=no[place])


def add_answer_tokens(model: PreTrainedModel, tokenizer: Any) -> None:
    """Makes the four words of an answer tokens of their own, where they are several; in place.

    A new row of the embedding is the mean of the rows of the pieces that the word was before: deterministic, and a
    place from which little has to move.
    """
    pieces = {word: tokenizer.encode(word, add_special_tokens=False) for word in (OPEN, CLOSE, YES, NO)}
    new = [word for word, ids in pieces.items() if len(ids) > 1]
    if not new:
        return
    tokenizer.add_tokens(new)
    resized: Any = model
    old = resized.get_input_embeddings().weight.detach().clone()
    resized.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    with torch.no_grad():
        for matrix in (resized.get_input_embeddings().weight, head_weight(model)):
            for word in new:
                matrix[tokenizer.convert_tokens_to_ids(word)] = old[pieces[word]].mean(dim=0)


@dataclass(frozen=True, slots=True)
class Judgement:
    p_yes: float  # P(YES) / (P(YES) + P(NO))
    flag: str = ""  # why it is not to be trusted


@torch.no_grad()
def judge(
    model: PreTrainedModel, prompts: Sequence[Sequence[int]], answers: Answers, *, max_tokens: int
) -> list[Judgement]:
    """One judgement per prompt, in their order. Rows of at most `max_tokens` packed tokens are run at a time."""
    model.eval()
    device = next(model.parameters()).device
    samples = [_sample(number, [*ids, *answers.shared]) for number, ids in enumerate(prompts)]
    found: dict[int, Judgement] = {}
    for row in assign_rows(samples, max_tokens=max_tokens) if samples else []:
        batch = pack_row([samples[i] for i in row])
        hidden = packed_forward(
            model,
            replace(batch, input_ids=batch.input_ids.to(device), position_ids=batch.position_ids.to(device)),
        )
        last = torch.tensor(batch.cu_seqlens_host[1:], device=device) - 1
        logits = (hidden.index_select(0, last) @ head_weight(model).T).float().log_softmax(dim=-1).cpu()
        for place, i in enumerate(row):
            found[i] = _judgement(float(logits[place, answers.yes]), float(logits[place, answers.no]))
    return [found[i] for i in range(len(samples))]


def _judgement(yes: float, no: float) -> Judgement:
    if not (math.isfinite(yes) and math.isfinite(no)):
        return Judgement(0.0, "not finite")
    mass = math.exp(yes) + math.exp(no)
    return Judgement(1.0 / (1.0 + math.exp(min(no - yes, 700.0))), "" if mass >= MIN_MASS else f"mass {mass:.1e}")


def answer_probability(positions: Sequence[Mapping[str, float]]) -> Judgement:
    """The same from a server's likeliest tokens (text -> natural log) at each generated position.

    Read at the first position where the words, blanks and a leading bracket aside, have MIN_MASS of the probability. A
    word that is not there counts as exp(-10000): the sure answers of a good verifier are just those where the other
    word is not among the likely ones, so that alone is no flaw. Without such a position the first that has a word at
    all is read, and flagged; neither word anywhere: 0, flagged.
    """
    found = []
    for tokens in positions:
        yes, no = (_best(tokens, word) for word in (YES, NO))
        if yes is not None or no is not None:
            found.append(_judgement(MISSING if yes is None else yes, MISSING if no is None else no))
    sure = (judgement for judgement in found if not judgement.flag)
    return next(sure, found[0] if found else Judgement(0.0, "no answer"))


def _best(tokens: Mapping[str, float], word: str) -> float | None:
    return max((value for text, value in tokens.items() if re.fullmatch(rf"[\s>]*{word}\s*", text)), default=None)


def _sample(number: int, ids: Sequence[int]) -> TrainSample:
    zeros = [0.0] * len(ids)
    return TrainSample(
        trajectory_id=str(number),
        input_ids=list(ids),
        loss_mask=[False] * len(ids),
        rollout_logprobs=zeros,
        advantages=zeros,
        turn_ids=[-1] * len(ids),
        policy_version=0,
        temperature=1.0,
    )


def load_verifier(directory: Path) -> tuple[PreTrainedModel, Any, Manifest]:
    """(model in fp32, tokenizer, manifest). Raises ConfigError or CheckpointError, one line."""
    manifest = read_manifest(directory)
    model, tokenizer = load_model(ModelConfig(name=str(directory.absolute())), cache_dir=directory)
    return model, tokenizer, manifest


def save_verifier(
    directory: Path, weights: Mapping[str, torch.Tensor], manifest: Manifest, *, model_config: Any, tokenizer: Any
) -> None:
    """Weights that transformers loads, with the manifest. Call on rank 0 only."""
    checkpoint.export(directory, weights, model_config=model_config, tokenizer=tokenizer)
    write_manifest(directory, manifest)
