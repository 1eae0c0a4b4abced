"""Interleaved pipelines and experts in `swe-rl plan`, against sums by hand and megatron-core's schedule."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from types import SimpleNamespace

import pytest
from real_parts import require

from swe_rl.training.planning.hardware import DEVICES, Efficiency
from swe_rl.training.planning.memory_megatron import Work, host_memory, layers_kept, rank_params, stage_memory
from swe_rl.training.planning.parallel_layouts import ParallelLayout, megatron_layouts, problem
from swe_rl.training.planning.shapes import PUBLISHED, ModelShape
from swe_rl.training.planning.times import StepTokens, training_seconds

QWEN32, MOE = PUBLISHED["Qwen/Qwen3-32B"], PUBLISHED["Qwen/Qwen3-30B-A3B"]
STEP = StepTokens(documents=128, mean_tokens=9216, spread=1.5, trained_share=0.25)
H100, EFFICIENCY = DEVICES["h100"], Efficiency()


def layout(**axes: int | str) -> ParallelLayout:
    return ParallelLayout(backend="megatron", **axes)  # type: ignore[arg-type]


def seconds(shape: ModelShape, cut: ParallelLayout, *, rows: int = 8) -> dict[str, float]:
    work = Work(row_tokens=36864, rows_per_rank=rows, trained_share=0.25)
    return training_seconds(shape, cut, work, STEP, H100, EFFICIENCY, gpus_per_node=8)


def most_open(pipeline: int, virtual: int, stage: int, rows: int) -> int:
    """Chunks that a rank of megatron-core's interleaved schedule has gone forward through and not yet back, at most:
    those before its first way back, and one more, as it goes forward and back by turns from there on."""
    require(importlib.util.find_spec("megatron") is not None, "package megatron-core (pip install 'swe-rl[megatron]')")
    from megatron.core.pipeline_parallel.schedules import get_pp_rank_microbatches

    group = SimpleNamespace(size=lambda: pipeline, rank=lambda: stage)
    ranks = SimpleNamespace(pp_group=group, virtual_pipeline_model_parallel_size=virtual)
    total, _, before, left = get_pp_rank_microbatches(rows, virtual, pipeline, p2p_communicator=ranks)
    assert total == virtual * rows == before + left
    return int(before + min(left, 1))


@pytest.mark.parametrize("stage", range(4))
@pytest.mark.parametrize(("virtual", "rows"), [(2, 4), (2, 12), (4, 8), (16, 4)])
def test_a_rank_keeps_what_its_schedule_leaves_open(stage: int, virtual: int, rows: int) -> None:
    found = layers_kept(QWEN32, layout(pipeline=4, virtual=virtual), stage, rows=rows)
    assert found == most_open(4, virtual, stage, rows) * 64 // (4 * virtual)


def test_activations_of_the_first_stage_by_hand() -> None:
    """64 layers over 4 ranks of 4 chunks: 4 x 4 + 3 chunks of 4 layers are open, 1 + 3/16 times the 64 of 1F1B."""
    cut = layout(tensor=8, pipeline=4, recompute="full")
    work = Work(row_tokens=32768, rows_per_rank=8, trained_share=0.25)
    plain, interleaved = (
        {part.name: part.num_bytes for part in stage_memory(QWEN32, each, work, 0)}
        for each in (cut, replace(cut, virtual=4))
    )
    row = 32768 * 2 * 5120 // 8  # bytes of the input of a layer
    assert layers_kept(QWEN32, cut, 0, rows=8) == 64
    assert layers_kept(QWEN32, replace(cut, virtual=4), 0, rows=8) == 76 == 64 * (1 + 3 / 16)
    assert interleaved["activations"] - plain["activations"] == 12 * row
    assert interleaved["parameters"] == plain["parameters"]
    away = host_memory(QWEN32, replace(cut, virtual=4, recompute="offload"), work)
    assert away == 76 * row


@pytest.mark.parametrize("stage", range(3))
def test_chunks_of_a_rank_are_dealt_out_in_turns(stage: int) -> None:
    """12 layers over 3 ranks of 2 chunks of 2: rank 1 has layers 2, 3, 8 and 9, of which 2 and 9 are dense here."""
    shape = replace(MOE, num_layers=12, dense_layers=(2, 9, 11))
    dense = (0, 2, 1)[stage]
    cut = layout(pipeline=3, virtual=2, expert=4, data=4)
    shared, experts = rank_params(shape, cut, stage)
    assert experts == (4 - dense) * 128 // 4 * 3 * 2048 * 768
    ends = {0: 151936 * 2048, 1: 0, 2: 151936 * 2048 + 2048}[stage]  # the vocabulary divides by 128
    layers = 4 * (2048 * (2 * 4096 + 2 * 512) + 2 * 2048 + 2 * 128)
    assert shared == layers + dense * 3 * 2048 * 6144 + (4 - dense) * 2048 * 128 + ends


def test_the_bubble_shrinks_and_stages_send_more() -> None:
    """3 / (8 x 4) of the busy time instead of 3 / 8; hidden states and their gradients cross 4 times as often."""
    cut = layout(tensor=8, pipeline=4, data=2)
    plain, interleaved = seconds(QWEN32, cut), seconds(QWEN32, replace(cut, virtual=4))
    for found, share in ((plain, 3 / 8), (interleaved, 3 / 32)):
        busy = found["compute"] + found["recompute"] + found["communication"]
        assert found["bubble"] == pytest.approx(share * busy)
    sent = 2 * (128 * 9216 // 2) * 5120 * 2 / 8  # bytes of a rank in a step, both ways, of one chunk
    more = interleaved["communication"] - plain["communication"]
    assert more == pytest.approx(3 * sent / (H100.network * EFFICIENCY.network))


@pytest.mark.parametrize(
    ("pipeline", "virtual", "rows", "ends"), [(4, 4, 5, 35), (5, 8, 16, 164), (4, 1, 5, 8), (4, 2, 8, 19)]
)
def test_micro_batches_that_fill_no_whole_group_cost_as_if_they_did(
    pipeline: int, virtual: int, rows: int, ends: int
) -> None:
    """`ends`: when the last chunk of a schedule has gone both ways, in units of a chunk's, with empty micro-batches as
    long as the others: chunks times micro-batches, filled up to whole groups, and p - 1 through the ranks."""
    found = seconds(replace(QWEN32, num_layers=120), layout(pipeline=pipeline, virtual=virtual), rows=rows)
    busy = found["compute"] + found["recompute"] + found["communication"]
    assert found["bubble"] == pytest.approx(busy * (ends / (rows * virtual) - 1))


def test_only_layers_with_experts_send_tokens_to_them() -> None:
    """Half of the layers dense: half of the visits."""
    half = replace(MOE, dense_layers=tuple(range(0, 48, 2)))
    rate = H100.link * EFFICIENCY.network
    gradients = 6 * 128 * 3 * 2048 * 768 * 7 / 8  # of a layer's experts, that eight ranks have without EP
    visits = 2 * 2 * (128 * 9216 // 8) * 8 * 2048 * 2 * 7 / 8  # bytes of a layer, both passes
    for shape, layers in ((MOE, 48), (half, 24)):
        alone, spread = (seconds(shape, layout(data=8, expert=expert))["communication"] for expert in (1, 8))
        assert spread - alone == pytest.approx(layers * (visits - gradients) / rate)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"pipeline": 2, "virtual": 2}, "VP2 needs a pipeline of at least PP3, it has PP2"),
        ({"virtual": 4}, "VP4 needs a pipeline of at least PP3, it has PP1"),
        ({"pipeline": 4, "virtual": 3}, "PP4 x VP3 does not divide the 64 layers"),
        ({"pipeline": 4, "virtual": 16}, ""),
    ],
)
def test_what_the_interleaved_schedule_takes(changes: dict[str, int], words: str) -> None:
    assert problem(layout(**changes), QWEN32, gpus_per_node=8, rows_per_step=32) == words


def test_interleaved_layouts_are_among_those_that_are_judged() -> None:
    found = {(each.pipeline, each.virtual) for each in megatron_layouts(QWEN32, num_gpus=16)}
    wanted = {1: [1], 2: [1], 4: [1, 2, 4, 8, 16], 8: [1, 2, 4, 8], 16: [1, 2, 4]}
    assert found == {(pipeline, virtual) for pipeline, those in wanted.items() for virtual in those}
    chosen = layout(tensor=8, pipeline=4, virtual=2, data=2)
    assert chosen.describe() == "TP8 CP1 PP4 DP2 VP2, recompute none"
    assert "trainer.virtual_pipeline=2" in chosen.overrides()


def test_visits_of_experts_by_hand() -> None:
    """Of 8 visits per token 7 of 8 leave a rank of EP8, there and back, forward and backward, in 48 layers."""
    alone = seconds(MOE, layout(data=8))["communication"]
    spread = seconds(MOE, layout(data=8, expert=8))["communication"]
    again = seconds(MOE, layout(data=8, expert=8, recompute="full"))["communication"]
    rate = H100.link * EFFICIENCY.network
    visits = 2 * 48 * (128 * 9216 // 8) * 8 * 2048 * 2 * 7 / 8  # bytes of a pass
    gradients = 6 * 48 * 128 * 3 * 2048 * 768 * 7 / 8  # of experts that all ranks have, fp32 there and bf16 back
    assert spread - alone == pytest.approx((2 * visits - gradients) / rate)
    assert again - spread == pytest.approx(visits / rate)


def test_tensor_parallel_experts_gather_every_visit() -> None:
    """A layer with experts: two collectives of hidden states for attention, two of 8 visits each for the experts."""
    dense = replace(MOE, num_experts=0, experts_per_token=0)
    both = [seconds(shape, layout(tensor=2, data=1))["communication"] for shape in (dense, MOE)]
    row = 128 * 9216 * 2048 * 2
    assert both[1] - both[0] == pytest.approx(2 * 48 * 2 * 7 * row / 2 / (H100.link * EFFICIENCY.network))
