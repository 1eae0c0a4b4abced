"""The parity probe: does the trainer give the engine's tokens the probabilities that the engine says they had?

Two-turn episodes of made-up tokens are sampled at short, middle and long contexts (beyond the original context of a
stretched rotary embedding), some of them the same in every probe, and scored by the trainer with the weights that were
published. What differs, and where, tells the likely cause: see parity_causes.py.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from swe_rl.batching import to_samples
from swe_rl.batching.packing import pack_row
from swe_rl.config import ModelConfig
from swe_rl.config.model import YARN_KEYS
from swe_rl.errors import InvariantError
from swe_rl.models.contract import PolicyContract
from swe_rl.models.rope import set_rope
from swe_rl.protocols import Policy, SamplingParams
from swe_rl.training.parity_causes import Evidence, PairedTokens, likely_causes
from swe_rl.types import PackedBatch, StopReason, TrainSample, Trajectory, Turn

Score = Callable[[Sequence[PackedBatch]], list[Tensor]]  # TorchBackend.logprobs

TURNS = 2  # the second reads what the first left in the prefix cache
ANSWER = 12  # tokens sampled per turn
OBSERVATION = 5  # tokens between the turns
SHORT = 24  # tokens of the short prompts
BEYOND = 1.25  # length of the long ones in original contexts
UNKNOWN = "none that is known: compare the two models layer by layer"
FIXED_SEED = 20_250_803  # of the prompts that are the same in every probe


@dataclass(frozen=True, slots=True, kw_only=True)
class ParityReport:
    """Differences of logprobs in nats, trainer minus engine, of the tokens that the engine sampled."""

    means: Mapping[str, float]  # mean |difference| by length: short, middle, long
    bias: float  # mean difference over all lengths
    bound: float  # of each of the means
    bias_bound: float
    num_tokens: int
    causes: Sequence[str]  # likely ones first; only above the bound

    @property
    def ok(self) -> bool:
        return all(mean <= self.bound for mean in self.means.values()) and abs(self.bias) <= self.bias_bound

    def describe(self) -> str:
        """One line: the differences, and above the bound what most likely made them, in order."""
        found = ", ".join(f"{name} {value:.1e}" for name, value in self.means.items())
        line = f"mean |trainer - engine| logprob over {self.num_tokens} tokens: {found}; bound {self.bound:g}"
        line += f"; with its sign {self.bias:+.1e}, bound {self.bias_bound:g}"
        if self.ok:
            return f"trainer and engine agree: {line}"
        causes = "; ".join(f"{number}. {cause}" for number, cause in enumerate(self.causes or [UNKNOWN], 1))
        return f"trainer and engine disagree: {line}; likely causes, in order: {causes}"

    def require(self) -> None:
        """Raises InvariantError when they disagree: training on would be silently wrong."""
        if not self.ok:
            raise InvariantError(self.describe())


async def sample_probe(engine: Policy, contract: PolicyContract, *, nonce: int) -> list[Trajectory]:
    """Plays the probe's episodes. Ids name the length and whether the prompt is "fixed", the same in every probe, or
    "fresh", made from `nonce`."""
    found = []
    for name, length in probe_lengths(contract).items():
        for kind, seed in (("fixed", FIXED_SEED), ("fresh", FIXED_SEED + 1 + nonce)):
            found.append(await _play(engine, contract, name=f"{name}/{kind}", length=length, seed=seed))
    return found


def probe_lengths(contract: PolicyContract) -> dict[str, int]:
    """Tokens of the prompts by name. Without a stretched embedding the long one nearly fills the context."""
    most = contract.max_context - TURNS * (ANSWER + OBSERVATION)
    if most < 2:
        raise InvariantError(f"a context of {contract.max_context} tokens is too short for a parity probe")
    original = contract.original_context
    long = min(most, int(BEYOND * original)) if 0 < original < most else most
    middle = min(original or long, long) // 2
    short = min(SHORT, most)
    return {"short": short, "middle": max(middle, short), "long": max(long, short)}


def compare(
    trajectories: Sequence[Trajectory],
    contract: PolicyContract,
    *,
    score: Score,
    without: Mapping[str, Score] | None = None,
    anywhere: Callable[[bool], bool] = bool,
) -> ParityReport:
    """Scores the episodes by the trainer, one per row. `without` are scores by a trainer that lacks something by name,
    see `rope_variants`. Collective where `score` is: `anywhere` then says whether something is so on some rank, and
    every rank scores equally often."""
    samples = [sample for trajectory in trajectories for sample in to_samples(trajectory, 0.0)]
    pairs = _pairs(samples, score)
    means = {
        name: _mean([abs(d) for key, pair in pairs.items() if _length_of(key) == name for d in pair.differences])
        for name in ("short", "middle", "long")
    }
    bias = _mean([d for pair in pairs.values() for d in pair.differences])
    over = any(not mean <= contract.bound for mean in means.values()) or not abs(bias) <= contract.bias_bound
    causes: Sequence[str] = ()
    if anywhere(over):
        tempered = {value: _pairs([replace(s, temperature=value) for s in samples], score) for value in TEMPERATURES}
        roped = {name: _pairs(samples, lacking) for name, lacking in (without or {}).items()}
        evidence = Evidence(pairs=pairs, tempered=tempered, roped=roped, contract=contract)
        causes = likely_causes(evidence) if over else ()
    return ParityReport(
        means=means,
        bias=bias,
        bound=contract.bound,
        bias_bound=contract.bias_bound,
        num_tokens=sum(len(p.engine) for p in pairs.values()),
        causes=causes,
    )


TEMPERATURES = (0.3, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 2.0)  # tried when temperatures may differ


def rope_variants(model: Any, cfg: ModelConfig, score: Score) -> dict[str, Score]:
    """Scores by the same model without YaRN, and without its attention factor: what engines have dropped. `score` must
    use `model`; its rotary embedding is that of `cfg` again afterwards. Empty without YaRN."""
    if cfg.yarn_factor == 1:
        return {}
    plain = ModelConfig()
    whole = {key: getattr(plain, key) for key in YARN_KEYS}
    factor = {"yarn_attention_factor": 1.0, "yarn_mscale": 0.0, "yarn_mscale_all_dim": 0.0}

    def variant(changes: Mapping[str, Any]) -> Score:
        def scored(batches: Sequence[PackedBatch]) -> list[Tensor]:
            set_rope(model, replace(cfg, **changes))
            try:
                return score(batches)
            finally:
                set_rope(model, cfg)

        return scored

    return {"YaRN": variant(whole), "YaRN's attention factor": variant(factor)}


async def _play(engine: Policy, contract: PolicyContract, *, name: str, length: int, seed: int) -> Trajectory:
    draw = random.Random(seed)
    session = f"parity/{name}/{seed}"
    usable = [i for i in range(contract.vocab_size) if i not in contract.stop_ids]
    added, ids, turns = [draw.choice(usable) for _ in range(length)], list[int](), list[Turn]()
    try:
        for turn in range(TURNS):
            ids += added
            params = SamplingParams(
                temperature=contract.temperature,
                max_new_tokens=ANSWER,
                stop_ids=contract.stop_ids,
                seed=seed + turn,
            )
            completion = await engine.generate(ids, params, session=session)
            turns.append(Turn(context_ids=added, completion=completion, tool_call=None, observation=""))
            ids = [*ids, *completion.token_ids]
            added = [draw.choice(usable) for _ in range(OBSERVATION)]
    finally:
        await engine.release(session)
    return Trajectory(
        trajectory_id=session,
        task_id="parity",
        group_id="parity",
        rollout_index=0,
        turns=turns,
        stop_reason=StopReason.MAX_TURNS,
        temperature=contract.temperature,
    )


def _pairs(samples: Sequence[TrainSample], score: Score) -> dict[str, PairedTokens]:
    return {sample.trajectory_id: _paired(sample, _scored(sample, score)) for sample in samples}


def _scored(sample: TrainSample, score: Score) -> list[float]:
    """The trainer's logprob of each sampled token, in order."""
    (found,) = score([pack_row([sample])])
    trained = [index - 1 for index, trains in enumerate(sample.loss_mask) if trains]  # label t is at t - 1
    return [float(found[index]) for index in trained]


def _paired(sample: TrainSample, trainer: list[float]) -> PairedTokens:
    engine = [p for p, trains in zip(sample.rollout_logprobs, sample.loss_mask, strict=True) if trains]
    turns = [turn for turn, trains in zip(sample.turn_ids, sample.loss_mask, strict=True) if trains]
    return PairedTokens(engine=engine, trainer=trainer, turns=turns)


def _length_of(session: str) -> str:
    return session.split("/")[1]


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
