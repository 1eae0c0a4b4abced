"""Training adapters: gradients against autograd through W + scale B A in fp64, and that only adapters travel."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import adapter_export_worker
import forked_ranks
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize
from weight_sync_worker import Receiver

from swe_rl.config import AlgoConfig, EngineConfig, ModelConfig, TrainerConfig
from swe_rl.errors import ConfigError
from swe_rl.inference import EmbeddedEngine
from swe_rl.inference.adapter_inbox import MergingInbox
from swe_rl.inference.vllm.engine import VllmEngine
from swe_rl.inference.vllm.store import WeightStore
from swe_rl.models.adapters import adapt, adapted_layers
from swe_rl.models.nano import build_model
from swe_rl.protocols import SamplingParams
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.training.weight_adapters import export_adapters, merged
from swe_rl.training.weight_sync import WeightPublisher

RANK, ALPHA = 3, 4.5
SHAPE = {"hidden_size": 16, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 24}


@pytest.fixture
def case(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The uneven batch of the split-invariance tests."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "regressions"))
    import gradients_worker

    return gradients_worker


def awake(model: nn.Module) -> None:
    """Every B is something."""
    generator = torch.Generator().manual_seed(1)
    for _, layer in adapted_layers(model):
        noise = torch.randn(layer.lora_b.shape, generator=generator, dtype=torch.float64)
        layer.lora_b.data.copy_(0.1 * noise)


class Dense(nn.Module):
    """W -> W + scale B A, as autograd sees it."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.lora_a = nn.Parameter(layer.lora_a.detach().clone())
        self.lora_b = nn.Parameter(layer.lora_b.detach().clone())
        self.scale = layer.scale

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.scale * self.lora_b @ self.lora_a


