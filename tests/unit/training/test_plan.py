"""The arithmetic of `swe-rl plan` against independent numbers: published sizes, models that exist, sums by hand."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from swe_rl.cli.hydra_entry import compose_config
from swe_rl.config import ModelConfig, TrainConfig
from swe_rl.config import cluster as cluster_config
from swe_rl.errors import ConfigError
from swe_rl.training.planning import memory_megatron, memory_torch
from swe_rl.training.planning.engine import Engine, Episodes, cache_tokens, kv_bytes, rollout_seconds
from swe_rl.training.planning.hardware import DEVICES, GIB, Efficiency, device
from swe_rl.training.planning.memory_megatron import Work, layer_bytes, rank_memory, rank_params, stage_memory
from swe_rl.training.planning.parallel_layouts import ParallelLayout, megatron_layouts, problem
from swe_rl.training.planning.parts import total
from swe_rl.training.planning.search import Planner, Site, search
from swe_rl.training.planning.shapes import PUBLISHED, ModelShape, model_shape, shape_from_config
from swe_rl.training.planning.times import StepTokens, forward_flops, training_seconds, utilization
from swe_rl.training.planning.workload import Assumptions, phases

QWEN32, QWEN72 = PUBLISHED["Qwen/Qwen3-32B"], PUBLISHED["Qwen/Qwen2.5-72B"]
MOE = PUBLISHED["Qwen/Qwen3-30B-A3B"]
RELEASED = {  # model cards: billions of parameters
    "Qwen/Qwen2.5-0.5B": 0.49,
    "Qwen/Qwen2.5-1.5B": 1.54,
    "Qwen/Qwen2.5-3B": 3.09,
    "Qwen/Qwen2.5-7B": 7.61,
    "Qwen/Qwen2.5-14B": 14.7,
    "Qwen/Qwen2.5-32B": 32.5,
    "Qwen/Qwen2.5-72B": 72.7,
    "Qwen/Qwen3-0.6B": 0.6,
    "Qwen/Qwen3-1.7B": 1.7,
    "Qwen/Qwen3-4B": 4.0,
    "Qwen/Qwen3-8B": 8.2,
    "Qwen/Qwen3-14B": 14.8,
    "Qwen/Qwen3-32B": 32.8,
    "Qwen/Qwen3-30B-A3B": 30.5,
    "Qwen/Qwen3-235B-A22B": 235.0,
    "meta-llama/Llama-3.2-1B": 1.23,
    "meta-llama/Llama-3.2-3B": 3.21,
    "meta-llama/Llama-3.1-8B": 8.03,
    "meta-llama/Llama-3.1-70B": 70.6,
    "HuggingFaceTB/SmolLM2-135M": 0.135,
    "HuggingFaceTB/SmolLM2-360M": 0.362,
    "HuggingFaceTB/SmolLM2-1.7B": 1.71,
}
CLASSES = {"qwen2": "Qwen2", "qwen3": "Qwen3", "qwen3_moe": "Qwen3Moe", "llama": "Llama"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_published_sizes(name: str) -> None:
    assert PUBLISHED[name].num_params / 1e9 == pytest.approx(RELEASED[name], rel=0.015)


def test_active_parameters_of_a_mixture_are_the_published_ones() -> None:
    both = MOE.layer_matrices + 2 * MOE.embedding
    assert both / 1e9 == pytest.approx(3.3, rel=0.02)
    large = PUBLISHED["Qwen/Qwen3-235B-A22B"]
    assert (large.layer_matrices + 2 * large.embedding) / 1e9 == pytest.approx(22, rel=0.02)


@pytest.mark.parametrize("name", PUBLISHED)
def test_transformers_builds_as_many_parameters(name: str) -> None:
    """Every published model on the meta device, from its dimensions and the defaults of its class."""
    import torch
    import transformers

    shape = PUBLISHED[name]
    config = getattr(transformers, f"{CLASSES[shape.family]}Config")(**dimensions(shape))
    with torch.device("meta"):
        model = getattr(transformers, f"{CLASSES[shape.family]}ForCausalLM")(config)
    assert sum(p.numel() for p in model.parameters()) == shape.num_params
    assert shape_from_config(config, name=name) == shape


def dimensions(shape: ModelShape) -> dict[str, Any]:
    found = {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate,
        "vocab_size": shape.vocab,
        "tie_word_embeddings": shape.tied,
    }
    if shape.family.startswith("qwen3"):
        found["head_dim"] = shape.head_dim
    if shape.num_experts:
        found |= {
            "num_experts": shape.num_experts,
            "num_experts_per_tok": shape.experts_per_token,
            "moe_intermediate_size": shape.expert_intermediate,
        }
    return found


def test_defaults_of_transformers_agree_where_a_released_model_has_them() -> None:
    from transformers import Qwen3Config, Qwen3MoeConfig

    found = shape_from_config(Qwen3MoeConfig(), name="default")
    for key in ("num_experts", "experts_per_token", "expert_intermediate", "num_kv_heads", "hidden", "vocab"):
        assert getattr(found, key) == getattr(MOE, key), key
    assert Qwen3Config().vocab_size == QWEN32.vocab
    assert Qwen3Config().head_dim == QWEN32.head_dim


def test_mixed_layers_are_counted_as_transformers_builds_them() -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        **{**dimensions(MOE), "num_hidden_layers": 7, "num_experts": 6},
        mlp_only_layers=[2],
        decoder_sparse_step=2,
    )
    shape = shape_from_config(config, name="mixed")
    assert shape.dense_layers == (0, 2, 4, 6)
    with torch.device("meta"):
        model = Qwen3MoeForCausalLM(config)
    assert sum(p.numel() for p in model.parameters()) == shape.num_params


@pytest.mark.parametrize(
    ("name", "same_as"),
    [
        ("Qwen/Qwen2.5-72B-Instruct", "Qwen/Qwen2.5-72B"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "Qwen/Qwen3-30B-A3B"),
        ("Qwen/Qwen3-8B-Base", "Qwen/Qwen3-8B"),
        ("smollm2-135m", "HuggingFaceTB/SmolLM2-135M"),
    ],
)
def test_names_of_variants(name: str, same_as: str) -> None:
    assert model_shape(ModelConfig(name=name)) is PUBLISHED[same_as]


def test_nano_is_counted_as_it_is_built(tmp_path: Path) -> None:
    from swe_rl.models.nano import build_model

    cfg = ModelConfig(hidden_size=48, num_layers=3, num_heads=4, num_kv_heads=2, intermediate_size=56, vocab_size=300)
    model = build_model(cfg)
    assert model_shape(cfg).num_params == sum(p.numel() for p in model.parameters())
    model.config.save_pretrained(tmp_path)
    assert model_shape(ModelConfig(name=str(tmp_path))) == model_shape(cfg)


def test_unknown_models_and_devices_are_one_line() -> None:
    with pytest.raises(ConfigError, match=r"model.name='mistralai/Mistral-7B' has no entry in the table"):
        model_shape(ModelConfig(name="mistralai/Mistral-7B"))
    with pytest.raises(ConfigError, match=r"cluster.gpu='tpu' is unknown: use one of a100, h100, h200"):
        device("tpu")
    assert cluster_config.BOUNDS.choices["gpu"] == ("", *DEVICES)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-32B", "Qwen/Qwen2.5-72B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-4B"])
@pytest.mark.parametrize("pipeline", [1, 2])
def test_ranks_together_hold_the_model(name: str, pipeline: int) -> None:
    """Elements over all ranks are those of the model, vectors counted TP times, and the padding of the vocabulary."""
    shape, tensor, expert = PUBLISHED[name], 4, 2 if PUBLISHED[name].num_experts else 1
    layout = ParallelLayout(backend="megatron", tensor=tensor, pipeline=pipeline, expert=expert, data=expert)
    stages = [rank_params(shape, layout, stage) for stage in range(pipeline)]
    together = sum(shared * tensor + experts * tensor * expert for shared, experts in stages)
    copied = (tensor - 1) * (shape.num_layers * shape.layer_vectors + shape.hidden)
    copied += (tensor - 1) * shape.num_expert_layers * shape.hidden * shape.num_experts  # routers
    padding = (-shape.vocab % (128 * tensor)) * shape.hidden * (2 if not shape.tied or pipeline > 1 else 1)
    second = shape.embedding if shape.tied and pipeline > 1 else 0
    assert together == shape.num_params + copied + padding + second


def test_activations_of_a_layer_by_hand() -> None:
    """Qwen3-32B in bf16: 2 x 5120 + 3 x 8192 + 3 x 1024 + 5 x 25600 elements, 64 log-sum-exps, four norms."""
    norms = 6 * (2 * 5120 + 8192 + 1024)
    assert layer_bytes(QWEN32, recompute="none", dtype_bytes=2) == 2 * (10240 + 24576 + 3072 + 128000) + 256 + norms
    assert layer_bytes(QWEN32, recompute="full", dtype_bytes=2) == 2 * 5120
    assert layer_bytes(QWEN72, recompute="selective", dtype_bytes=2) == 2 * (3 * 8192 + 3 * 1024) + 256 + 6 * 2 * 8192
    mixture = 2 * (2 * 2048 + 3 * 4096 + 3 * 512 + 8 * (4 * 2048 + 6 * 768)) + 128 + 11 * 128 + 6 * (4096 + 4096 + 512)
    assert layer_bytes(MOE, recompute="none", dtype_bytes=2, tensor=4) == mixture


def test_weights_and_optimizer_of_a_rank_by_hand() -> None:
    """16 bytes per parameter of which 12 are cut by DP x CP; as the distributed optimizer of Megatron-core tells."""
    layout = ParallelLayout(backend="megatron", tensor=8, data=4, context=2)
    work = Work(row_tokens=32768, rows_per_rank=1, trained_share=0.25)
    parts = {part.name: part.num_bytes for part in stage_memory(QWEN32, layout, work, 0)}
    shared, experts = rank_params(QWEN32, layout, 0)
    assert experts == 0
    assert (parts["parameters"], parts["gradients"]) == (2 * shared, 4 * shared)
    assert parts["optimizer"] == pytest.approx(12 * shared / 8, abs=1)
    away = stage_memory(QWEN32, replace(layout, offload=True), work, 0)
    assert {part.name: part.num_bytes for part in away}["optimizer"] == 0
    assert memory_megatron.host_memory(QWEN32, replace(layout, offload=True), work) == int(12 * shared / 8)


def test_experts_are_cut_by_their_own_ranks() -> None:
    work = Work(row_tokens=32768, rows_per_rank=1, trained_share=0.25)
    layout = ParallelLayout(backend="megatron", tensor=1, data=8, expert=4)
    shared, experts = rank_params(MOE, layout, 0)
    assert experts == 48 * 128 // 4 * 3 * 2048 * 768
    parts = {part.name: part.num_bytes for part in stage_memory(MOE, layout, work, 0)}
    assert parts["optimizer"] == pytest.approx(12 * (shared / 8 + experts / 2), abs=1)


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([QWEN32, QWEN72, MOE]), st.integers(0, 3), st.integers(0, 3), st.sampled_from([8192, 65536]))
def test_memory_is_monotonous(shape: ModelShape, tensor: int, context: int, tokens: int) -> None:
    """More recomputation, more cutting and shorter rows never need more."""
    work = Work(row_tokens=tokens, rows_per_rank=4, trained_share=0.25)
    layout = ParallelLayout(backend="megatron", tensor=2**tensor, context=2**context, data=8)
    sizes = [total(rank_memory(shape, replace(layout, recompute=mode), work)) for mode in ("none", "selective", "full")]
    assert sizes == sorted(sizes, reverse=True)
    longer = total(rank_memory(shape, layout, replace(work, row_tokens=2 * tokens)))
    assert longer > sizes[0]
    more = total(rank_memory(shape, replace(layout, data=16), work))
    assert more <= sizes[0]


def test_the_first_stage_keeps_the_activations_of_all_micro_batches_under_way() -> None:
    layout = ParallelLayout(backend="megatron", tensor=8, pipeline=4, data=1, recompute="full")
    few, many = (Work(row_tokens=32768, rows_per_rank=rows, trained_share=0.25) for rows in (1, 8))
    kept = 32768 * 2 * 5120 // 8 * 16  # inputs of 16 layers of one micro-batch
    first, second = (
        {p.name: p.num_bytes for p in stage_memory(QWEN32, layout, work, 0)}["activations"] for work in (few, many)
    )
    assert second - first == 3 * kept


def test_chunks_of_the_head_are_those_of_the_operations() -> None:
    """The constants of the planner, which needs no torch, against those that the kernels use."""
    from swe_rl.ops import cpu_rows

    assert (memory_torch.CPU_CHUNK_BYTES, memory_torch.CPU_CACHE_BYTES) == (cpu_rows.CHUNK_BYTES, cpu_rows.CACHE_BYTES)
    assert cpu_rows.MIN_ROWS == memory_torch.CPU_MIN_ROWS
    if importlib.util.find_spec("triton") is None:
        return
    from swe_rl.ops import triton_rows

    assert memory_megatron.HEAD_CHUNK_BYTES == triton_rows.CHUNK_BYTES
    assert (memory_megatron.HEAD_MIN_ROWS, memory_megatron.HEAD_MAX_ROWS) == (
        triton_rows.MIN_ROWS,
        triton_rows.MAX_ROWS,
    )


def test_flops_by_hand() -> None:
    """A forward pass: 2 N T for the matrices, 4 L h T^2 / 2 for causal attention (arXiv:2104.04473, appendix)."""
    step = StepTokens(documents=3, mean_tokens=1000, spread=1.0, trained_share=1.0)
    matrices, attention, head = forward_flops(QWEN72, step)
    layers = 80 * (8192 * (2 * 8192 + 2 * 1024) + 3 * 8192 * 29568)
    assert matrices == 2 * 3000 * layers
    assert head == 2 * 3000 * 152064 * 8192
    assert attention == 3 * 80 * 4 * 8192 * 1000**2 / 2


def test_seconds_of_published_trainer_steps_are_of_the_right_size() -> None:
    """prime-rl's rows for Qwen3-4B full RL at 65,536 tokens on 8 H200: 29,544 tokens/s, MFU 36 %, FSDP."""
    shape, h200 = PUBLISHED["Qwen/Qwen3-4B"], DEVICES["h200"]
    layout = ParallelLayout(backend="torch", data=8, recompute="full", sharded=True)
    step = StepTokens(documents=8, mean_tokens=65536, spread=1.0, trained_share=1.0)
    work = Work(row_tokens=65536, rows_per_rank=1, trained_share=1.0)
    seconds = sum(training_seconds(shape, layout, work, step, h200, Efficiency(), gpus_per_node=8).values())
    assert 0.5 < step.tokens / seconds / 29544 < 2
    assert 0.5 < utilization(shape, step, h200, gpus=8, seconds=seconds) / 0.361 < 2


