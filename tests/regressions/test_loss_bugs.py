"""Bugs of other systems in loss and gradients, each with its formula beside ours.

Where they were found stands in the docstrings. The check fails on the formula with the bug and passes on ours.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import pytest
import torch
from immunity import immune
from torch import Tensor, nn

from swe_rl.algorithms import count_rows, count_tokens, token_weights
from swe_rl.algorithms.losses import policy_loss
from swe_rl.ops.token_loss import kl_estimate, token_loss
from swe_rl.types import TrainSample

Weigh = Callable[[Sequence[Sequence[TrainSample]]], list[list[list[float]]]]  # per part, per sample


def sample(name: str, mask: str) -> TrainSample:
    bits = [c == "1" for c in mask]
    return TrainSample(
        trajectory_id=name,
        input_ids=list(range(len(bits))),
        loss_mask=bits,
        rollout_logprobs=[0.0] * len(bits),
        advantages=[1.0] * len(bits),
        turn_ids=[0 if b else -1 for b in bits],
        policy_version=0,
        temperature=1.0,
    )


LONG, SHORT, MASKED = sample("long", "0" + "1" * 9), sample("short", "011"), sample("masked", "000000")


def ours_weigh(mode: str) -> Weigh:
    def weigh(parts: Sequence[Sequence[TrainSample]]) -> list[list[list[float]]]:
        rows, tokens = (sum(count(p) for p in parts) for count in (lambda p: count_rows(p, mode), count_tokens))
        return [
            [
                s.token_weights
                for s in token_weights(p, mode, max_tokens=16, num_rows_global=rows, num_tokens_global=tokens)
            ]
            for p in parts
        ]

    return weigh


def averaged_over_parts(mode: str) -> Weigh:
    """The bug: every rank (or micro-batch) divides by its own count, and the results are averaged."""

    def weigh(parts: Sequence[Sequence[TrainSample]]) -> list[list[list[float]]]:
        alone = [ours_weigh(mode)([part])[0] for part in parts]
        return [[[w / len(parts) for w in row] for row in rows] for rows in alone]

    return weigh


@pytest.mark.parametrize("mode", ["token_mean", "seq_mean"])
def test_per_rank_denominators_bias_towards_ranks_with_short_data(mode: str) -> None:
    """prime-rl 2562: each data-parallel rank divided by its own token count, then FSDP averaged."""

    def check(weigh: Weigh) -> None:
        together = weigh([[LONG, SHORT, sample("third", "01")]])[0]
        apart = weigh([[LONG, sample("third", "01")], [SHORT]])
        for one, other in zip((together[0], together[2], together[1]), [*apart[0], *apart[1]], strict=True):
            assert one == pytest.approx(other)

    immune(check, ours=ours_weigh(mode), buggy=averaged_over_parts(mode))


def test_token_mean_per_micro_batch_makes_the_rate_depend_on_its_size() -> None:
    """SkyRL 1296, verl 6957: the mean was taken inside each micro-batch. With one row each it is seq_mean by
    accident."""

    def check(weigh: Weigh) -> None:
        first, second = weigh([[LONG], [SHORT]])
        assert first[0][-1] == pytest.approx(second[0][-1]), "in a token mean every token counts alike"

    immune(check, ours=ours_weigh("token_mean"), buggy=averaged_over_parts("token_mean"))
    by_accident = averaged_over_parts("token_mean")([[LONG], [SHORT]])
    assert [p[0] for p in by_accident] == [pytest.approx(r) for r in ours_weigh("seq_mean")([[LONG, SHORT]])[0]]


def test_gradient_scaled_by_the_number_of_micro_batches() -> None:
    """verl 6836, AReaL 1273: a framework divides by the number of micro-batches although the loss is a sum."""

    def gradient(parts: int, scale: Callable[[int], float]) -> Tensor:
        weight = torch.ones(6, dtype=torch.float64, requires_grad=True)
        for part in (weight * torch.arange(6.0)).split(6 // parts):
            (part.sum() * scale(parts)).backward(retain_graph=True)
        assert weight.grad is not None
        return weight.grad

    def check(scale: Callable[[int], float]) -> None:
        for parts in (2, 3, 6):
            torch.testing.assert_close(gradient(parts, scale), gradient(1, scale))

    immune(check, ours=lambda parts: 1.0, buggy=lambda parts: 1.0 / parts)


def test_denominator_from_the_final_mask_not_from_an_earlier_one() -> None:
    """TRL 6439, rLLM 508: over-long rows were masked after the token count was taken, so they diluted the loss."""
    late = sample("late", "0111111")

    def early_denominator(samples: Sequence[TrainSample]) -> list[list[float]]:
        count = count_tokens([*samples[:-1], late])  # the over-long row as it was before masking
        return [[1 / count if m else 0.0 for m in s.loss_mask] for s in samples]

    def check(weigh: Callable[[Sequence[TrainSample]], list[list[float]]]) -> None:
        assert math.fsum(w for row in weigh([SHORT, MASKED]) for w in row) == pytest.approx(1.0)

    immune(check, ours=lambda samples: ours_weigh("token_mean")([samples])[0], buggy=early_denominator)


def test_sequence_mean_over_padding() -> None:
    """SkyRL 462: the mean of a row was over its padded width."""

    def padded(samples: Sequence[TrainSample]) -> list[list[float]]:
        width = max(len(s.input_ids) for s in samples)
        return [[1 / (len(samples) * width) if m else 0.0 for m in s.loss_mask] for s in samples]

    def check(weigh: Callable[[Sequence[TrainSample]], list[list[float]]]) -> None:
        assert [math.fsum(row) for row in weigh([LONG, SHORT])] == pytest.approx([0.5, 0.5])

    immune(check, ours=lambda samples: ours_weigh("seq_mean")([samples])[0], buggy=padded)


Loss = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]


def test_zero_times_nan_poisons_the_loss() -> None:
    """AReaL 1346, SkyRL 1635: masked slots were multiplied by zero."""

    def multiplied(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        ratio = (logprobs - old).exp()
        return (-ratio * advantages * mask * weights).sum()

    def selected(logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, weights: Tensor) -> Tensor:
        return policy_loss(logprobs, old, advantages, mask, token_weights=weights, clip_low=0.2, clip_high=0.2)

    def check(loss: Loss) -> None:
        logprobs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
        mask = torch.tensor([True, False, True])
        poison = torch.tensor([1.0, math.nan, 1.0])
        value = loss(logprobs, logprobs.detach() * poison, poison, mask, poison)
        value.backward()
        assert torch.isfinite(value)
        assert logprobs.grad is not None
        assert torch.isfinite(logprobs.grad).all()

    immune(check, ours=selected, buggy=multiplied)


def test_all_tokens_masked_is_zero_over_zero() -> None:
    """verl's fork: the sequence mean of a fully masked row is NaN."""

    def unguarded(samples: Sequence[TrainSample]) -> list[list[float]]:
        return [[(1 / sum(s.loss_mask)) * m for m in s.loss_mask] for s in samples]

    def check(weigh: Callable[[Sequence[TrainSample]], list[list[float]]]) -> None:
        assert weigh([MASKED]) == [[0.0] * 6]

    for mode in ("token_mean", "seq_mean", "turn_mean", "seq_sum"):
        immune(check, ours=lambda samples, mode=mode: ours_weigh(mode)([samples])[0], buggy=unguarded)


