"""Bad input raises one line that names the argument, before anything is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from swe_rl import ops

T, V, H = 6, 10, 4


def arguments(**changes: Any) -> dict[str, Any]:
    """Of a good call, but for `changes`."""
    generator = torch.Generator().manual_seed(0)
    good = {
        "hidden": torch.randn(T, H, generator=generator),
        "weight": torch.randn(V, H, generator=generator),
        "labels": torch.randint(V, (T,), generator=generator),
        "advantages": torch.ones(T),
        "loss_mask": torch.tensor([True, True, False, True, False, True]),
        "token_weights": torch.ones(T),
    }
    return {**good, **changes}


def loss(**changes: Any) -> float:
    return float(ops.linear_policy_loss(**arguments(**changes))[0])


def score(**changes: Any) -> float:
    given = arguments(**changes)
    for name in ("advantages", "loss_mask", "token_weights"):
        del given[name]
    return float(ops.linear_logprob(**given)[0].sum())


HEAD = [
    ({"hidden": torch.zeros(T, H, dtype=torch.int64)}, "hidden has dtype torch.int64"),
    ({"weight": torch.zeros(V, H, dtype=torch.int8)}, "weight has dtype torch.int8"),
    ({"hidden": torch.zeros(T, H).bfloat16()}, "hidden is torch.bfloat16 and weight is torch.float32"),
    ({"hidden": torch.zeros(1, T, H)}, r"hidden has shape \[1, 6, 4\]"),
    ({"hidden": torch.zeros(T)}, r"hidden has shape \[6\]"),
    ({"weight": torch.tensor(1.0)}, r"weight has shape \[\]"),
    ({"hidden": torch.zeros(T, 0), "weight": torch.zeros(V, 0)}, r"hidden has shape \[6, 0\]"),
    ({"weight": torch.zeros(0, H)}, "weight is empty"),
    ({"hidden": torch.zeros(T, H + 1)}, "hidden has 5 features and weight 4"),
    ({"hidden": torch.zeros(H, T).T}, "hidden is strided: pass hidden.contiguous"),
    ({"weight": torch.zeros(V, 2 * H)[:, ::2]}, "weight is strided: pass weight.contiguous"),
    ({"weight": torch.zeros(V, H, device="meta")}, "hidden is on cpu and weight on meta"),
    ({"labels": torch.zeros(T, dtype=torch.int32)}, "labels has dtype torch.int32: use int64"),
    ({"labels": torch.zeros(T + 1, dtype=torch.int64)}, r"labels has shape \[7\], hidden has 6 rows"),
    ({"labels": torch.zeros(T, 1, dtype=torch.int64)}, r"labels has shape \[6, 1\]"),
    ({"labels": torch.zeros(T, dtype=torch.int64, device="meta")}, "labels is on meta"),
    ({"labels": torch.full((T,), V)}, rf"labels: {V} of a trained row is not in \[0, {V}\)"),
    ({"labels": torch.full((T,), -100)}, r"labels: -100 of a trained row"),
    ({"labels": torch.full((T,), 7), "vocab_size": 7}, r"labels: 7 of a trained row is not in \[0, 7\)"),
    ({"vocab_size": 0}, "vocab_size=0"),
    ({"vocab_size": V + 1}, "vocab_size=11 must be an integer between 1 and the 10 rows"),
    ({"vocab_size": 9.0}, "vocab_size=9.0"),
    ({"temperature": 0.0}, "temperature=0.0 must be above 0"),
    ({"temperature": -0.5}, "temperature=-0.5"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"temperature": torch.ones(1)}, r"temperature has shape \[1\]"),
    ({"temperature": torch.tensor(0.7)}, r"temperature has shape \[\]"),
    ({"temperature": torch.tensor([1.0, 0.0, 1.0, 1.0, 1.0, 1.0])}, "temperature: 0.0 of a trained row is not above 0"),
    ({"softcap": -1.0}, "softcap=-1.0"),
    ({"softcap": math.nan}, "softcap=nan"),
    ({"softcap": math.inf}, "softcap=inf"),
]
LOSS = [
    ({"advantages": torch.ones(T - 1)}, r"advantages has shape \[5\], hidden has 6 rows"),
    ({"token_weights": torch.ones(T, 1)}, r"token_weights has shape \[6, 1\]"),
    ({"advantages": torch.ones(T, dtype=torch.bool)}, "advantages has dtype torch.bool"),
    ({"advantages": torch.ones(T, dtype=torch.complex64)}, "advantages has dtype torch.complex64"),
    ({"loss_mask": torch.ones(T)}, "loss_mask has dtype torch.float32"),
    ({"loss_mask": torch.ones(T - 1, dtype=torch.bool)}, r"loss_mask has shape \[5\]"),
    ({"old_logprobs": [0.0] * T}, "old_logprobs is a list: pass a tensor"),
    ({"old_logprobs": torch.ones(1)}, r"old_logprobs has shape \[1\]"),
    ({"sequence_coeff": torch.ones(T, device="meta")}, "sequence_coeff is on meta"),
    ({"trained_rows": torch.tensor([[0], [1], [3], [5]])}, r"trained_rows is torch.int64 \[4, 1\]"),
    ({"trained_rows": torch.tensor([0, 1, 3, 5], dtype=torch.int32)}, "trained_rows is torch.int32"),
    ({"trained_rows": torch.tensor([0, 1, 3])}, "trained_rows are not the rows of loss_mask"),
    ({"grad_weight_into": torch.zeros(V, H, dtype=torch.float64)}, r"it must be torch.float32 \[10, 4\]"),
    ({"grad_weight_into": torch.zeros(H, V)}, r"grad_weight_into is torch.float32 \[4, 10\]"),
    ({"grad_weight_into": torch.zeros(H, V).T}, "grad_weight_into must be contiguous"),
    ({"sequence_parallel": True}, "sequence_parallel needs tp_group"),
    ({"clip_lo": 0.1}, "clip_lo is no rule of the loss"),
]


@pytest.mark.parametrize("call", [loss, score])
@pytest.mark.parametrize(("changes", "message"), HEAD)
def test_bad_head(call: Callable[..., float], changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        call(**changes)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(("changes", "message"), LOSS)
def test_bad_loss(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        loss(**changes)
    assert "\n" not in str(error.value)


def test_a_missing_tensor_is_an_error_of_the_call() -> None:
    with pytest.raises(TypeError, match="token_weights"):
        ops.linear_policy_loss(
            *list(arguments().values())[:3], advantages=torch.ones(T), loss_mask=torch.ones(T).bool()
        )


@pytest.mark.parametrize(
    "changes",
    [
        {"labels": torch.tensor([1, 2, -100, 3, V + 5, 4])},
        {"labels": torch.tensor([1, 2, -100, 3, 2**62, 4]), "temperature": torch.tensor([1.0, 1, 0, 1, math.nan, 1])},
    ],
)
def test_masked_slots_may_hold_anything(changes: dict[str, Any]) -> None:
    clean = {"labels": torch.tensor([1, 2, 0, 3, 0, 4])}
    assert loss(**changes) == loss(**clean)


def test_columns_of_other_number_types_are_taken() -> None:
    whole = {"advantages": torch.tensor([1, -1, 2, 0, 3, 1]), "token_weights": torch.ones(T, dtype=torch.float64)}
    assert loss(**whole) == loss(**{name: value.float() for name, value in whole.items()})


def test_no_rows_at_all() -> None:
    """A rank can have none: an empty result, not an error."""
    empty = {name: value[:0] for name, value in arguments().items() if name != "weight"}
    assert loss(**empty) == 0.0
    logprobs, entropy = ops.linear_logprob(empty["hidden"], arguments()["weight"], empty["labels"])
    assert logprobs.shape == entropy.shape == (0,)
