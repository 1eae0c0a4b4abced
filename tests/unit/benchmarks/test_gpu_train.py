"""The training section of the GPU suite computes what it says, here on a CPU with a model of a few thousand weights."""

from __future__ import annotations

import pytest

SMALL = (
    *(("vocab_size", 301), ("hidden_size", 32), ("num_hidden_layers", 2), ("num_attention_heads", 4)),
    *(("num_key_value_heads", 2), ("head_dim", 12), ("intermediate_size", 48)),
)


def test_a_step_is_measured() -> None:
    import gpu_train

    case = gpu_train.TrainCase(backend="torch", tokens=77, device="cpu", dtype="float32", changes=SMALL)
    costs = gpu_train.measured(case)
    assert costs.seconds > 0
    assert costs.mfu == pytest.approx(gpu_train.utilization_of(case, costs.seconds))
    assert costs.peak_bytes == 0  # of a GPU
    row = gpu_train.make_row(case)
    assert (len(row.input_ids), int(row.loss_mask.sum())) == (77, 76)
    assert row.cu_seqlens_host == (0, 77)


def test_utilization_is_counted_by_hand() -> None:
    import gpu_train

    case = gpu_train.TrainCase(backend="torch", tokens=77, changes=SMALL)
    layer = 32 * (48 + 24 + 24) + 48 * 32 + 3 * 32 * 48
    matrices = 2 * (2 * layer + 301 * 32) * 77
    attention = 4 * 48 * 2 * 77 * 77 / 2
    assert gpu_train.utilization_of(case, 2.0) == pytest.approx(3 * (matrices + attention) / 2.0 / 989e12)


def test_limits_are_the_published_rows() -> None:
    import gpu_train
    from gpu_suite import SECTIONS, Suite

    suite, rows = Suite("train", None, 60.0, ""), []
    suite.skip = lambda name, unit, reason, limit=None: rows.append((name, unit, reason, limit))  # type: ignore[method-assign]
    SECTIONS["train"](suite)
    limits = {name: limit for name, _, reason, limit in rows if reason == "no CUDA device"}
    assert len(limits) == 2 * 2 * 4
    assert limits["megatron T=65536 step"] == pytest.approx(6.459, abs=1e-3)
    assert limits["torch T=16384 step"] == pytest.approx(1.377, abs=1e-3)
    assert limits["torch T=16384 peak memory"] == 12.5
    assert limits["torch T=16384 MFU"] is None
    shape = gpu_train.config_of(gpu_train.TrainCase(backend="torch", tokens=16_384))
    assert (shape.hidden_size, shape.num_hidden_layers, shape.vocab_size) == (1024, 28, 151936)