def test_kl_term_without_a_gradient() -> None:
    """SkyRL 1353: the KL term was computed under no_grad: it showed in the loss and changed nothing."""

    def without(logprobs: Tensor, ref: Tensor) -> Tensor:
        with torch.no_grad():
            return kl_estimate(logprobs, ref, "k3")

    def check(kl: Callable[[Tensor, Tensor], Tensor]) -> None:
        logprobs = torch.tensor([-1.0], requires_grad=True)
        value = kl(logprobs, torch.tensor([-2.0]))
        assert value.requires_grad
        (slope,) = torch.autograd.grad(value.sum(), logprobs)
        assert float(slope) == pytest.approx(1 - math.exp(-1))

    immune(check, ours=lambda logprobs, ref: kl_estimate(logprobs, ref, "k3"), buggy=without)


def test_gradient_through_the_reference() -> None:
    """miles 1966: the teacher's scores carried a gradient."""

    def through(logprobs: Tensor, ref: Tensor) -> Tensor:
        delta = ref - logprobs
        return delta.exp() - delta - 1

    def check(kl: Callable[[Tensor, Tensor], Tensor]) -> None:
        ref = torch.tensor([-2.0], requires_grad=True)
        kl(torch.tensor([-1.0], requires_grad=True), ref).sum().backward()
        assert ref.grad is None

    for kind in ("k1", "k2", "k3"):
        immune(check, ours=lambda logprobs, ref, kind=kind: kl_estimate(logprobs, ref, kind), buggy=through)


