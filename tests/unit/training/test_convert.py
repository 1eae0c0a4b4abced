"""Hugging Face -> Megatron ranks -> Hugging Face, bit by bit, for every family; what ranks hold; what is refused."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from real_parts import require
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from swe_rl.errors import CheckpointError, ConfigError
from swe_rl.training.megatron import convert
from swe_rl.training.megatron.convert_files import SafetensorsWriter, TensorFiles, TensorMeta, hf_shards
from swe_rl.training.megatron.convert_split import hf_shapes, join, part_shape, split
from swe_rl.training.megatron.convert_units import MegatronLayout, Rank, Unit, units
from swe_rl.training.planning.shapes import ModelShape, shape_from_directory

VOCAB = 307  # no multiple of anything
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,  # three query heads for each key-value head
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2.5": ("Qwen2", {"tie_word_embeddings": False}),
    "qwen2.5 tied": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": False}),
    "qwen3 tied": ("Qwen3", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama3": ("Llama", {"tie_word_embeddings": False}),
    "smollm2": ("Llama", {"tie_word_embeddings": True}),
    "qwen3 moe": ("Qwen3Moe", {"head_dim": 16, "tie_word_embeddings": False, **EXPERTS}),
    "qwen3 moe mixed": ("Qwen3Moe", {"head_dim": 16, "tie_word_embeddings": True, "mlp_only_layers": [1], **EXPERTS}),
}
LAYOUTS = {
    "one rank": MegatronLayout(vocab_multiple=128),
    "tp2": MegatronLayout(tensor_parallel=2, vocab_multiple=8),
    "pp4": MegatronLayout(pipeline_parallel=4, vocab_multiple=1),
    "tp2 pp2 vp2": MegatronLayout(tensor_parallel=2, pipeline_parallel=2, virtual_pipeline=2),
    "te": MegatronLayout(tensor_parallel=2, modules="te"),
}
EXPERT_LAYOUTS = {
    "tp2 pp2 ep2": MegatronLayout(tensor_parallel=2, pipeline_parallel=2, expert_parallel=2),
    "ep4 te": MegatronLayout(expert_parallel=4, modules="te"),
}


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A directory that transformers wrote, by name in MODELS: random bf16 weights, norms too."""
    import transformers

    root, made = tmp_path_factory.mktemp("models"), {}

    def make(name: str) -> Path:
        if name not in made:
            family, changes = MODELS[name]
            config = getattr(transformers, f"{family}Config")(**{**SIZES, **changes})
            torch.manual_seed(len(made))
            model = getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)
            for param in model.parameters():
                torch.nn.init.normal_(param)
            made[name] = root / name.replace(" ", "-")
            model.save_pretrained(made[name])
            (made[name] / "tokenizer.json").write_text("{}")
        return made[name]

    return make


def bits(directory: Path) -> dict[str, Tensor]:
    """All tensors of the safetensors of a directory, as integers."""
    found = {name: value for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}
    return {
        name: value.view(torch.int16 if value.dtype == torch.bfloat16 else torch.int32) for name, value in found.items()
    }


def assert_same_bits(found: Path, expected: Path) -> None:
    left, right = bits(found), bits(expected)
    assert left.keys() == right.keys()
    for name, value in right.items():
        assert torch.equal(left[name], value), name


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_there_and_back_is_exact(model_dir: Any, tmp_path: Path, name: str, layout: str) -> None:
    convert.to_megatron(model_dir(name), tmp_path / "ranks", LAYOUTS[layout])
    convert.to_hf(tmp_path / "ranks", tmp_path / "back")
    assert_same_bits(tmp_path / "back", model_dir(name))
    assert (tmp_path / "back/config.json").read_text() == (model_dir(name) / "config.json").read_text()
    assert (tmp_path / "back/tokenizer.json").is_file()
    assert not (tmp_path / "back/megatron.json").exists()


@pytest.mark.parametrize("layout", EXPERT_LAYOUTS)
@pytest.mark.parametrize("name", ["qwen3 moe", "qwen3 moe mixed"])
def test_experts_over_ranks_there_and_back(model_dir: Any, tmp_path: Path, name: str, layout: str) -> None:
    convert.to_megatron(model_dir(name), tmp_path / "ranks", EXPERT_LAYOUTS[layout])
    convert.to_hf(tmp_path / "ranks", tmp_path / "back")
    assert_same_bits(tmp_path / "back", model_dir(name))


