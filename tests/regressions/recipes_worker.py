"""Gradients of whole recipes on this rank's share of one batch: `recipes_worker.py OUT SHARDING`; rank 0 writes them.

An iteration is cut into two mini-batches; the policy moves between scoring and the second of them, so that ratios are
not 1.
"""

from __future__ import annotations

import sys
from dataclasses import replace

import torch
from gradients_worker import MAX_TOKENS, build_model, make_samples
from torch import Tensor

from swe_rl.config import AgentConfig, AlgoConfig, BatchingConfig, PhaseConfig, TrainConfig, TrainerConfig
from swe_rl.training import mesh
from swe_rl.training.step_batches import optimizer_steps, packed_step
from swe_rl.training.torch_backend import TorchBackend
from swe_rl.types import TrainSample

RECIPES = {
    "ppo": AlgoConfig(clip_low=0.05, clip_high=0.1),
    "cispo": AlgoConfig(ratio_rule="cispo", clip_low=0.05, clip_high=0.1, aggregation="token_mean"),
    "gspo": AlgoConfig(ratio_rule="gspo", clip_low=0.02, clip_high=0.02, aggregation="seq_mean"),
    "gspo_tis": AlgoConfig(ratio_rule="gspo", correction="tis", correction_cap=1.2, aggregation="turn_mean"),
    "sequence_tis": AlgoConfig(correction="sequence_tis", correction_cap=3.0, aggregation="seq_sum"),
    "geometric": AlgoConfig(
        correction="geometric_mask",
        correction_low=0.5,
        correction_cap=1.5,
        count_rejected=False,
        aggregation="sum_const",
    ),
    "kl": AlgoConfig(kl_coeff=0.1, kl_estimator="k2", entropy_coeff=0.05, aggregation="token_mean"),
    "value": AlgoConfig(advantage="gae", value_trunk_grad=True, aggregation="token_mean"),
}
PHASE = PhaseConfig(name="rl", data="rollouts", steps=1, minibatch_size=4)


def samples_with_targets() -> list[TrainSample]:
    """The uneven samples of gradients_worker, each with a value target on its first trained token."""
    filled = []
    for index, sample in enumerate(make_samples()):
        targets = [float("nan")] * len(sample.input_ids)
        if any(sample.loss_mask):
            targets[sample.loss_mask.index(True)] = 0.1 * index
        filled.append(replace(sample, value_targets=targets, token_weights=[]))
    return filled


def gradients(name: str, samples: list[TrainSample], *, max_tokens: int, sharded: bool = False) -> dict[str, Tensor]:
    """Of the second mini-batch, by parameter; "value_head" beside the model's."""
    algo = RECIPES[name]
    cfg = TrainConfig(
        algo=algo,
        agent=AgentConfig(max_context_tokens=MAX_TOKENS),
        batching=BatchingConfig(max_tokens_per_batch=max_tokens),
    )
    trainer = TorchBackend(build_model(torch.float64), TrainerConfig(fsdp=sharded), algo=algo)
    if algo.advantage != "gae":
        samples = [replace(sample, value_targets=[]) for sample in samples]
    parts = optimizer_steps(samples, PHASE, cfg, step=0, backend=trainer).parts
    trainer.load_weights({n: 1.02 * w.clone() if "proj" in n else w.clone() for n, w in trainer.weights().items()})
    packed = packed_step(parts[1], PHASE, cfg, backend=trainer)
    trainer.backward(packed, objective="policy_gradient")
    found = {n: g.clone() for n, g in trainer.gradients().items()}
    if trainer.policy.value_head is not None:
        grad = trainer.policy.value_head.weight.grad
        assert grad is not None
        found["value_head"] = grad.clone()
    stats = trainer.train_step(packed, learning_rate=1e-3)
    assert not stats.skipped
    state = trainer.state_dict()
    trainer.load_state_dict(state)
    head = state["optimizer"].get("value_head.weight", {})
    return found | {f"stepped/{n}": value.clone() for n, value in head.items() if value.ndim}


def main() -> None:
    torch.set_num_threads(1)
    mesh.init_distributed(device="cpu")
    own = samples_with_targets()[mesh.rank() :: mesh.world_size()]
    sharded = sys.argv[2] == "sharded"
    found = {name: gradients(name, own, max_tokens=30, sharded=sharded) for name in RECIPES}
    if mesh.is_main():
        torch.save(found, sys.argv[1])
    mesh.barrier()
    mesh.shutdown()
    mesh.exit_rank(0)


if __name__ == "__main__":
    main()
