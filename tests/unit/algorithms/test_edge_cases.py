"""The edge cases that loss code gets wrong: lonely rollouts, nothing to train, overflow, failed scoring, uneven
groups."""

from __future__ import annotations

import math

import pytest
import torch
from episodes import episode, group_of, plain, rewards_group

from swe_rl.algorithms import assign_credit, group_advantages
from swe_rl.algorithms.credit import informative
from swe_rl.algorithms.sequences import sequence_coefficient
from swe_rl.batching import to_samples
from swe_rl.config import AlgoConfig
from swe_rl.config.algo import BOUNDS
from swe_rl.errors import ConfigError, InvariantError, SandboxError
from swe_rl.ops.token_loss import token_loss
from swe_rl.sample_streams import with_credit
from swe_rl.types import StopReason

GROUP_MODES = tuple(mode for mode in BOUNDS.choices["advantage"] if mode != "gae")


@pytest.mark.parametrize("mode", GROUP_MODES)
def test_group_of_one(mode: str) -> None:
    group = rewards_group(1.0)
    credits, counts = assign_credit([group], AlgoConfig(advantage=mode))
    assert [c.advantages for c in credits] == [[0.0]]
    assert counts["singleton"] == 1
    if mode != "reinforce_pp":  # whitening centres the only value there is
        rewarded, _ = assign_credit([group], AlgoConfig(advantage=mode, singleton="reward"))
        assert [c.advantages for c in rewarded] == [[1.0]]


@pytest.mark.parametrize("mode", GROUP_MODES)
@pytest.mark.parametrize("value", [0.0, 1.0, 1 / 3])
def test_all_rewards_equal(mode: str, value: float) -> None:
    credits, counts = assign_credit([rewards_group(*[value] * 5)], AlgoConfig(advantage=mode))
    assert all(c.advantages == [0.0] for c in credits)
    assert counts["uniform"] == 1
    for_one_only, _ = assign_credit([rewards_group(*[value] * 5)], AlgoConfig(advantage=mode, singleton="reward"))
    assert all(c.advantages == [0.0] for c in for_one_only)
    kept, _ = assign_credit([rewards_group(*[value] * 5)], AlgoConfig(advantage=mode, drop_uniform_groups=True))
    assert kept == []


def test_everything_masked_row_group_batch() -> None:
    algo = AlgoConfig()
    long = [plain(f"l{i}", 0.0, index=i, stop=StopReason.MAX_TURNS) for i in range(3)]
    found = with_credit([group_of(plain("w", 1.0), long[0])], algo, step=0, seed=0)
    assert [any(s.loss_mask) for s in found.samples] == [True, False]
    found = with_credit([group_of(*long)], algo, step=0, seed=0)
    assert len(found.samples) == 3, "masked rows stay rows"
    assert not any(any(s.loss_mask) for s in found.samples)
    assert found.metrics["rollout/masked"] == 3
    assert found.metrics["rollout/filtered_max_turns"] == 3


def test_fewer_than_two_after_drop() -> None:
    algo = AlgoConfig(stop_preset="rllm_main")
    credits, counts = assign_credit([group_of(plain("w", 1.0), plain("l", 0.0, stop=StopReason.MAX_TURNS))], algo)
    assert [c.advantages for c in credits] == [[0.0]]
    assert counts["dropped"] == counts["singleton"] == 1
    nobody, _ = assign_credit([group_of(plain("l", 0.0, stop=StopReason.MAX_TURNS))], algo)
    assert nobody == []


@pytest.mark.parametrize("far", [-1e4, 1e4, -math.inf])
def test_ratio_overflow_is_clamped(far: float) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    ones = torch.ones(1)
    old = torch.tensor([far])
    for rule in ("ppo", "cispo"):
        loss, _ = token_loss(logprobs, entropy=ones, advantages=-ones, old_logprobs=old, ratio_rule=rule)
        loss.backward()
        assert torch.isfinite(loss).all()
        assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("value", [None, math.nan, math.inf])
def test_a_reward_that_is_missing_is_never_zero(value: float | None) -> None:
    """(1, 0, failed sandbox): the advantages of a group of two, not of (1, 0, 0)."""
    credits, counts = assign_credit([group_of(plain("a", 1.0), plain("b", 0.0), plain("c", value))], AlgoConfig())
    assert [c.advantages for c in credits] == [[1.0], [-1.0]]
    assert counts["unscored"] == 1