def test_each_backward_zeroed_the_gradient_of_the_one_before() -> None:
    """SkyRL 2008: of several micro-batches only the last one trained."""
    from gradients_worker import backend, make_samples, with_old

    from swe_rl.batching import pack

    def last_only(parts: list) -> dict[str, Tensor]:  # type: ignore[type-arg]
        trainer = backend(torch.float64)
        for part in parts:
            trainer.backward([part], objective="policy_gradient")
        return trainer.gradients()

    def accumulated(parts: list) -> dict[str, Tensor]:  # type: ignore[type-arg]
        trainer = backend(torch.float64)
        trainer.backward(parts, objective="policy_gradient")
        return trainer.gradients()

    whole = accumulated(with_old(pack(make_samples(), max_tokens=1000)))

    def check(gradients: Callable[[list], dict[str, Tensor]]) -> None:  # type: ignore[type-arg]
        for name, grad in gradients(with_old(pack(make_samples(), max_tokens=40))).items():
            torch.testing.assert_close(grad, whole[name], rtol=1e-9, atol=1e-12)

    immune(check, ours=accumulated, buggy=last_only)


def test_training_pass_with_dropout_on() -> None:
    """verl 4708: with dropout the ratio of the very first step is not 1."""
    from gradients_worker import ALGO, build_model

    from swe_rl.config import TrainerConfig
    from swe_rl.training.torch_backend import TorchBackend

    def model_with_dropout() -> nn.Module:
        model = build_model(torch.float32)
        model.model.layers[0].mlp.act_fn = nn.Sequential(model.model.layers[0].mlp.act_fn, nn.Dropout(0.5))
        return model  # type: ignore[no-any-return]

    def plain(model: nn.Module) -> nn.Module:
        return model

    def trained(model: nn.Module) -> nn.Module:
        return TorchBackend(model, TrainerConfig(), algo=ALGO).model  # type: ignore[arg-type]

    def check(prepare: Callable[[nn.Module], nn.Module]) -> None:
        block = prepare(model_with_dropout()).model.layers[0].mlp  # type: ignore[union-attr,index]
        x = torch.randn(3, 24)
        block.eval()
        still = block(x)
        block.train()
        torch.testing.assert_close(block(x), still)

    immune(check, ours=trained, buggy=plain)


def test_correction_without_old_logprobs_uses_the_current_policy() -> None:
    """The mismatch weight is a constant: its gradient must not reach the policy."""

    def with_gradient(logprobs: Tensor, engine: Tensor) -> Tensor:
        return -(logprobs - logprobs.detach()).exp() * (logprobs - engine).exp().clamp(max=2.0)

    def ours(logprobs: Tensor, engine: Tensor) -> Tensor:
        ones = torch.ones_like(logprobs)
        loss, _ = token_loss(
            logprobs, entropy=ones, advantages=ones, rollout_logprobs=engine, ratio_rule="on_policy", correction="tis"
        )
        return loss

    def check(loss: Callable[[Tensor, Tensor], Tensor]) -> None:
        logprobs = torch.tensor([-1.0], requires_grad=True)
        (slope,) = torch.autograd.grad(loss(logprobs, torch.tensor([-1.2])).sum(), logprobs)
        assert float(slope) == pytest.approx(-math.exp(0.2), rel=1e-5)

    immune(check, ours=ours, buggy=with_gradient)
