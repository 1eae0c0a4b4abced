"""The gradient of an optimiser step does not depend on packing, micro-batches or ranks.

Bounds: fp64 1e-10 absolute and relative, fp32 relative 1e-5 per tensor (difference norm over norm). The reference is
written here: one unpacked forward pass per sample with transformers' own attention, full logits, loops over tokens.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import gradients_worker as case
import pytest
import torch
from torch import Tensor

from swe_rl.batching import pack
from swe_rl.types import PackedBatch

WORKER = Path(case.__file__)


def as_float32(value: float) -> float:
    """The number that a packed batch holds."""
    return torch.tensor(value, dtype=torch.float32).item()


def naive_gradients(dtype: torch.dtype, objective: str) -> tuple[dict[str, Tensor], float]:
    model = case.build_model(dtype, attention="sdpa")
    samples, old = case.make_samples(), case.old_logprobs()
    rows = len(samples)
    total = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        logits = model(input_ids=torch.tensor([sample.input_ids])).logits[0].double() / as_float32(sample.temperature)
        for place in range(1, len(sample.input_ids)):
            if not sample.loss_mask[place]:
                continue
            distribution = torch.distributions.Categorical(logits=logits[place - 1])
            logp = distribution.log_prob(torch.tensor(sample.input_ids[place]))
            if objective == "cross_entropy":
                total = total - logp / (rows * case.MAX_TOKENS)
                continue
            behind = as_float32(old[sample.trajectory_id][place])
            engine = as_float32(sample.rollout_logprobs[place])
            advantage = as_float32(sample.advantages[place])
            ratio = torch.exp(logp - behind)
            bounded = ratio.clamp(1 - case.ALGO.clip_low, 1 + case.ALGO.clip_high)
            gain = torch.minimum(ratio * advantage, bounded * advantage)
            truncated = min(math.exp(behind - engine), case.ALGO.correction_cap)
            bonus = case.ALGO.entropy_coeff * distribution.entropy()
            total = total - (gain * truncated + bonus) / (rows * case.MAX_TOKENS)
    total.backward()
    return {n: p.grad for n, p in model.named_parameters()}, total.item()


def gradients(
    batches: list[PackedBatch], dtype: torch.dtype, objective: str = "policy_gradient", **settings: Any
) -> Any:
    trainer = case.backend(dtype, **settings)
    trainer.backward(batches, objective=objective)
    return {name: grad.clone() for name, grad in trainer.gradients().items()}


def assert_close(got: dict[str, Tensor], want: dict[str, Tensor], dtype: torch.dtype) -> None:
    assert set(got) == set(want)
    for name, expected in want.items():
        assert expected.norm() > 1e-6, f"{name}: a zero gradient proves nothing"
        difference = (got[name].double() - expected.double()).norm() / expected.double().norm()
        bound = 1e-10 if dtype == torch.float64 else 1e-5
        assert difference <= bound, f"{name}: relative difference {difference:.2e}"


@pytest.mark.parametrize("objective", ["policy_gradient", "cross_entropy"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_packed_gradient_equals_naive_reference(dtype: torch.dtype, objective: str) -> None:
    want, loss = naive_gradients(dtype, objective)
    trainer = case.backend(dtype)
    totals = trainer.backward(case.with_old(pack(case.make_samples(), max_tokens=1000)), objective=objective)
    stats = totals.finish(step=1, policy_version=0, grad_norm=0.0, skipped=False, seconds=1.0, peak_memory=0)
    assert stats.loss == pytest.approx(loss, rel=1e-6)
    assert_close(trainer.gradients(), want, dtype)
    if objective == "policy_gradient":
        assert 0.2 < stats.ratio_clip_frac < 0.9, "the case must exercise the clip"


@pytest.mark.parametrize("max_tokens", [1, 40, 70])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_any_micro_batch_split_gives_the_same_gradient(dtype: torch.dtype, max_tokens: int) -> None:
    samples = case.make_samples()
    want = gradients(case.with_old(pack(samples, max_tokens=1000)), dtype)
    batches = case.with_old(pack(samples, max_tokens=max_tokens))
    assert len(batches) > 1
    assert_close(gradients(batches, dtype), want, dtype)
    assert_close(gradients(batches[::-1], dtype), want, dtype)


def test_activation_checkpointing_changes_no_gradient() -> None:
    batches = case.with_old(pack(case.make_samples(), max_tokens=40))
    want = gradients(batches, torch.float64)
    assert_close(gradients(batches, torch.float64, activation_checkpointing=True), want, torch.float64)


def test_nan_in_every_masked_slot_changes_nothing() -> None:
    clean = case.with_old(pack(case.make_samples(), max_tokens=70))
    poisoned = []
    for batch in clean:
        poison = {
            name: torch.where(batch.loss_mask, getattr(batch, name), torch.nan)
            for name in ("rollout_logprobs", "old_logprobs", "advantages", "token_weights")
        }
        poisoned.append(replace(batch, ref_logprobs=torch.full_like(batch.advantages, torch.nan), **poison))
    want, got = gradients(clean, torch.float32), gradients(poisoned, torch.float32)
    assert all(torch.equal(got[name], want[name]) for name in want)


def test_fully_masked_step_has_zero_gradient() -> None:
    masked = [case.make_samples()[case.MASKED]]
    got = gradients(case.with_old(pack(masked, max_tokens=100)), torch.float32)
    assert all(not grad.any() for grad in got.values())


def run_ranks(tmp_path: Path, *, dtype: str, sharding: str, objective: str) -> Any:
    out = tmp_path / "result.pt"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, str(WORKER), str(out), dtype, sharding, objective],
        env=env,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=False)


@pytest.mark.parametrize(
    ("dtype", "sharding", "objective"),
    [
        ("float64", "replicated", "policy_gradient"),
        ("float32", "replicated", "cross_entropy"),
        ("float64", "sharded", "policy_gradient"),
        ("float32", "sharded", "policy_gradient"),
    ],
)
def test_two_processes_equal_one(tmp_path: Path, dtype: str, sharding: str, objective: str) -> None:
    """Rank 0 has two micro-batches, rank 1 one: the missing one is filled with a row that trains nothing."""
    kind = getattr(torch, dtype)
    result = run_ranks(tmp_path, dtype=dtype, sharding=sharding, objective=objective)
    trainer = case.backend(kind)
    batches = case.rank_share(case.make_samples(), rank=0, world=1)
    totals = trainer.backward(batches, objective=objective)
    assert_close(result["gradients"], trainer.gradients(), kind)
    assert result["tokens"] == totals.num_loss_tokens
    stats = trainer.train_step(batches, learning_rate=1e-2, objective=objective)
    assert result["loss"] == pytest.approx(stats.loss, rel=1e-5)
    assert result["grad_norm"] == pytest.approx(stats.grad_norm, rel=1e-5)
    assert result["changed"] > 1e-3, "scoring must see new weights, after a step and after loading"
    bound = 1e-8 if kind == torch.float64 else 1e-4  # Adam's first step is a sign: tiny gradients are amplified
    for name, weight in trainer.weights().items():
        assert (result["weights"][name] - weight).norm() <= bound * weight.norm(), name
    trainer.load_state_dict({**trainer.state_dict(), "optimizer": result["optimizer"]})  # sharded state loads unsharded
