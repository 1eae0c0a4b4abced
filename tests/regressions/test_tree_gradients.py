"""A group trained as trees has the loss, the scores and the gradient of its samples one by one.

Bounds: fp64 1e-10, fp32 1e-5, relative per tensor (difference norm over norm). Groups have forks inside turns,
identical rollouts, turns of one token, several temperatures, an old policy far enough away that the clip acts.
"""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import gradients_worker as case
import pytest
import torch
from torch import Tensor
from tree_groups import random_group

from swe_rl.algorithms.sequences import gspo_old, with_sequence_coeff
from swe_rl.batching.layout import PackedSamples, lay_out
from swe_rl.config import AlgoConfig
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import TrainSample

BOUNDS = {torch.float64: 1e-10, torch.float32: 1e-5}
BUDGETS = (1000, 40, 17)  # one row; several; so small that trees are cut


def group(seed: str, *, vocab: int) -> list[TrainSample]:
    rng = random.Random(seed)
    samples = [s for s in random_group(rng, size=5, vocab=vocab) if any(s.loss_mask)]

    def old(sample: TrainSample) -> list[float]:
        return [-rng.uniform(2.5, 5.5) if m else 0.0 for m in sample.loss_mask]

    return [replace(sample, old_logprobs=old(sample)) for sample in samples]


def trained(
    backend: TorchBackend, layout: PackedSamples, algo: AlgoConfig
) -> tuple[float, dict[str, Tensor], list[Any]]:
    """(loss, gradients, scores per sample)."""
    scores = layout.unpack(backend.logprobs(layout.batches), fill=0.0)
    batches = layout.batches
    if algo.ratio_rule == "gspo":
        batches = gspo_old(batches, backend.logprobs(batches))
    totals = backend.backward(batches, objective="policy_gradient")
    stats = totals.finish(step=1, policy_version=0, grad_norm=0.0, skipped=False, seconds=1.0, peak_memory=0)
    assert stats.num_loss_tokens == sum(sum(sample.loss_mask) for sample in layout.samples)
    return stats.loss, {name: grad.clone() for name, grad in backend.gradients().items()}, scores


def difference(got: Tensor, want: Tensor) -> float:
    assert want.norm() > 1e-8, "a zero gradient proves nothing"
    return float((got.double() - want.double()).norm() / want.double().norm())


def assert_equal(samples: list[TrainSample], dtype: torch.dtype, algo: AlgoConfig) -> None:
    backend, bound = TorchBackend(case.build_model(dtype), case.TrainerConfig(), algo=algo), BOUNDS[dtype]
    loss, gradients, scores = trained(backend, lay_out(samples, max_tokens=64), algo)
    for budget in BUDGETS:
        layout = lay_out(samples, max_tokens=budget, layout="tree")
        tree_loss, tree_gradients, tree_scores = trained(backend, layout, algo)
        assert tree_loss == pytest.approx(loss, rel=bound, abs=bound)
        assert set(tree_gradients) == set(gradients)
        for name, want in gradients.items():
            assert difference(tree_gradients[name], want) <= bound, name
        for sample, got, want_scores in zip(samples, tree_scores, scores, strict=True):
            for g, w, trains in zip(got, want_scores, sample.loss_mask, strict=True):
                assert not trains or g == pytest.approx(w, abs=3e-6)  # scores are fp32 on either side


@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("seed", range(4))
def test_trees_have_the_gradient_of_separate_samples(seed: int, dtype: torch.dtype) -> None:
    assert_equal(group(f"tree/{seed}", vocab=3 if seed % 2 else case.VOCAB), dtype, case.ALGO)


@pytest.mark.parametrize("rule", ["gspo", "cispo", "on_policy"])
def test_other_rules_see_the_same_targets(rule: str) -> None:
    samples = group(f"rule/{rule}", vocab=4)
    if rule == "cispo":
        samples, _ = with_sequence_coeff(samples, "sequence_tis", low=0.0, cap=2.0)
    assert_equal(samples, torch.float64, AlgoConfig(ratio_rule=rule, clip_low=0.2, clip_high=0.3))


def test_values_of_states_are_learned_from_trees_as_from_samples() -> None:
    rng = random.Random(11)
    samples = []
    for sample in group("values", vocab=4):
        targets = [float("nan")] * len(sample.input_ids)
        for place, turn in enumerate(sample.turn_ids):
            if turn >= 0 and sample.turn_ids[place - 1] != turn and place:
                targets[place] = rng.uniform(-1, 1)
        samples.append(replace(sample, value_targets=targets, value_weight=0.05))
    algo = AlgoConfig(advantage="gae", value_trunk_grad=True)
    found = []
    for layout in ("sequence", "tree"):
        backend = TorchBackend(case.build_model(torch.float64), case.TrainerConfig(), algo=algo)
        assert backend.policy.value_head is not None
        with torch.no_grad():
            backend.policy.value_head.weight.copy_(torch.linspace(-1, 1, 24)[None])
        laid = lay_out(samples, max_tokens=40, layout=layout)
        values = laid.unpack(backend.values(laid.batches), fill=0.0)
        pairs = zip(values, (sample.value_targets for sample in samples), strict=True)
        wanted = [[v if t == t else 0.0 for v, t in zip(*pair, strict=True)] for pair in pairs]
        backend.backward(laid.batches, objective="policy_gradient")
        head = backend.policy.value_head.weight.grad
        assert head is not None
        found.append((wanted, {**backend.gradients(), "value_head": head}))
    for got, want in zip(found[1][0], found[0][0], strict=True):
        assert got == pytest.approx(want, abs=1e-6)
    for name, want in found[0][1].items():
        assert difference(found[1][1][name], want) <= 1e-10, name