def test_transformers_computes_the_same_with_what_came_back(model_dir: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    convert.to_megatron(model_dir("qwen3 moe"), tmp_path / "ranks", EXPERT_LAYOUTS["tp2 pp2 ep2"])
    convert.to_hf(tmp_path / "ranks", tmp_path / "back")
    ids = torch.arange(20)[None]
    first, second = (
        AutoModelForCausalLM.from_pretrained(path)(ids).logits for path in (model_dir("qwen3 moe"), tmp_path / "back")
    )
    assert torch.equal(first, second)


def test_from_layout_to_layout(model_dir: Any, tmp_path: Path) -> None:
    source, target = LAYOUTS["te"], LAYOUTS["tp2 pp2 vp2"]
    convert.to_megatron(model_dir("qwen3 tied"), tmp_path / "first", source)
    convert.to_megatron(tmp_path / "first", tmp_path / "second", target)
    convert.to_megatron(model_dir("qwen3 tied"), tmp_path / "direct", target)
    for rank in target.ranks():
        first, second = (load_file(tmp_path / which / convert.rank_file(rank)) for which in ("second", "direct"))
        assert first.keys() == second.keys()
        assert all(torch.equal(first[name], second[name]) for name in first)
    assert convert.read_layout(tmp_path / "second") == target


def test_ranks_hold_groups_of_three_queries_a_key_and_a_value(model_dir: Any, tmp_path: Path) -> None:
    """Against slices written out by hand: Megatron's qkv matrix of a rank is [q q q k v] for each of its groups."""
    convert.to_megatron(model_dir("qwen2.5"), tmp_path / "ranks", LAYOUTS["tp2"])
    whole = load_file(model_dir("qwen2.5") / "model.safetensors")
    for tensor in (0, 1):
        rank = load_file(tmp_path / "ranks" / convert.rank_file(Rank(tensor=tensor)))
        for kind in ("weight", "bias"):
            q, k, v = (whole[f"model.layers.2.self_attn.{which}_proj.{kind}"] for which in "qkv")
            expected = torch.cat([q[tensor * 24 : tensor * 24 + 24], k[tensor * 8 :][:8], v[tensor * 8 :][:8]])
            assert torch.equal(rank[f"decoder.layers.2.self_attention.linear_qkv.{kind}"], expected)
        gate, up = (whole[f"model.layers.0.mlp.{which}_proj.weight"][tensor * 40 :][:40] for which in ("gate", "up"))
        assert torch.equal(rank["decoder.layers.0.mlp.linear_fc1.weight"], torch.cat([gate, up]))
        down = whole["model.layers.0.mlp.down_proj.weight"][:, tensor * 40 :][:, :40]
        assert torch.equal(rank["decoder.layers.0.mlp.linear_fc2.weight"], down)


def test_vocabulary_is_padded_with_zeros(model_dir: Any, tmp_path: Path) -> None:
    convert.to_megatron(model_dir("llama3"), tmp_path / "ranks", LAYOUTS["tp2"])
    parts = [load_file(tmp_path / "ranks" / convert.rank_file(Rank(tensor=t)))["output_layer.weight"] for t in (0, 1)]
    assert [len(part) for part in parts] == [160, 160]  # 307 -> 320, the next multiple of 8 x 2
    whole = load_file(model_dir("llama3") / "model.safetensors")["lm_head.weight"]
    assert torch.equal(torch.cat(parts)[:VOCAB], whole)
    assert not torch.cat(parts)[VOCAB:].any()


@pytest.mark.parametrize(("pipeline", "expected"), [(1, [False]), (2, [False, True])])
def test_tied_head_is_a_copy_on_another_stage_only(
    model_dir: Any, tmp_path: Path, pipeline: int, expected: list[bool]
) -> None:
    layout = MegatronLayout(pipeline_parallel=pipeline)
    convert.to_megatron(model_dir("smollm2"), tmp_path / "ranks", layout)
    ranks = [load_file(tmp_path / "ranks" / convert.rank_file(Rank(pipeline=p))) for p in range(pipeline)]
    assert ["output_layer.weight" in rank for rank in ranks] == expected
    if pipeline == 2:
        assert torch.equal(ranks[1]["output_layer.weight"], ranks[0]["embedding.word_embeddings.weight"])
        path = tmp_path / "ranks" / convert.rank_file(Rank(pipeline=1))
        save_file({**ranks[1], "output_layer.weight": ranks[1]["output_layer.weight"] + 1}, path)
        with pytest.raises(CheckpointError, match="is not the embedding, to which it is tied"):
            convert.to_hf(tmp_path / "ranks", tmp_path / "back")
        assert not (tmp_path / "back").exists()


def test_stages_of_an_interleaved_pipeline(model_dir: Any, tmp_path: Path) -> None:
    """Chunk c of rank p holds stage c x PP + p, as Megatron offsets its layers."""
    layout = replace(LAYOUTS["tp2 pp2 vp2"], tensor_parallel=1)
    convert.to_megatron(model_dir("qwen3"), tmp_path / "ranks", layout)
    whole = load_file(model_dir("qwen3") / "model.safetensors")
    for pipeline, virtual, layer in [(0, 0, 0), (1, 0, 1), (0, 1, 2), (1, 1, 3)]:
        path = tmp_path / "ranks" / convert.rank_file(Rank(pipeline=pipeline, virtual=virtual))
        rank = load_file(path)
        assert torch.equal(
            rank["decoder.layers.0.mlp.linear_fc2.weight"], whole[f"model.layers.{layer}.mlp.down_proj.weight"]
        )
        assert ("embedding.word_embeddings.weight" in rank) == (layer == 0)
        assert ("decoder.final_layernorm.weight" in rank) == (layer == 3)


def test_rank_weights_are_those_of_the_files(model_dir: Any, tmp_path: Path) -> None:
    layout = EXPERT_LAYOUTS["tp2 pp2 ep2"]
    convert.to_megatron(model_dir("qwen3 moe mixed"), tmp_path / "ranks", layout)
    for source in (model_dir("qwen3 moe mixed"), tmp_path / "ranks"):
        with convert.open_reader(source) as reader:
            rank = Rank(tensor=1, pipeline=1, expert=1)
            found = dict(convert.rank_weights(reader, layout, rank))
        expected = load_file(tmp_path / "ranks" / convert.rank_file(rank))
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_every_parameter_is_in_exactly_one_unit(model_dir: Any) -> None:
    for name in MODELS:
        names = [hf for unit in units(shape_from_directory(model_dir(name))) for hf in unit.hf]
        assert sorted(names) == sorted(load_file(model_dir(name) / "model.safetensors"))


def test_several_files_with_an_index(model_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(convert, "SHARD_BYTES", 30_000)
    convert.to_megatron(model_dir("qwen3"), tmp_path / "ranks", LAYOUTS["tp2"])
    convert.to_hf(tmp_path / "ranks", tmp_path / "back")
    files = sorted(path.name for path in (tmp_path / "back").glob("*.safetensors"))
    assert len(files) > 3
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert_same_bits(tmp_path / "back", model_dir("qwen3"))
    AutoModelForCausalLM.from_pretrained(tmp_path / "back")
    convert.to_megatron(tmp_path / "back", tmp_path / "again", LAYOUTS["tp2"])  # such a directory is read as well
    convert.to_hf(tmp_path / "again", tmp_path / "whole")
    assert_same_bits(tmp_path / "whole", model_dir("qwen3"))


def test_shards_are_filled_in_order_and_a_large_tensor_has_its_own() -> None:
    sizes = {"a": 3, "b": 5, "c": 20, "d": 1, "e": 8}
    metas = {name: TensorMeta(torch.float32, (size,)) for name, size in sizes.items()}
    shards = hf_shards(metas, max_bytes=36)
    assert [list(found) for found in shards.values()] == [["a", "b"], ["c"], ["d", "e"]]
    assert list(hf_shards(metas, max_bytes=1000)) == ["model.safetensors"]


def test_written_files_are_those_of_the_library(tmp_path: Path) -> None:
    tensors = {
        "odd": torch.randn(3, 5).bfloat16(),
        "wide": torch.randn(7),
        "empty": torch.zeros(0, 4),
        "half": torch.randn(2).half(),
        "turned": torch.randn(4, 6).T,
    }
    metas = {name: TensorMeta(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
    with SafetensorsWriter(tmp_path / "x.safetensors", metas) as writer:
        for name in reversed(tensors):
            writer.write(name, tensors[name])
    with safe_open(tmp_path / "x.safetensors", framework="pt") as found:
        assert found.metadata() == {"format": "pt"}
        for name, tensor in tensors.items():
            assert torch.equal(found.get_tensor(name), tensor), name


def test_writer_refuses_what_was_not_announced(tmp_path: Path) -> None:
    meta = {"a": TensorMeta(torch.float32, (2,))}
    with (
        pytest.raises(CheckpointError, match=r"x.safetensors lacks 1 tensors: a"),
        SafetensorsWriter(tmp_path / "x.safetensors", meta),
    ):
        pass
    with SafetensorsWriter(tmp_path / "x.safetensors", meta) as writer:
        with pytest.raises(CheckpointError, match=r"a is torch.float64"):
            writer.write("a", torch.zeros(2, dtype=torch.float64))
        writer.write("a", torch.ones(2))
    assert TensorFiles([tmp_path / "x.safetensors"]).names == {"a"}


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (MegatronLayout(tensor_parallel=4), "tensor_parallel=4 does not divide the 6 query heads"),
        (MegatronLayout(tensor_parallel=3), "tensor_parallel=3 does not divide the 2 key-value heads"),
        (MegatronLayout(pipeline_parallel=3), "pipeline_parallel=3 does not divide the 4 layers"),
        (MegatronLayout(virtual_pipeline=2), "virtual_pipeline=2 needs a pipeline of at least 2"),
        (MegatronLayout(expert_parallel=2), "expert_parallel=2, but the model has no experts: set it to 1"),
        (MegatronLayout(tensor_parallel=0), "tensor_parallel=0 must be at least 1"),
        (MegatronLayout(modules="fused"), "modules='fused' is unknown: use one of local, te"),
    ],
)
def test_layouts_that_megatron_could_not_build(
    model_dir: Any, tmp_path: Path, layout: MegatronLayout, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        convert.to_megatron(model_dir("qwen3"), tmp_path / "ranks", layout)
    assert not list(tmp_path.iterdir()), "nothing is left behind"


def damaged(source: Path, target: Path, **changes: Tensor | None) -> Path:
    """A copy of a model with tensors replaced, or taken away where None."""
    target.mkdir()
    tensors = {**load_file(source / "model.safetensors"), **{name.replace("/", "."): t for name, t in changes.items()}}
    save_file({name: t for name, t in tensors.items() if t is not None}, target / "model.safetensors")
    (target / "config.json").write_text((source / "config.json").read_text())
    return target


def test_checkpoints_that_are_not_of_their_config(model_dir: Any, tmp_path: Path) -> None:
    source, norm = model_dir("qwen3"), "model/norm/weight"
    cases: list[tuple[dict[str, Tensor | None], str]] = [
        ({norm: None}, "holds no model.norm.weight"),
        ({"model/layers/9/mlp/up_proj/weight": torch.ones(2)}, "layers.9.mlp.up_proj.weight, which a qwen3 does not"),
        ({norm: torch.ones(47)}, r"model.norm.weight has shape \(47,\), by config.json it is \(48,\)"),
        ({norm: torch.ones(48, dtype=torch.int32)}, "is of type I32: only F64, F32, F16, BF16"),
        (
            {"model/layers/0/mlp/up_proj/weight": torch.ones(80, 48)},
            "up_proj.weight is torch.float32, .*they become one",
        ),
    ]
    for number, (changes, words) in enumerate(cases):
        with pytest.raises(CheckpointError, match=words):
            convert.to_megatron(damaged(source, tmp_path / str(number), **changes), tmp_path / "ranks", LAYOUTS["tp2"])
        assert not (tmp_path / "ranks").exists()


def test_spare_head_and_buffers_are_left_out(model_dir: Any, tmp_path: Path) -> None:
    extra = {"lm_head/weight": torch.ones(VOCAB, 48), "model/layers/0/self_attn/rotary_emb/inv_freq": torch.ones(8)}
    source = damaged(model_dir("smollm2"), tmp_path / "spare", **extra)
    convert.to_megatron(source, tmp_path / "ranks", LAYOUTS["tp2"])
    convert.to_hf(tmp_path / "ranks", tmp_path / "back")
    assert_same_bits(tmp_path / "back", model_dir("smollm2"))


def test_directories_of_ranks_that_are_damaged(model_dir: Any, tmp_path: Path) -> None:
    ranks = tmp_path / "ranks"
    convert.to_megatron(model_dir("qwen3"), ranks, LAYOUTS["tp2"])
    path = ranks / convert.rank_file(Rank(tensor=1))
    tensors = load_file(path)
    save_file({**tensors, "decoder.final_layernorm.weight": torch.zeros(48).bfloat16()}, path)
    with pytest.raises(
        CheckpointError, match=r"final_layernorm.weight differs between the tensor parallel ranks 0 and 1"
    ):
        convert.to_hf(ranks, tmp_path / "back")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=r"rank_tp01_pp00_vp00_ep00.safetensors cannot be read"):
        convert.to_hf(ranks, tmp_path / "back")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"lacks 1 files of ranks: rank_tp01_pp00_vp00_ep00.safetensors"):
        convert.to_hf(ranks, tmp_path / "back")
    manifest = json.loads((ranks / "megatron.json").read_text())
    (ranks / "megatron.json").write_text(json.dumps({**manifest, "format": 9}))
    with pytest.raises(ConfigError, match="is of format 9, this version reads 1"):
        convert.to_hf(ranks, tmp_path / "back")
    assert not (tmp_path / "back").exists()


def test_nothing_is_overwritten_and_nothing_half_written_stays(
    model_dir: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ranks").mkdir()
    with pytest.raises(ConfigError, match="exists already: choose another directory"):
        convert.to_megatron(model_dir("qwen3"), tmp_path / "ranks", LAYOUTS["tp2"])
    monkeypatch.setattr(convert, "split", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        convert.to_megatron(model_dir("qwen3"), tmp_path / "other", LAYOUTS["tp2"])
    assert [path.name for path in tmp_path.iterdir()] == ["ranks"]


def test_other_families_are_refused(tmp_path: Path) -> None:
    from transformers import GPT2Config, LlamaConfig

    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ConfigError, match="is of the family 'gpt2': only qwen2, qwen3, qwen3_moe, llama"):
        shape_from_directory(tmp_path / "gpt2")
    LlamaConfig(attention_bias=True).save_pretrained(tmp_path / "biased")
    with pytest.raises(ConfigError, match="sets attention_bias"):
        shape_from_directory(tmp_path / "biased")


def test_split_and_join_on_every_rule() -> None:
    """Random tensors of awkward sizes, without files."""
    shape = ModelShape(
        family="qwen2", num_layers=1, hidden=10, num_heads=12, num_kv_heads=4, head_dim=3, intermediate=28, vocab=13
    )
    layout = MegatronLayout(tensor_parallel=4, vocab_multiple=3)
    generator = torch.Generator().manual_seed(1)
    for unit in units(shape):
        tensors = [torch.randn(size, generator=generator) for size in hf_shapes(unit, shape)]
        parts = split(unit, tensors, shape, layout)
        assert [tuple(part.shape) for part in parts] == [part_shape(unit, shape, layout)] * 4, unit
        back = join(Unit(rule=unit.rule, hf=unit.hf, name=unit.name), parts, shape)
        assert all(torch.equal(a, b) for a, b in zip(back, tensors, strict=True)), unit


@pytest.mark.slow
def test_megatron_itself_has_these_names_and_shapes(model_dir: Any, tmp_path: Path) -> None:
    """Every family in a layout of up to four gloo ranks: the state of GPTModel is what the files hold."""
    require(importlib.util.find_spec("megatron") is not None, "package megatron-core (pip install 'swe-rl[megatron]')")
    cases = {
        "qwen2.5": MegatronLayout(tensor_parallel=2),
        "qwen3": MegatronLayout(tensor_parallel=1, pipeline_parallel=2, virtual_pipeline=2),
        "smollm2": MegatronLayout(tensor_parallel=2, pipeline_parallel=2),
        "llama3": MegatronLayout(),
        "qwen3 moe": MegatronLayout(pipeline_parallel=2, expert_parallel=2),
    }
    for name, layout in cases.items():
        convert.to_megatron(model_dir(name), tmp_path / name.replace(" ", "-"), layout)
    worker = Path(__file__).with_name("convert_megatron_worker.py")
    root = str(worker.parents[3])
    env = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, str(worker), *map(str, sorted(tmp_path.iterdir()))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-6000:]
