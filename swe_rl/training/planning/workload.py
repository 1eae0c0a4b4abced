"""What a recipe asks of trainer and engine in each of its phases, as far as its configuration tells."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from swe_rl.config import PhaseConfig, TrainConfig, expand_rounds, phase_config
from swe_rl.config.algo import SEQUENCE_CORRECTIONS, bypasses
from swe_rl.training.planning.engine import Episodes
from swe_rl.training.planning.times import StepTokens

if TYPE_CHECKING:
    from swe_rl.training.planning.hardware import Efficiency


@dataclass(frozen=True, slots=True, kw_only=True)
class Assumptions:
    """What no configuration says. Shares are of agent.max_context_tokens and of a trajectory's tokens."""

    efficiency: Efficiency
    mean_share: float = 0.25  # mean length; NeMo-RL's SWE runs: 31,599 of 131,072
    spread: float = 1.5  # mean of squared lengths over the square of the mean
    sampled_share: float = 0.25  # tokens that the policy wrote, which are trained
    tool_s: float = 5.0  # of one turn's command
    turn_share: float = 0.5  # of agent.max_turns
    pass_share: float = 0.1  # of attempts, where those that pass are imitated; arXiv:2508.03501: 6,548 of 72,490


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseWork:
    """One phase. An iteration is an optimizer step in supervised phases."""

    name: str
    online: bool  # an iteration begins with rollouts of the newest weights
    iterations: int
    episodes: Episodes | None  # of one iteration; of supervised phases, its share of those before the first
    optimizer_steps: int  # of one iteration
    step: StepTokens  # of one optimizer step
    scoring_passes: int  # forward passes over all tokens before the first step of an iteration
    row_tokens: int  # of a micro-batch
    dtype: str
    optimizer: str
    reference: bool
    overlaps: bool  # rollouts of the next iteration run while this one is trained on

    def rows_per_rank(self, data: int) -> int:
        """Micro-batches of one data parallel rank in one optimizer step, full rows."""
        return -(-self.rows_per_step // data)

    @property
    def rows_per_step(self) -> int:
        return -(-self.step.tokens // self.row_tokens)


def phases(cfg: TrainConfig, assumed: Assumptions) -> list[PhaseWork]:
    """Every phase of a checked configuration."""
    return [_phase(phase_config(cfg, phase), phase, assumed) for phase in expand_rounds(cfg.phases)]


def _phase(cfg: TrainConfig, phase: PhaseConfig, assumed: Assumptions) -> PhaseWork:
    longest = cfg.agent.max_context_tokens
    sampling = phase.data != "demonstrations"
    mean = max(int(longest * assumed.mean_share), 1)
    online = phase.data == "rollouts"
    if online:
        count, iterations = phase.tasks_per_step * cfg.rollout.group_size, phase.steps
        batch = min(phase.minibatch_size or count, count)
    else:
        count, batch = phase.num_tasks * phase.samples_per_task, phase.batch_size
        kept = assumed.pass_share if phase.data == "passed_rollouts" else 1.0
        iterations = max(1, int(phase.epochs * count * kept) // batch)
    steps = -(-count // batch) * cfg.algo.epochs if online else 1
    turns = max(1, int(cfg.agent.max_turns * assumed.turn_share))
    return PhaseWork(
        name=phase.name,
        online=online,
        iterations=iterations,
        episodes=Episodes(
            count=count if online else -(-count // iterations),
            mean_tokens=mean,
            max_tokens=longest,
            sampled_tokens=max(int(mean * assumed.sampled_share), 1),
            waiting_s=turns * assumed.tool_s,
            longest_waiting_s=cfg.agent.max_turns * assumed.tool_s,
        )
        if sampling
        else None,
        optimizer_steps=steps,
        step=StepTokens(documents=batch, mean_tokens=mean, spread=assumed.spread, trained_share=assumed.sampled_share),
        scoring_passes=_scoring_passes(cfg, steps) if online else 0,
        row_tokens=max(cfg.batching.max_tokens_per_batch, longest),
        dtype=cfg.model.dtype,
        optimizer=cfg.trainer.optimizer,
        reference=bool(online and cfg.algo.kl_coeff),
        overlaps=online and cfg.rollout.max_staleness > 0,
    )


def _scoring_passes(cfg: TrainConfig, steps: int) -> int:
    """As training.step_batches scores: the old policy when it differs from the current one, the reference for KL."""
    algo = cfg.algo
    old = not bypasses(algo, cfg.rollout) and (steps > 1 or algo.correction in SEQUENCE_CORRECTIONS)
    return int(old) + int(bool(algo.kl_coeff) and algo.kl_in == "loss")
