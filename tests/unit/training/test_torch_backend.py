"""One optimiser step in detail: statistics, skipping, clipping, precision, optimisers, resuming."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from swe_rl.config import AlgoConfig, TrainerConfig
from swe_rl.errors import CheckpointError, ConfigError, InvariantError
from swe_rl.training.torch_backend import TorchBackend

Make = Callable[..., Any]


def snapshot(backend: TorchBackend) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in backend.weights().items()}


def same(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(torch.equal(left[n], right[n]) for n in left)


def test_statistics_of_a_step(make_backend: Make, make_batches: Make) -> None:
    backend, batches = make_backend(), make_batches()
    scored = torch.cat([s[b.loss_mask] for s, b in zip(backend.logprobs(batches), batches, strict=True)]).double()
    advantages = torch.cat([b.advantages[b.loss_mask] for b in batches]).double()
    stats = backend.train_step(batches, learning_rate=1e-3)
    assert stats.num_loss_tokens == len(scored)
    assert stats.num_tokens == sum(len(b.input_ids) for b in batches)
    assert stats.loss == pytest.approx(-float(advantages.sum()) / 40, rel=1e-5)  # ratio 1: old is the current policy
    assert stats.kl_rollout == pytest.approx(float((-4.0 - scored).mean()), rel=1e-5)
    assert stats.logprob_abs_diff == pytest.approx(float((scored + 4.0).abs().mean()), rel=1e-5)
    assert 0 < stats.entropy <= math.log(50)
    assert (stats.step, stats.policy_version, stats.skipped, stats.ratio_clip_frac) == (1, 1, False, 0.0)
    assert stats.tokens_per_s > 0
    assert stats.peak_memory_bytes > 1 << 20


def test_scores_are_nan_exactly_where_nothing_trains(make_backend: Make, make_batches: Make) -> None:
    backend, batches = make_backend(), make_batches()
    for scored, batch in zip(backend.logprobs(batches), batches, strict=True):
        assert torch.equal(scored.isnan(), ~batch.loss_mask)
        assert scored.dtype == torch.float32
        assert (scored[batch.loss_mask] <= 0).all()


def test_policy_gradient_moves_logprobs_with_the_advantage(make_backend: Make, make_batches: Make) -> None:
    backend, batches = make_backend(), make_batches(count=1)
    batches = [replace(b, advantages=torch.ones_like(b.advantages)) for b in batches]
    before = backend.logprobs(batches)[0].nansum()
    for _ in range(3):
        backend.train_step(batches, learning_rate=1e-3)
    assert backend.logprobs(batches)[0].nansum() > before + 0.1


def test_cross_entropy_lowers_the_loss_whatever_the_advantages(make_backend: Make, make_batches: Make) -> None:
    backend, batches = make_backend(), make_batches()
    batches = [replace(b, advantages=torch.full_like(b.advantages, math.nan)) for b in batches]
    losses = [backend.train_step(batches, learning_rate=3e-3, objective="cross_entropy").loss for _ in range(8)]
    assert losses[-1] < 0.9 * losses[0]
    assert losses == sorted(losses, reverse=True)


def test_several_steps_on_one_batch_use_scored_old_logprobs(make_backend: Make, make_batches: Make) -> None:
    backend = make_backend()
    batches = backend.score_old(make_batches(scale=3.0))
    first = backend.train_step(batches, learning_rate=3e-3)
    assert first.ratio_clip_frac == 0.0
    assert first.logprob_abs_diff > 0
    for _ in range(6):
        last = backend.train_step(batches, learning_rate=3e-3)
    assert last.ratio_clip_frac > 0.2, "the policy left the trust region, so the clip acts"


def test_non_finite_gradient_is_skipped_and_counted(make_backend: Make, make_batches: Make) -> None:
    backend, good = make_backend(), make_batches()
    backend.train_step(good, learning_rate=1e-3)
    weights, optimizer = snapshot(backend), str(backend.state_dict()["optimizer"])
    bad = [replace(b, advantages=torch.where(b.loss_mask, math.inf, 0.0)) for b in good]
    stats = backend.train_step(bad, learning_rate=1e-3)
    assert stats.skipped
    assert not math.isfinite(stats.grad_norm)
    assert (stats.step, stats.policy_version, backend.num_skipped_steps) == (2, 1, 1)
    assert same(snapshot(backend), weights)
    assert str(backend.state_dict()["optimizer"]) == optimizer
    assert not backend.train_step(good, learning_rate=1e-3).skipped


@pytest.mark.parametrize("case", ["no batch", "all masked"])
def test_a_step_without_trained_tokens_is_skipped(case: str, make_backend: Make, make_batches: Make) -> None:
    backend = make_backend(weight_decay=0.5)
    masked = [replace(b, loss_mask=torch.zeros_like(b.loss_mask)) for b in make_batches()]
    backend.train_step(make_batches(), learning_rate=1e-3)
    weights = snapshot(backend)
    stats = backend.train_step([] if case == "no batch" else masked, learning_rate=1e-3)
    assert (stats.skipped, stats.num_loss_tokens, stats.grad_norm, stats.loss) == (True, 0, 0.0, 0.0)
    assert same(snapshot(backend), weights), "momentum and weight decay must not act either"


def test_clipping_bounds_the_global_norm(make_backend: Make, make_batches: Make) -> None:
    """Plain Adam is blind to the scale of its first gradient, so the clipped gradient itself is inspected."""
    backend, batches = make_backend(max_grad_norm=0.01), make_batches(scale=100.0)
    seen: list[float] = []
    step = backend.optimizer.step

    def spy(*, learning_rate: float) -> None:
        seen.append(math.sqrt(sum(float(g.double().square().sum()) for g in backend.gradients().values())))
        step(learning_rate=learning_rate)

    backend.optimizer.step = spy
    stats = backend.train_step(batches, learning_rate=1e-3)
    assert stats.grad_norm > 1
    assert seen == [pytest.approx(0.01, rel=1e-3)]


def test_adamw_is_torchs(make_backend: Make, make_batches: Make) -> None:
    backend, twin = make_backend(weight_decay=0.1), make_backend(weight_decay=0.1)
    decay = [p for p in twin.masters.params.values() if p.ndim > 1]
    plain = [p for p in twin.masters.params.values() if p.ndim < 2]
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=2e-3, betas=(0.9, 0.95), eps=1e-8, foreach=False)
    for seed in range(3):
        batches = make_batches(seed=seed)
        backend.train_step(batches, learning_rate=2e-3)
        twin.backward(batches, objective="policy_gradient")
        torch.nn.utils.clip_grad_norm_(twin.masters.params.values(), 1.0)
        optimizer.step()
    for name, weight in backend.weights().items():
        torch.testing.assert_close(weight, twin.weights()[name], rtol=1e-5, atol=1e-6)


def test_muon_moves_block_matrices_by_orthogonal_steps(make_backend: Make, make_batches: Make) -> None:
    """One step from zero momentum: singular values of the update are near the rate; the schedule factor scales it."""
    backend = make_backend(optimizer="muon", muon_learning_rate=0.02, learning_rate=1e-3)
    before = snapshot(backend)
    backend.train_step(make_batches(count=12), learning_rate=0.5e-3)
    for name, after in backend.weights().items():
        moved = (after - before[name]).double()
        if ".layers." not in name or after.ndim < 2:
            assert moved.abs().max() <= 0.51e-3, f"{name}: AdamW moves an entry by at most its rate"
            continue
        values = torch.linalg.svdvals(moved) / (0.01 * math.sqrt(max(1.0, moved.shape[0] / moved.shape[1])))
        assert 0.3 < values.median() < 1.5, name


def test_bf16_forward_keeps_fp32_masters(make_backend: Make, make_batches: Make) -> None:
    exact, rounded = make_backend(), make_backend(dtype=torch.bfloat16)
    assert same(snapshot(exact), snapshot(rounded)), "masters are taken before rounding"
    assert {p.dtype for p in rounded.model.parameters()} == {torch.bfloat16}
    assert {b.dtype for b in rounded.model.buffers()} == {torch.float32}, "rotary frequencies keep their precision"
    batches = make_batches()
    want, got = exact.logprobs(batches)[0], rounded.logprobs(batches)[0]
    torch.testing.assert_close(got, want, rtol=0, atol=0.05, equal_nan=True)
    start = snapshot(rounded)
    for _ in range(20):  # each move is far below a bf16 step of the norm weights (1/128 at 1)
        rounded.train_step(batches, learning_rate=1e-5)
    norm = "model.norm.weight"
    moved = rounded.weights()[norm] - start[norm]
    assert moved.abs().max() > 5e-5
    assert torch.equal(dict(rounded.model.named_parameters())[norm], rounded.weights()[norm].bfloat16())


def test_bf16_gradients_accumulate_in_fp32(make_backend: Make, make_batches: Make) -> None:
    backend = make_backend(dtype=torch.bfloat16)
    batches = make_batches(count=6, max_tokens=1)
    total: dict[str, torch.Tensor] = {}
    for batch in batches:
        backend.backward([batch], objective="policy_gradient")
        for name, grad in backend.gradients().items():
            total[name] = total.get(name, torch.zeros_like(grad)) + grad
    backend.backward(batches, objective="policy_gradient")
    for name, grad in backend.gradients().items():
        assert grad.dtype == torch.float32
        torch.testing.assert_close(grad, total[name], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("settings", [{}, {"optimizer": "muon"}, {"dtype": torch.bfloat16}])
def test_a_resumed_trainer_continues_bit_for_bit(
    settings: dict[str, Any], make_backend: Make, make_batches: Make
) -> None:
    whole = make_backend(**settings)
    for seed in range(4):
        whole.train_step(make_batches(seed=seed), learning_rate=1e-3)
    first = make_backend(**settings)
    for seed in range(2):
        first.train_step(make_batches(seed=seed), learning_rate=1e-3)
    second = make_backend(seed=1, **settings)
    second.load_state_dict(first.state_dict())
    first.train_step(make_batches(seed=9), learning_rate=1e-3)  # the copy shares no memory with its origin
    for seed in range(2, 4):
        stats = second.train_step(make_batches(seed=seed), learning_rate=1e-3)
    assert same(snapshot(second), snapshot(whole))
    assert (stats.step, stats.policy_version) == (4, 4)
    assert torch.equal(second.logprobs(make_batches())[0].nan_to_num(), whole.logprobs(make_batches())[0].nan_to_num())


def test_a_new_phase_keeps_weights_and_version_only(make_backend: Make, make_batches: Make) -> None:
    backend = make_backend()
    backend.train_step(make_batches(), learning_rate=1e-3)
    weights = snapshot(backend)
    backend.new_phase(TrainerConfig(optimizer="muon"), algo=AlgoConfig(), objective="cross_entropy")
    assert same(snapshot(backend), weights)
    assert (backend.step, backend.policy_version) == (0, 1)
    assert all(not state for state in backend.state_dict()["optimizer"].values())


def test_a_phase_may_change_the_dtype_and_the_exact_weights_stay(make_backend: Make, make_batches: Make) -> None:
    backend, batches = make_backend(), make_batches()
    exact = snapshot(backend)
    backend.new_phase(backend.cfg, algo=AlgoConfig(), dtype=torch.bfloat16)
    assert next(backend.model.parameters()).dtype is torch.bfloat16
    assert same(snapshot(backend), exact)
    backend.train_step(batches, learning_rate=1e-3)
    moved = snapshot(backend)
    assert not same(moved, exact)
    backend.new_phase(backend.cfg, algo=AlgoConfig(), dtype=torch.float32)
    assert same(snapshot(backend), moved), "rounding to bfloat16 must not reach the masters"
    stats = backend.train_step(batches, learning_rate=1e-3)
    assert stats.grad_norm > 0
    assert not same(snapshot(backend), moved)


def test_what_does_not_fit_is_refused(make_backend: Make, make_batches: Make) -> None:
    backend, batches = make_backend(), make_batches()
    with pytest.raises(InvariantError, match="no finite token weight"):
        backend.train_step(
            [replace(b, token_weights=torch.full_like(b.advantages, math.nan)) for b in batches], learning_rate=1
        )
    with pytest.raises(ConfigError, match="objective='sft'"):
        backend.train_step(batches, learning_rate=1e-3, objective="sft")
    with pytest.raises(ConfigError, match="needs a torchrun job"):
        make_backend(fsdp=True)
    with pytest.raises(ConfigError, match=r"trainer\.optimizer='sgd'"):
        make_backend(optimizer="sgd")
    with pytest.raises(ConfigError, match=r"trainer\.max_grad_norm"):
        make_backend(max_grad_norm=0.0)
    with pytest.raises(ConfigError, match=r"trainer\.fsdp cannot change"):
        backend.new_phase(TrainerConfig(fsdp=True), algo=AlgoConfig())


def test_a_state_of_something_else_is_refused(make_backend: Make, make_batches: Make) -> None:
    backend = make_backend()
    backend.train_step(make_batches(), learning_rate=1e-3)
    state = backend.state_dict()
    with pytest.raises(CheckpointError, match=r"trainer\.optimizer=muon did not write it"):
        make_backend(optimizer="muon").load_state_dict(state)
    shrunk = {**state["model"], "model.norm.weight": torch.zeros(3)}
    with pytest.raises(CheckpointError, match=r"model\.norm\.weight has shape \(3,\)"):
        backend.load_state_dict({**state, "model": shrunk})
    with pytest.raises(CheckpointError, match="lacks 1 weights"):
        backend.load_weights({k: v for k, v in state["model"].items() if k != "model.norm.weight"})


def test_loaded_weights_reach_the_forward_pass(make_backend: Make, make_batches: Make) -> None:
    source, target = make_backend(seed=7), make_backend(dtype=torch.bfloat16)
    target.load_weights(source.weights(), policy_version=12)
    assert target.policy_version == 12
    assert same(snapshot(target), snapshot(source))
    torch.testing.assert_close(
        target.logprobs(make_batches())[0], source.logprobs(make_batches())[0], rtol=0, atol=0.05, equal_nan=True
    )


def test_exact_batch_without_temperature_and_with_one_agree(make_backend: Make, make_batches: Make) -> None:
    backend, batches = make_backend(), make_batches()
    ones = [replace(b, temperature=torch.ones_like(b.advantages)) for b in batches]
    halves = [replace(b, temperature=torch.full_like(b.advantages, 0.5)) for b in batches]
    plain, same_thing, sharp = (backend.logprobs(v)[0] for v in (batches, ones, halves))
    assert torch.equal(plain.nan_to_num(), same_thing.nan_to_num())
    assert not torch.allclose(plain.nan_to_num(), sharp.nan_to_num())