def test_keys_and_values_of_a_token_by_hand() -> None:
    assert kv_bytes(QWEN32, tensor_parallel=1, dtype="bfloat16") == 2 * 2 * 8 * 128 * 64 == 262144
    assert kv_bytes(QWEN32, tensor_parallel=16, dtype="bfloat16") == 262144 // 8  # a head is not cut
    engine = Engine(replicas=1, tensor_parallel=8, memory=60 * GIB, dtype="bfloat16", max_running=256)
    assert cache_tokens(QWEN32, engine) == (60 * GIB - 2 * QWEN32.num_params // 8 - (3 << 30)) // 32768


def test_rollouts_take_longer_with_less_of_everything() -> None:
    engine = Engine(replicas=4, tensor_parallel=8, memory=60 * GIB, dtype="bfloat16", max_running=64)
    episodes = Episodes(
        count=512, mean_tokens=9000, max_tokens=36864, sampled_tokens=2250, waiting_s=100, longest_waiting_s=200
    )

    def seconds(engine: Engine = engine, episodes: Episodes = episodes) -> float:
        return rollout_seconds(QWEN32, engine, episodes, DEVICES["h100"], Efficiency())

    assert seconds() < seconds(engine=replace(engine, replicas=1))
    assert seconds() < seconds(episodes=replace(episodes, count=2048))
    assert seconds() < seconds(episodes=replace(episodes, longest_waiting_s=9000))
    assert seconds() < seconds(episodes=replace(episodes, waiting_s=900))
    assert seconds(engine=replace(engine, memory=9 * GIB)) == float("inf")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tensor": 16, "data": 1}, "TP16 would leave the node of 8 GPUs"),
        ({"tensor": 3}, "TP3 does not divide the 64 query heads"),
        ({"pipeline": 3, "data": 1}, "PP3 does not divide the 80 layers"),
        ({"context": 3}, "CP3 is no power of two"),
        ({"data": 64}, "an optimizer step has 32 micro-batches, DP64 x PP1 need 64"),
        ({"expert": 2, "data": 2}, "EP2 does not divide the 0 experts"),
        ({"tensor": 8, "context": 8, "pipeline": 2}, ""),
    ],
)
def test_why_layouts_are_illegal(changes: dict[str, int], words: str) -> None:
    layout = ParallelLayout(backend="megatron", **changes)
    found = problem(layout, QWEN72, gpus_per_node=8, rows_per_step=32)
    assert found.startswith(words)
    assert bool(found) == bool(words)


