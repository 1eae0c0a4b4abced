"""Router replay: what was recorded is what computes, and how much of it counts is still the router's."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from swe_rl.batching import to_samples
from swe_rl.batching.packing import pack_row
from swe_rl.config import AlgoConfig, TrainerConfig
from swe_rl.errors import ConfigError, InvariantError
from swe_rl.models.attention import PACKED, register
from swe_rl.models.contract import PolicyContract
from swe_rl.models.forward import packed_forward
from swe_rl.models.routing import FREE, check_replay, decode_routing, encode_routing, replay_routing
from swe_rl.rollout.records import from_row, to_row
from swe_rl.training.parity import compare
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import Completion, StopReason, Trajectory, Turn

LAYERS, EXPERTS, TOP = 3, 5, 2


@pytest.fixture
def model() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    register()
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=40,
        hidden_size=24,
        intermediate_size=20,
        num_hidden_layers=LAYERS,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        moe_intermediate_size=12,
        norm_topk_prob=True,
        attn_implementation=PACKED,
    )
    made: Any = Qwen3MoeForCausalLM(config)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.2 * torch.randn(p.shape, dtype=p.dtype))
    return made


def choices(num: int, *, seed: int = 0) -> np.ndarray:
    """[num, layers, top], two different experts each."""
    draw = np.random.default_rng(seed)
    rows = [[draw.permutation(EXPERTS)[:TOP] for _ in range(LAYERS)] for _ in range(num)]
    return np.array(rows, dtype=np.uint8)


def turn(context: list[int], sampled: list[int], routing: str = "", kept: int | None = None) -> Turn:
    completion = Completion(
        token_ids=sampled,
        rollout_logprobs=[-1.0] * len(sampled),
        finish_reason="stop",
        policy_version=0,
        policy_version_max=0,
        routing=routing,
    )
    return Turn(context_ids=context, completion=completion, tool_call=None, observation="", kept_context=kept)


def played(*turns: Turn) -> Trajectory:
    return Trajectory(
        trajectory_id="t",
        task_id="t",
        group_id="g",
        rollout_index=0,
        turns=list(turns),
        stop_reason=StopReason.MAX_TURNS,
        temperature=1.0,
    )


def test_pieces_cover_each_other_in_order() -> None:
    first, second = choices(6), choices(4, seed=1)
    found = decode_routing([encode_routing(first, first=0), encode_routing(second, first=5)], num_tokens=8)
    assert found is not None
    assert found.dtype == torch.int16
    np.testing.assert_array_equal(found[:5], first[:5])
    np.testing.assert_array_equal(found[5:], second[:3])  # cut at the end of the sample
    alone = decode_routing([encode_routing(second, first=2)], num_tokens=7)
    assert alone is not None
    assert alone[[0, 1, 6]].eq(FREE).all()
    assert decode_routing([], num_tokens=4) is None
    with pytest.raises(InvariantError, match="in one sample"):
        decode_routing([encode_routing(first, first=0), encode_routing(second[:, :2], first=0)], num_tokens=9)


def test_the_row_has_them_where_their_tokens_are_also_after_a_context_was_left_out() -> None:
    pieces = [choices(5), choices(4, seed=1), choices(5, seed=2)]
    one, two = encode_routing(pieces[0], first=0), encode_routing(pieces[1], first=5)
    later = encode_routing(pieces[2], first=3)  # its context keeps 3 of the 9 ids before
    trajectory = played(
        turn([1, 2, 3], [4, 5, 6], one), turn([7], [8, 9], two), turn([10, 11], [12, 13, 14, 15], later, kept=3)
    )
    samples = to_samples(trajectory, 1.0)
    batch = pack_row([*samples, to_samples(played(turn([1], [2, 3])), 1.0)[0]])
    assert batch.routed_experts is not None
    assert batch.routed_experts.shape == (9 + 9 + 3, LAYERS, TOP)
    np.testing.assert_array_equal(batch.routed_experts[:5], pieces[0])
    np.testing.assert_array_equal(batch.routed_experts[5:9], pieces[1])
    np.testing.assert_array_equal(batch.routed_experts[9:12], pieces[0][:3])
    np.testing.assert_array_equal(batch.routed_experts[12:17], pieces[2])
    assert batch.routed_experts[17:].eq(FREE).all()  # the last id was never an input; the other sample says nothing
    assert from_row(to_row(trajectory)).turns[2].completion.routing == later
    assert pack_row(to_samples(played(turn([1], [2, 3])), 1.0)).routed_experts is None


def dense(model: Any, ids: Tensor, chosen: Tensor) -> Tensor:
    """Hidden states with these experts, layer by layer and token by token: no code in common but the attention."""

    def mixture(layer: int) -> Any:
        def forward(x: Tensor) -> Tensor:
            block = model.model.layers[layer].mlp
            flat = x.reshape(-1, x.shape[-1])
            out = torch.zeros_like(flat)
            for t, row in enumerate(flat):
                odds = torch.softmax((block.gate.weight @ row).float(), -1)[chosen[t, layer].long()]
                odds = (odds / odds.sum()).to(row.dtype)
                for share, e in zip(odds, chosen[t, layer].tolist(), strict=True):
                    gate, up = (block.experts.gate_up_proj[e] @ row).chunk(2)
                    out[t] += share * (block.experts.down_proj[e] @ (torch.nn.functional.silu(gate) * up))
            return out.reshape(x.shape)

        return forward

    kept = [layer.mlp.forward for layer in model.model.layers]
    for index, layer in enumerate(model.model.layers):
        layer.mlp.forward = mixture(index)
    try:
        return packed_forward(model, pack_row([replace(SAMPLE, input_ids=ids.tolist())]))
    finally:
        for layer, forward in zip(model.model.layers, kept, strict=True):
            layer.mlp.forward = forward


SAMPLE = to_samples(played(turn([3, 1, 4], [1, 5, 9, 2])), 1.0)[0]


def test_a_replayed_row_is_the_dense_sum_over_the_recorded_experts(model: Any) -> None:
    chosen = choices(len(SAMPLE.input_ids))
    batch = pack_row([replace(SAMPLE, routing=[encode_routing(chosen, first=0)])])
    got = packed_forward(model, batch)
    want = dense(model, batch.input_ids, torch.from_numpy(chosen))
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    weight = torch.randn(got.shape, dtype=got.dtype)
    (mine,) = torch.autograd.grad((got * weight).sum(), model.model.layers[1].mlp.gate.weight)
    (its,) = torch.autograd.grad((want * weight).sum(), model.model.layers[1].mlp.gate.weight)
    assert float(mine.abs().max()) > 1e-3
    torch.testing.assert_close(mine, its, rtol=1e-3, atol=1e-4)


def test_ones_own_choice_changes_no_bit_and_the_next_row_is_free_again(model: Any) -> None:
    free = pack_row([SAMPLE])
    chosen: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_hook(lambda _, __, output: chosen.append(output[2]))
        for layer in model.model.layers
    ]
    want = packed_forward(model, free)
    for hook in hooks:
        hook.remove()
    own = torch.stack(chosen, dim=1)
    assert torch.equal(packed_forward(model, replace(free, routed_experts=own.to(torch.int16))), want)
    other = replace(free, routed_experts=(own.to(torch.int16) + 1) % EXPERTS)
    assert not torch.equal(packed_forward(model, other), want)
    assert torch.equal(packed_forward(model, free), want)
    partly = own.to(torch.int16)
    partly[2:] = FREE
    assert torch.equal(packed_forward(model, replace(free, routed_experts=partly)), want)


def test_what_cannot_be_replayed_is_refused(model: Any) -> None:
    with pytest.raises(InvariantError, match="for a model of 3 routers"):
        replay_routing(model, torch.zeros(4, LAYERS + 1, TOP, dtype=torch.int16))
    batch = pack_row([replace(SAMPLE, routing=[encode_routing(choices(7), first=0)])])
    with pytest.raises(ConfigError, match="no context parallelism, no trees"):
        packed_forward(model, replace(batch, target_rows=torch.arange(7)))
    check_replay(model.config, name="m")
    model.config.mlp_only_layers = [1]
    with pytest.raises(ConfigError, match="only 2 of 3 layers"):
        check_replay(model.config, name="m")
    model.config.num_experts = 0
    with pytest.raises(ConfigError, match="needs a mixture of experts"):
        check_replay(model.config, name="m")


def test_the_probe_reports_the_gap_and_the_replay_closes_it(model: Any) -> None:
    """The engine's routers tie within rounding and decide by another noise than the trainer's: same weights to 1e-9,
    other experts. Its recorded choice is what makes the trainer agree."""
    with torch.no_grad():
        for layer in model.model.layers:
            layer.mlp.gate.weight.mul_(1e-9)
    trainer = TorchBackend(model, TrainerConfig(), algo=AlgoConfig())
    contract = PolicyContract(
        vocab_size=40,
        stop_ids=(),
        temperature=1.0,
        max_context=64,
        trainer_dtype="float32",
        engine_dtype="float32",
        rope={},
    )
    prompts = {"short": list(range(6)), "middle": list(range(3, 19)), "long": [(7 * i) % 40 for i in range(31)]}
    found = []
    for name, prompt in prompts.items():
        chosen: list[Tensor] = []
        hooks = [layer.mlp.gate.register_forward_hook(_other_noise(chosen)) for layer in model.model.layers]
        sampled = [(5 * i + len(prompt)) % 40 for i in range(9)]
        with torch.no_grad():
            batch = pack_row(to_samples(played(turn(prompt, sampled)), 1.0))
            logits = model.get_output_embeddings()(packed_forward(model, batch))
        for hook in hooks:
            hook.remove()
        logprobs = torch.log_softmax(logits, dim=-1)[torch.arange(len(prompt) - 1, len(batch.labels) - 1), sampled]
        routing = encode_routing(torch.stack(chosen, dim=1)[:-1].numpy(), first=0)
        completion = replace(turn([], sampled).completion, rollout_logprobs=logprobs.tolist(), routing=routing)
        trajectory = played(replace(turn(prompt, sampled), completion=completion))
        found.append(replace(trajectory, trajectory_id=f"parity/{name}/fixed/1"))
    report = compare(found, contract, score=trainer.logprobs)
    assert report.ok, report.describe()
    free = [
        replace(t, turns=[replace(t.turns[0], completion=replace(t.turns[0].completion, routing=""))]) for t in found
    ]
    gap = compare(free, contract, score=trainer.logprobs)
    assert not gap.ok, gap.describe()
    assert min(gap.means.values()) > 10 * max(report.means.values())


def _other_noise(chosen: list[Tensor]) -> Any:
    def hook(_: Any, __: Any, output: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        logits, scores, _indices = output
        indices = torch.topk(-logits, TOP, dim=-1).indices
        chosen.append(indices)
        return logits, scores, indices

    return hook
