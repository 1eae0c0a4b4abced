"""Diagnostics of a step against their formulas, written out over raw values of trained tokens."""

from __future__ import annotations

import math
import random
from dataclasses import replace
from statistics import fmean, pstdev
from typing import Any

import pytest
import torch
from torch import nn

from swe_rl.training.module_norms import module_group, module_norms
from swe_rl.training.stats import StepTotals, step_metrics
from swe_rl.types import PackedBatch


def numbers(count: int, low: float, high: float, seed: int) -> list[float]:
    rng = random.Random(seed)
    return [rng.uniform(low, high) for _ in range(count)]


def filled(batch: PackedBatch, values: list[float]) -> torch.Tensor:
    """[T] with values at trained slots and NaN elsewhere."""
    column = torch.full((len(batch.loss_mask),), math.nan, dtype=torch.float64)
    column[batch.loss_mask] = torch.tensor(values, dtype=torch.float64)
    return column


def test_every_diagnostic_equals_its_formula(make_batches: Any) -> None:
    totals, seen = StepTotals(), {"w": [], "a": [], "r": [], "now": [], "mu": [], "clip": []}  # type: ignore[var-annotated]
    for seed, batch in enumerate(make_batches(max_tokens=20)):
        count = int(batch.loss_mask.sum())
        now, old, mu = (numbers(count, -3, -1, 10 * seed + k) for k in range(3))
        ratio, advantages = numbers(count, 0.5, 1.5, 10 * seed + 4), numbers(count, -1, 1, 10 * seed + 5)
        clipped = [abs(r - 1) > 0.3 for r in ratio]
        batch = replace(
            batch,
            old_logprobs=filled(batch, old),
            rollout_logprobs=filled(batch, mu),
            ref_logprobs=filled(batch, mu),
            advantages=filled(batch, advantages),
        )
        stats = {
            "logprobs": torch.tensor(now, dtype=torch.float64),
            "entropy": torch.full((count,), 0.5, dtype=torch.float64),
            "ratio": torch.tensor(ratio, dtype=torch.float64),
            "clipped": torch.tensor(clipped),
        }
        totals.add(batch, torch.tensor(1.0), stats, on_policy_data=True)
        seen["w"] += [math.exp(o - m) for o, m in zip(old, mu, strict=True)]
        seen["a"] += advantages
        seen["r"] += ratio
        seen["clip"] += clipped
        seen["now"] += now
        seen["mu"] += mu
    totals.reduce()
    found = step_metrics(
        totals.finish(step=1, policy_version=0, grad_norm=0, skipped=False, seconds=2.0, peak_memory=0)
    )
    w, n = seen["w"], len(seen["w"])
    gaps = [abs(a - b) for a, b in zip(seen["now"], seen["mu"], strict=True)]
    want = {
        "train/kl_rollout": -fmean(map(math.log, w)),
        "train/mismatch_k2": fmean(math.log(x) ** 2 / 2 for x in w),
        "train/mismatch_k3": fmean(x - 1 - math.log(x) for x in w),
        "train/mismatch_ess": sum(w) ** 2 / (n * sum(x * x for x in w)),
        "train/ratio_mean": fmean(seen["r"]),
        "train/ratio_max": max(seen["r"]),
        "train/clip_frac_low": sum(c and r < 1 for c, r in zip(seen["clip"], seen["r"], strict=True)) / n,
        "train/clip_frac_high": sum(c and r >= 1 for c, r in zip(seen["clip"], seen["r"], strict=True)) / n,
        "train/ratio_clip_frac": sum(seen["clip"]) / n,
        "train/advantage_mean": fmean(seen["a"]),
        "train/advantage_std": pstdev(seen["a"]),
        "train/logprob_abs_diff": fmean(gaps),
        "train/logprob_abs_diff_max": max(gaps),
        "train/kl_ref": fmean(math.exp(m - x) - 1 - (m - x) for x, m in zip(seen["now"], seen["mu"], strict=True)),
        "train/entropy": 0.5,
    }
    for name, value in want.items():
        assert found[name] == pytest.approx(value, rel=1e-9), name
    assert 0 < want["train/clip_frac_low"]
    assert 0 < want["train/clip_frac_high"]


def test_the_mismatch_is_seen_although_the_engine_is_the_old_policy(make_batches: Any) -> None:
    """old_policy=rollout: p_old / p_engine is 1 by definition; what matters is the trainer against the engine."""
    totals, logs = StepTotals(), []
    for seed, batch in enumerate(make_batches(max_tokens=20)):
        count = int(batch.loss_mask.sum())
        now, mu = (numbers(count, -3, -1, 10 * seed + k) for k in range(2))
        engine = filled(batch, mu)
        stats = {
            "logprobs": torch.tensor(now, dtype=torch.float64),
            "entropy": torch.ones(count, dtype=torch.float64),
            "ratio": torch.ones(count, dtype=torch.float64),
            "clipped": torch.zeros(count, dtype=torch.bool),
        }
        bypassed = replace(batch, old_logprobs=engine, rollout_logprobs=engine.clone())
        totals.add(bypassed, torch.tensor(1.0), stats, on_policy_data=True)
        logs += [a - b for a, b in zip(now, mu, strict=True)]
    totals.reduce()
    found = step_metrics(
        totals.finish(step=1, policy_version=0, grad_norm=0, skipped=False, seconds=1.0, peak_memory=0)
    )
    assert found["train/kl_rollout"] == pytest.approx(-fmean(logs))
    assert found["train/mismatch_k3"] == pytest.approx(fmean(math.exp(x) - 1 - x for x in logs))


def test_a_step_without_a_trained_token_has_finite_diagnostics(make_batches: Any) -> None:
    totals = StepTotals()
    for batch in make_batches():
        empty = replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
        stats = {name: torch.empty(0) for name in ("logprobs", "entropy", "ratio")}
        totals.add(
            empty, torch.tensor(0.0), {**stats, "clipped": torch.empty(0, dtype=torch.bool)}, on_policy_data=True
        )
    totals.reduce()
    found = totals.finish(step=1, policy_version=0, grad_norm=0, skipped=True, seconds=0.0, peak_memory=0)
    assert all(math.isfinite(value) for value in step_metrics(found).values())


def test_gradient_norms_by_kind_of_module() -> None:
    names = {
        "model.embed_tokens.weight": "embedding",
        "model.layers.0.self_attn.q_proj.weight": "attention",
        "model.layers.0.self_attn.q_norm.weight": "norm",
        "model.layers.1.mlp.up_proj.weight": "mlp",
        "model.norm.weight": "norm",
        "lm_head.weight": "head",
        "model.rotary.freq": "other",
    }
    assert {name: module_group(name) for name in names} == names
    params = {name: nn.Parameter(torch.zeros(3)) for name in names}
    for index, param in enumerate(params.values()):
        param.grad = torch.full((3,), float(index))
    norms = module_norms(params)
    assert norms["norm"] == pytest.approx(math.sqrt(3 * (2**2 + 4**2)))
    total = math.sqrt(sum(value**2 for value in norms.values()))
    assert total == pytest.approx(float(torch.cat([p.grad for p in params.values() if p.grad is not None]).norm()))