def test_layouts_use_all_gpus_and_repeat_nothing() -> None:
    found = list(megatron_layouts(QWEN32, num_gpus=24))
    assert len(found) == len(set(found))
    assert {layout.num_gpus for layout in found} == {24}


def test_what_is_advised_is_the_layout_that_was_judged() -> None:
    """A mixture of experts that fits only when its experts are spread: the words say so."""
    words, cluster = ("experiment=deepswe", "model.name=Qwen/Qwen3-235B-A22B"), {"nodes": 16, "gpu": "h200"}
    best = search(planner(*words, **cluster))[0]
    assert (best.reason, best.layout.expert > 1) == ("", True)
    assert planner(*words, *best.layout.overrides(), **cluster).configured(best.split) == best.layout


def planner(*words: str, nodes: int, gpu: str) -> Planner:
    cfg = compose_config(TrainConfig, "train", list(words))
    assumed = Assumptions(efficiency=Efficiency())
    site = Site(device=DEVICES[gpu], num_nodes=nodes, gpus_per_node=8)
    return Planner(cfg, model_shape(cfg.model), site, phases(cfg, assumed), assumed)


@pytest.mark.parametrize(
    ("words", "nodes", "gpu"),
    [(("experiment=deepswe",), 8, "h100"), (("experiment=nebius",), 16, "h200")],
    ids=["deepswe", "nebius"],
)
def test_published_recipes_fit_on_their_clusters(words: tuple[str, ...], nodes: int, gpu: str) -> None:
    plan = planner(*words, nodes=nodes, gpu=gpu)
    best, *others = [c for c in search(plan) if not c.reason]
    assert best.layout.num_gpus + best.split.engine_gpus == nodes * 8
    assert best.num_bytes <= 0.95 * DEVICES[gpu].memory
    assert problem(best.layout, plan.shape, gpus_per_node=8, rows_per_step=99) == ""
    assert all(best.seconds <= other.seconds for other in others)
    assert {"rollout", "training", "sync"} <= set(best.times[-1].stages)