def test_an_outage_is_in_no_baseline_and_no_statistic_of_groups() -> None:
    lost = plain("c", None, stop=StopReason.INFRA_ERROR)
    algo = AlgoConfig(drop_uniform_groups=True)
    assert not informative(group_of(plain("a", 1.0), lost), algo), "what is left is one member: nothing to compare"
    with pytest.raises(SandboxError, match="lost to infrastructure"):
        with_credit([group_of()], algo, step=0, seed=0)


def test_zero_token_actions_have_no_token_to_train() -> None:
    silent = episode("s", 1.0, [([1], [2, 3]), ([4], []), ([5], [6])])
    samples = to_samples(silent, [0.5, 0.6, 0.7])
    assert sum(samples[0].loss_mask) == 3
    assert [a for a, m in zip(samples[0].advantages, samples[0].loss_mask, strict=True) if m] == [0.5, 0.5, 0.7]
    nothing = episode("n", 1.0, [([1], [])])
    assert not any(to_samples(nothing, 1.0)[0].loss_mask)
    assert to_samples(episode("e", 0.0, []), 1.0) == []


def test_two_groups_of_one_name_in_a_batch_are_refused() -> None:
    with pytest.raises(InvariantError, match="two groups of this batch are called g"):
        assign_credit([rewards_group(1.0, 0.0), rewards_group(0.0, 1.0)], AlgoConfig())


def test_groups_of_different_batches_never_mix() -> None:
    first, _ = assign_credit([rewards_group(1.0, 0.0)], AlgoConfig())
    second, _ = assign_credit([rewards_group(1.0, 1.0)], AlgoConfig())
    assert [c.advantages for c in first] == [[1.0], [-1.0]]
    assert [c.advantages for c in second] == [[0.0], [0.0]]


def test_uneven_groups_are_each_their_own() -> None:
    """Sizes 2, 3 and 1 after retries: the baseline of a group is over who is left in it, whatever the order."""
    groups = [rewards_group(1.0, 0.0, name="a"), rewards_group(1.0, 0.0, 0.0, name="b"), rewards_group(1.0, name="c")]
    want = {"a": [1.0, -1.0], "b": [1.0, -0.5, -0.5], "c": [0.0]}
    for order in (groups, groups[::-1]):
        credits, _ = assign_credit(order, AlgoConfig())
        for name, values in want.items():
            assert [c.advantages[0] for c in credits if c.trajectory.group_id == name] == values


def test_a_nan_logprob_of_the_engine_leaves_mask_and_denominator() -> None:
    odd = episode("o", 1.0, [([1], [2, 3])], logprobs=[[-1.0, math.nan]])
    sample = to_samples(odd, 1.0)[0]
    assert sample.loss_mask == [False, True, False]
    assert sample.rollout_logprobs == [0.0, -1.0, 0.0]
    assert sample.advantages == [0.0, 1.0, 0.0]


def test_sequence_coefficients_at_their_edges() -> None:
    assert sequence_coefficient([], "sequence_mask", low=0.5, cap=2.0) == 1.0
    assert sequence_coefficient([1e6], "sequence_tis", low=0.0, cap=3.0) == 3.0
    assert sequence_coefficient([-1e6], "sequence_mask", low=0.0, cap=3.0) == pytest.approx(math.exp(-20))
    assert sequence_coefficient([math.log(2.0)], "sequence_mask", low=0.5, cap=2.0) == pytest.approx(2.0)
    with pytest.raises(InvariantError, match="no finite logprob"):
        sequence_coefficient([math.nan], "sequence_tis", low=0.5, cap=2.0)
    with pytest.raises(ConfigError, match="no correction of whole sequences"):
        sequence_coefficient([0.0], "tis", low=0.5, cap=2.0)


def test_a_product_rejects_long_rollouts_first_and_the_geometric_mean_does_not() -> None:
    """0.001 nats of mismatch per token: harmless at 100 tokens, e^30 at 30,000."""
    drift = [0.001]
    assert sequence_coefficient(drift * 100, "sequence_mask", low=0.5, cap=2.0) > 0
    assert sequence_coefficient(drift * 30_000, "sequence_mask", low=0.5, cap=2.0) == 0
    for length in (100, 30_000):
        assert sequence_coefficient(drift * length, "geometric_mask", low=0.99, cap=1.01) == 1.0


def test_unknown_names_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"algo\.advantage='mine'"):
        group_advantages([1.0], "mine")
    with pytest.raises(ConfigError, match=r"algo\.singleton='one'"):
        group_advantages([1.0], "leave_one_out", singleton="one")
