"""`swe-rl plan` and `swe-rl convert` as commands: what they print, their exit codes, one line for every mistake."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from swe_rl.cli.dispatch import main
from swe_rl.config.cluster import ClusterConfig, validate_cluster
from swe_rl.errors import ConfigError


def run(*words: str) -> int:
    return main(list(words))


@pytest.mark.parametrize(
    ("experiment", "cluster", "parameters"),
    [("deepswe", "h100_8x8", "32.76 G"), ("nebius", "h200_16x8", "72.71 G")],
)
def test_plan_prints_a_layout_with_its_arithmetic(
    capsys: pytest.CaptureFixture[str], experiment: str, cluster: str, parameters: str
) -> None:
    assert run("plan", f"experiment={experiment}", f"cluster={cluster}", "--layouts", "2") == 0
    text = capsys.readouterr().out
    assert f"{parameters} parameters" in text
    assert re.search(r"layout   TP\d CP\d PP\d DP\d", text)
    for component in ("parameters", "gradients", "optimizer", "activations", "buffers", "together"):
        assert re.search(rf"^{component} +\d+\.\d\d  \S", text, flags=re.MULTILINE), component
    assert re.search(r"recompute  GiB of activations: none [\d.]+, selective [\d.]+, full [\d.]+, offload", text)
    assert "choose   trainer.tensor_parallel=" in text
    assert len(re.findall(r"^[12]  +\d+ ", text, flags=re.MULTILINE)) == 2


def test_plan_adds_up(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "--json", "experiment=deepswe", "cluster=h100_8x8") == 0
    found = json.loads(capsys.readouterr().out)
    best = found["best"]
    assert found["fits"] is True
    assert sum(best["memory_bytes"].values()) == best["total_bytes"]
    assert best["trainer_gpus"] + best["engine_gpus"] == 64
    stages = best["phases"]["rl"]["stages_s"]
    assert best["phases"]["rl"]["iteration_s"] == pytest.approx(sum(stages.values()))
    assert [layout["seconds"] for layout in found["layouts"]] == sorted(
        layout["seconds"] for layout in found["layouts"]
    )


def test_what_plan_advises_is_a_configuration(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "experiment=nebius", "cluster=h200_16x8") == 0
    words = capsys.readouterr().out.splitlines()[-1].split()[1:]
    assert run("train", "--cfg", "experiment=nebius", "cluster=h200_16x8", *words) == 0
    assert "tensor_parallel: 8" in capsys.readouterr().out


def test_json_advises_what_the_text_does(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["experiment=deepswe", "cluster=h100_8x8"]
    assert run("plan", *words) == 0
    text = capsys.readouterr().out.splitlines()[-1].split()[1:]
    assert run("plan", "--json", *words) == 0
    assert json.loads(capsys.readouterr().out)["best"]["overrides"] == text
    assert any(word.startswith("engine.replicas=") for word in text)


def test_an_engine_larger_than_the_cluster_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model.name=Qwen/Qwen2.5-0.5B", "cluster.num_nodes=1", "cluster.gpus_per_node=2", "cluster.gpu=h200"]
    assert run("plan", *words, "engine=vllm", "engine.tensor_parallel=4") == 2
    assert "engine.tensor_parallel=4 needs more than the 2 GPUs of the cluster" in capsys.readouterr().err


def test_plan_refuses_what_does_not_fit(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "experiment=nebius", "cluster=h100_1x8") == 2
    captured = capsys.readouterr()
    assert "together" in captured.out  # the arithmetic of the nearest layout is shown
    assert re.search(
        r"none of \d+ layouts fits on 8 H100 80GB: the nearest, TP8 .* needs [\d.]+ GiB per GPU, [\d.]+ are usable, "
        r"[\d.]+ GiB are missing .* take cluster.num_nodes=[248],",
        captured.err,
    )
    assert len(captured.err.splitlines()) == 1


def test_plan_of_a_laptop(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("plan", "experiment=quickstart") == 0
    text = capsys.readouterr().out
    assert "nano: 1.41 M parameters" in text
    assert "engine" in text
    assert "hours" not in text  # no figures of speed are known of this machine


def test_assumptions_can_be_set(capsys: pytest.CaptureFixture[str]) -> None:
    words = ("plan", "--json", "experiment=deepswe", "cluster=h100_8x8", "--engine-nodes=4")
    found = []
    for more in ((), ("--mean-share", "0.5"), ("--matmul=0.3",), ("--tool-s", "60")):
        assert run(*words, *more) == 0
        found.append(json.loads(capsys.readouterr().out)["best"]["seconds"])
    assert all(seconds > found[0] for seconds in found[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--mean-share", "2"), "--mean-share needs a number above 0 and at most 1, got '2'"),
        (("--layouts", "x"), "--layouts needs a whole number, got 'x'"),
        (("--engine-nodes",), "--engine-nodes needs a whole number, got ''"),
        (("--sweep",), "--sweep is no option"),
        (("-m",), "swe-rl plan takes neither -m nor --cfg"),
        (
            ("experiment=deepswe", "cluster=any", "cluster.num_nodes=2", "cluster.gpus_per_node=8"),
            "cluster.gpu is not set",
        ),
        (("experiment=deepswe", "model.name=mistral"), "model.name='mistral' has no entry in the table of dimensions"),
        (("experiment=deepswe", "cluster=h100_8x8", "--engine-nodes", "9"), "--engine-nodes 9 of 8 leaves no GPU"),
        (("experiment=deepswe", "cluster.gpu=h300"), "cluster.gpu='h300'"),
    ],
)
def test_plan_says_in_one_line_what_is_wrong(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], message: str
) -> None:
    assert run("plan", *words) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_a_gpu_without_nodes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster.gpu=h100 does nothing without cluster.num_nodes: set that"):
        validate_cluster(ClusterConfig(gpu="h100"))
    validate_cluster(ClusterConfig(gpu="h100", num_nodes=1, gpus_per_node=8))


@pytest.mark.parametrize("command", ["plan", "convert"])
def test_help_has_an_example(capsys: pytest.CaptureFixture[str], command: str) -> None:
    assert run(command, "--help") == 0
    text = capsys.readouterr().out
    assert f"example:\n  swe-rl {command} " in text
    assert max(map(len, text.splitlines())) <= 120


def test_convert_there_and_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch
    from safetensors.torch import load_file

    from swe_rl.config import ModelConfig
    from swe_rl.models.nano import build_model

    sizes = {"hidden_size": 32, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "intermediate_size": 48}
    build_model(ModelConfig(vocab_size=300, **sizes)).save_pretrained(tmp_path / "hf")
    ranks, back, other = (str(tmp_path / name) for name in ("ranks", "back", "other"))
    assert run("convert", str(tmp_path / "hf"), ranks, "--tensor-parallel", "2", "--pipeline-parallel=2") == 0
    assert run("convert", ranks, other, "--to", "megatron", "--vocab-multiple", "1") == 0
    assert run("convert", other, back) == 0
    assert capsys.readouterr().out.split() == [ranks, other, back]
    assert len(list(Path(ranks).glob("rank_*.safetensors"))) == 4
    first, second = (load_file(Path(path) / "model.safetensors") for path in (tmp_path / "hf", back))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_convert_says_in_one_line_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "empty").mkdir()
    cases = [
        (("nowhere", "x"), "SOURCE nowhere is no directory"),
        ((str(tmp_path / "empty"), "x"), "holds no config.json of a model"),
        ((str(tmp_path / "empty"), "x", "--to", "hf", "--tensor-parallel", "2"), "--tensor-parallel does nothing for"),
        ((str(tmp_path / "empty"), "x", "--tensor-parallel", "two"), "invalid int value: 'two'"),
        ((), "the following arguments are required: SOURCE, TARGET"),
    ]
    for words, message in cases:
        assert run("convert", *words) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