@pytest.mark.parametrize("engine", ["processes", "colocated"])
def test_72b_at_131k_does_not_fit_on_eight_h100(engine: str) -> None:
    nearest, *_ = search(planner("experiment=nebius", f"engine.layout={engine}", nodes=1, gpu="h100"))
    assert nearest.reason.startswith("needs ")
    assert nearest.missing_bytes > 5 * GIB
    assert nearest.layout.offload  # even so


def test_shorter_contexts_fit_where_longer_ones_do_not() -> None:
    words = ("experiment=deepswe", "engine.layout=colocated", "trainer.context_parallel=1")
    needs = [
        min(
            c.num_bytes
            for c in search(planner(*words, f"batching.max_tokens_per_batch={size}", nodes=2, gpu="h100"))
            if c.parts
        )
        for size in (36864, 73728)
    ]
    assert needs[0] < needs[1]


def test_engine_nodes_can_be_chosen() -> None:
    plan = planner("experiment=deepswe", nodes=8, gpu="h100")
    (split,) = plan.splits(3)
    assert (split.trainer_gpus, split.engine_gpus, split.colocated) == (40, 24, False)
    (shared,) = plan.splits(0)
    assert (shared.trainer_gpus, shared.engine_gpus, shared.colocated) == (64, 64, True)
    with pytest.raises(ConfigError, match="--engine-nodes 8 of 8 leaves no GPU to the trainer"):
        plan.splits(8)


