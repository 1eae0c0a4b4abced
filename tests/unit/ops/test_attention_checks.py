"""What attention refuses: one line that names the argument and the cure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from attention_cases import make, packed
from torch import Tensor

from swe_rl.errors import ConfigError
from swe_rl.ops import attention


def ends(**values: int) -> Tensor:
    kv_end = packed(6, 4)
    for place, value in values.items():
        kv_end[int(place[1:])] = value
    return kv_end


BAD: list[tuple[str, Callable[[dict[str, Any]], dict[str, Any]]]] = [
    (r"kv_end\[3\]=2 must lie between 3 \(padding\) and the 10 tokens", lambda a: {"kv_end": ends(_3=2)}),
    (r"kv_end\[0\]=-1 must lie between 0", lambda a: {"kv_end": ends(_0=-1)}),
    (r"kv_end\[9\]=11 must lie between 9 \(padding\) and the 10 tokens", lambda a: {"kv_end": ends(_9=11)}),
    ("kv_end has dtype torch.int64: use int32", lambda a: {"kv_end": a["kv_end"].long()}),
    (r"kv_end has shape \[9\], q has 10 tokens: one end per token", lambda a: {"kv_end": packed(9)}),
    ("q has dtype torch.int32: use bfloat16, float16, float32 or float64", lambda a: {"q": a["q"].int()}),
    ("q is torch.float32 and v is torch.float16: cast one of them", lambda a: {"v": a["v"].half()}),
    (r"q has shape \[10, 32\]: it must be \[tokens, heads, head_dim\]", lambda a: {"q": a["q"].flatten(1)}),
    (r"k has shape \[10, 0, 8\]", lambda a: {"k": a["k"][:, :0]}),
    ("q has 4 heads and k 3: query heads must be a multiple", lambda a: {n: make(10, 3, 3, 8)[1] for n in "kv"}),
    (r"k is \[10, 2, 8\] and v \[10, 1, 8\]: they must agree", lambda a: {"v": a["v"][:, :1]}),
    (r"v is \[9, 2, 8\], q \[10, 4, 8\]: tokens and head_dim must agree", lambda a: {"v": a["v"][:9]}),
    (r"k is \[10, 2, 4\], q \[10, 4, 8\]: tokens and head_dim must agree", lambda a: {"k": a["k"][..., :4]}),
    ("scale=0.0 must be a positive number", lambda a: {"scale": 0.0}),
    ("scale=nan must be a positive number", lambda a: {"scale": float("nan")}),
    ("q is on cpu and k on meta: move one of them", lambda a: {"k": a["k"].to("meta")}),
    ("kv_end is on meta and q on cpu: move one of them", lambda a: {"kv_end": a["kv_end"].to("meta")}),
]


def arguments() -> dict[str, Any]:
    q, k, v, _ = make(10, 4, 2, 8)
    return {"q": q, "k": k, "v": v, "kv_end": packed(6, 4)}


@pytest.mark.parametrize(("message", "change"), BAD)
def test_bad_tensors(message: str, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    good = arguments()
    attention(**good)
    with pytest.raises(ValueError, match=message) as caught:
        attention(**{**good, **change(good)})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("impl", "message"),
    [
        ("fast", "impl='fast' is unknown: use one of auto, reference, cpu, triton, flash"),
        ("triton", "impl='triton' of attention cannot run here: the tensors are on cpu"),
        ("flash", "impl='flash' of attention cannot run here: flash3 needs a GPU"),
    ],
)
def test_implementations_that_cannot_run(impl: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    good = {name: value.bfloat16() if name != "kv_end" else value for name, value in arguments().items()}
    with pytest.raises(ConfigError, match=message):
        attention(**good, impl=impl)


def test_kernels_name_what_they_do_not_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    good = arguments()
    wide = {name: value.double() if name != "kv_end" else value for name, value in good.items()}
    with pytest.raises(ConfigError, match="have no fp64"):
        attention(**wide, impl="triton")
    q, k, v, _ = make(10, 1, 1, 257)
    with pytest.raises(ConfigError, match="head_dim of at most 256, not 257"):
        attention(q, k, v, kv_end=packed(10), impl="triton")