@pytest.mark.parametrize("objective", ["policy_gradient", "cross_entropy"])
def test_gradients_are_those_of_the_dense_weight(case: Any, objective: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against one unpacked forward per sample with transformers' own attention, full logits, loops over tokens."""
    from test_gradients_split import naive_gradients

    adapted = case.build_model(torch.float64)
    adapt(adapted, rank=RANK, alpha=ALPHA)
    awake(adapted)
    original = case.build_model

    def dense(dtype: torch.dtype, *, attention: str) -> Any:
        model = original(dtype, attention=attention)
        modules = dict(model.named_modules())
        for name, layer in adapted_layers(adapted):
            parametrize.register_parametrization(modules[name], "weight", Dense(layer))
        return model

    monkeypatch.setattr(case, "build_model", dense)
    found, loss = naive_gradients(torch.float64, objective)
    trainer = TorchBackend(adapted, TrainerConfig(), algo=case.ALGO)
    totals = trainer.backward(case.rank_share(case.make_samples(), rank=0, world=1), objective=objective)
    gradients = trainer.gradients()
    assert len(gradients) == 2 * len(list(adapted_layers(adapted)))
    for name, got in gradients.items():
        owner, _, suffix = name.rpartition(".")
        want = found[f"{owner}.parametrizations.weight.0.{suffix}"]
        assert want.norm() > 1e-6
        assert (got - want).norm() <= 1e-10 * want.norm(), name
    stats = totals.finish(step=1, policy_version=0, grad_norm=0.0, skipped=False, seconds=1.0, peak_memory=0)
    assert stats.loss == pytest.approx(loss, rel=1e-6)


@pytest.fixture
def adapted_backend() -> Callable[..., TorchBackend]:
    def make(*, rank: int = RANK, **settings: Any) -> TorchBackend:
        model = build_model(ModelConfig(**SHAPE, vocab_size=50))
        adapt(model, rank=rank, alpha=ALPHA)
        return TorchBackend(model, TrainerConfig(learning_rate=1e-2), algo=AlgoConfig(), **settings)

    return make


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_step_moves_adapters_only_and_full_weights_are_merged(
    adapted_backend: Callable[..., TorchBackend], make_batches: Callable[..., Any], dtype: torch.dtype
) -> None:
    trainer = adapted_backend(dtype=dtype)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    start = {name: w.clone() for name, w in trainer.weights().items()}
    for seed in range(2):
        trainer.train_step(make_batches(seed=seed), learning_rate=1e-2)
    moved = {name for name, p in trainer.model.named_parameters() if not torch.equal(p, before[name])}
    assert moved == set(trainer.masters.params)
    whole = trainer.weights()
    assert whole.keys() == dict(build_model(ModelConfig(**SHAPE, vocab_size=50)).named_parameters()).keys()
    for name, layer in adapted_layers(trainer.model):
        a, b = (trainer.masters.params[f"{name}.{suffix}"].double() for suffix in ("lora_a", "lora_b"))
        want = layer.weight.double() + ALPHA / RANK * b @ a
        torch.testing.assert_close(whole[f"{name}.weight"].double(), want, rtol=1e-5, atol=1e-6)
        assert not torch.equal(whole[f"{name}.weight"], start[f"{name}.weight"])
    assert torch.equal(whole["model.norm.weight"], start["model.norm.weight"])


def test_muon_trains_adapters_which_are_all_block_matrices(
    adapted_backend: Callable[..., TorchBackend], make_batches: Callable[..., Any]
) -> None:
    trainer = adapted_backend()
    trainer.new_phase(TrainerConfig(optimizer="muon"), algo=AlgoConfig(), objective="policy_gradient")
    before = {name: p.detach().clone() for name, p in trainer.masters.params.items()}
    for seed in range(2):  # B is zero at first, so A moves from the second step on
        assert not trainer.train_step(make_batches(seed=seed), learning_rate=1e-3).skipped
    assert all(not torch.equal(p, before[name]) for name, p in trainer.masters.params.items())
    trainer.load_state_dict(trainer.state_dict())


def test_a_merged_model_computes_what_the_adapted_one_does(
    adapted_backend: Callable[..., TorchBackend], make_batches: Callable[..., Any]
) -> None:
    trainer = adapted_backend()
    for seed in range(3):
        trainer.train_step(make_batches(seed=seed), learning_rate=1e-2)
    plain = TorchBackend(build_model(ModelConfig(**SHAPE, vocab_size=50)), TrainerConfig(), algo=AlgoConfig())
    plain.load_weights(trainer.weights())
    batches = make_batches(seed=9)
    for mine, theirs in zip(trainer.logprobs(batches), plain.logprobs(batches), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4, equal_nan=True)


def test_state_goes_on_where_it_was(
    adapted_backend: Callable[..., TorchBackend], make_batches: Callable[..., Any]
) -> None:
    trainer, other = adapted_backend(), adapted_backend()
    trainer.train_step(make_batches(), learning_rate=1e-2)
    state = trainer.state_dict()
    assert set(state["model"]) == set(trainer.masters.params)
    other.load_state_dict({**state, "model": {n: w.clone() for n, w in state["model"].items()}})
    for backend in (trainer, other):
        backend.train_step(make_batches(seed=1), learning_rate=1e-2)
    for name, weight in trainer.weights().items():
        assert torch.equal(weight, other.weights()[name])


async def test_only_adapter_bytes_travel(
    adapted_backend: Callable[..., TorchBackend], make_batches: Callable[..., Any]
) -> None:
    trainer = adapted_backend()
    engine = Receiver(trainer, "float32")
    publisher = WeightPublisher(trainer, [engine])
    trainer.train_step(make_batches(), learning_rate=1e-2)
    report = await publisher.publish()
    size = sum(layer.lora_a.numel() + layer.lora_b.numel() for _, layer in adapted_layers(trainer.model))
    assert report.sent_bytes == report.full_bytes == 4 * size
    assert set(engine.inbox.targets) == set(trainer.masters.params)


@pytest.mark.parametrize(("dtype", "mode"), [("float32", "full"), ("bfloat16", "delta")])
async def test_the_embedded_engine_applies_them(
    adapted_backend: Callable[..., TorchBackend], make_batches: Callable[..., Any], dtype: str, mode: str
) -> None:
    trainer = adapted_backend()
    cfg = EngineConfig(num_slots=2, prefill_chunk=16, dtype=dtype, weight_sync=mode)
    params = SamplingParams(max_new_tokens=8, stop_ids=(), seed=3)
    async with EmbeddedEngine(trainer.model, cfg, max_context=64) as engine:
        publisher = WeightPublisher(trainer, [engine], mode=mode, dtype=dtype)
        for step in range(3):
            report = await publisher.publish()
            got = await engine.generate([1, 2, 3], params, session=f"s{step}")
            assert got.policy_version == step
            adapters = sum(p.numel() for p in trainer.masters.params.values())
            assert report.num_elements == adapters
            reference = build_model(ModelConfig(**SHAPE, vocab_size=50))
            adapt(reference, rank=RANK, alpha=ALPHA)
            reference.load_state_dict(trainer.model.state_dict())
            async with EmbeddedEngine(reference, cfg, max_context=64) as fresh:
                again = await fresh.generate([1, 2, 3], params, session="s")
            assert (got.token_ids, got.rollout_logprobs) == (again.token_ids, again.rollout_logprobs)
            trainer.train_step(make_batches(seed=step), learning_rate=1e-2)


def test_adapters_are_written_as_peft_reads_them(adapted_backend: Callable[..., TorchBackend], tmp_path: Path) -> None:
    trainer = adapted_backend()
    awake(trainer.model)
    export_adapters(tmp_path / "adapter", trainer.model, trainer.masters.full(), base="nano")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    assert config["target_modules"] == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    for name, layer in adapted_layers(trainer.model):
        a, b = (tensors[f"base_model.model.{name}.{kind}.weight"] for kind in ("lora_A", "lora_B"))
        assert torch.equal(a, layer.lora_a)
        assert torch.equal(b, layer.lora_b)
    assert len(tensors) == 2 * len(list(adapted_layers(trainer.model)))
    plain = build_model(ModelConfig(**SHAPE, vocab_size=50))
    assert merged(plain, {"x": torch.ones(1)}) == {"x": torch.ones(1)}
    with pytest.raises(ConfigError, match="no adapters to export"):
        export_adapters(tmp_path / "other", plain, {}, base="nano")


@pytest.mark.slow
def test_ranks_that_share_the_model_merge_one_tensor_after_the_other(tmp_path: Path) -> None:
    """The worker asserts: rank 0 gets what `weights` gives, bit by bit, and the other one holds nothing."""
    forked_ranks.start(adapter_export_worker, tmp_path)


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A vLLM engine over a replica that only loads weights."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "inference"))
    import vllm_fakes

    return vllm_fakes


@pytest.mark.parametrize("adapters", [False, True])
async def test_a_vllm_replica_loads_what_the_trainer_has(
    adapted_backend: Callable[..., TorchBackend],
    make_backend: Callable[..., Any],
    make_batches: Callable[..., Any],
    fakes: Any,
    adapters: bool,
) -> None:
    """Deltas go into shared memory, adapters are merged there; restarted replicas find whole weights."""
    trainer = adapted_backend() if adapters else make_backend()
    shapes = {name: tensor.shape for name, tensor in trainer.weights().items()}
    store = WeightStore(shapes, dtype="bfloat16")
    inbox = MergingInbox(trainer.model, store.targets) if adapters else None
    replica = fakes.FakeReplica("r0")
    cfg = EngineConfig(backend="vllm", dtype="bfloat16", weight_sync="delta")
    async with VllmEngine([replica], cfg, contract=None, store=store, inbox=inbox) as engine:  # type: ignore[arg-type]
        publisher = WeightPublisher(trainer, [engine], mode="delta", dtype="bfloat16")
        for step in range(3):
            report = await publisher.publish()
            assert (report.delta, report.resync, replica.held) == (step > 0, "", step)
            for name, weight in trainer.weights().items():
                if adapters:  # merged from rounded adapters
                    torch.testing.assert_close(replica.weights[name].float(), weight, rtol=2**-7, atol=2e-3)
                else:
                    assert torch.equal(replica.weights[name], weight.bfloat16()), name
            trainer.train_step(make_batches(seed=step), learning_rate=1e-3)