def test_planning_needs_no_torch() -> None:
    """`swe-rl plan` answers within a second or two on a login node."""
    code = (
        "import sys, swe_rl.training.planning.report, swe_rl.training.planning.shapes\n"
        "assert not {'torch', 'transformers', 'megatron'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_phases_of_a_recipe() -> None:
    """Table 3 of arXiv:2508.03501: 300 and 100 problems of 10 rollouts, batches of 128 and 256 trajectories."""
    rft, first, second = planner("experiment=nebius", nodes=16, gpu="h200").work
    assert (rft.online, first.online) == (False, True)
    assert (first.episodes.count, first.optimizer_steps, first.step.documents) == (3000, 24, 128)
    assert (second.episodes.count, second.optimizer_steps, second.step.documents) == (1000, 4, 256)
    assert (first.episodes.max_tokens, second.episodes.max_tokens) == (65536, 131072)
    assert first.scoring_passes == 1  # several optimizer steps: the old policy is another one from the second on
    (deepswe,) = planner("experiment=deepswe", nodes=8, gpu="h100").work
    assert (deepswe.episodes.count, deepswe.optimizer_steps, deepswe.scoring_passes) == (512, 1, 0)


def test_torch_ranks_that_share_a_row_hold_a_part_of_it() -> None:
    """Four ranks with a row four times as long: all but the gathered keys and values as one rank with its own row."""

    def parts(context: int, tokens: int) -> dict[str, int]:
        layout = ParallelLayout(backend="torch", data=8 // context, context=context, sharded=True)
        work = Work(row_tokens=tokens, rows_per_rank=1, trained_share=0.2, dtype="bfloat16")
        return {part.name: part.num_bytes for part in memory_torch.rank_memory(QWEN32, layout, work, cpu=False)}

    one, four = parts(1, 8192), parts(4, 4 * 8192)
    for name in ("parameters", "gradients", "optimizer", "activations", "logits"):
        assert one[name] == four[name]
    assert "keys" not in one
    assert four["keys"] == 2 * (2 + 4) * 8 * 128 * 4 * 8192  # keys and values, bf16, with fp32 gradients
    layout = ParallelLayout(backend="torch", data=2, context=4, sharded=True)
    assert layout.describe() == "FSDP over DP2 x CP4, recompute none"
    assert "trainer.context_parallel=4" in layout.overrides()
