"""Steps of the Megatron backend in many layouts against Hugging Face's model: `python megatron_layouts_worker.py OUT`.

Reads OUT/cases.json, a list of {name, family, dtype, layout of TrainerConfig keys, processes, from, stream}; writes
OUT/NAME.json with errors relative to a single process of transformers, autograd and torch's AdamW, after two steps. A
case that names another in `from` takes its state after the first step, in its own layout. Ranks of a case are forks of
this process, so libraries are imported once and the references made once.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import sys
import traceback
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from swe_rl.batching.packing import pack_row
from swe_rl.config import AlgoConfig, TrainerConfig
from swe_rl.inference.weight_update import UpdatePlan, WeightInbox
from swe_rl.training import checkpoint
from swe_rl.training.checkpoint_writer import CheckpointWriter
from swe_rl.training.megatron.backend import MegatronBackend
from swe_rl.training.weight_source import SyncTotals
from swe_rl.types import PackedBatch, TrainSample

VOCAB, RATE, DECAY, TEMPERATURE = 331, 1e-2, 0.1, 0.75  # which fp32 has exactly
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
DTYPES = {"float32": torch.float32, "float64": torch.float64}
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "use_cache": False,
}
EXPERTS: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 28}
CONFIGS = {
    "nano": Qwen3Config(**{**SIZES, "num_hidden_layers": 2}, head_dim=12, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**SIZES, head_dim=12, tie_word_embeddings=False),
    "qwen2": Qwen2Config(**SIZES, tie_word_embeddings=False),
    "llama": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "deep": Qwen3Config(**{**SIZES, "num_hidden_layers": 8}, head_dim=12, tie_word_embeddings=True),
    "moe": Qwen3MoeConfig(
        **{**SIZES, "num_hidden_layers": 3}, **EXPERTS, head_dim=12, norm_topk_prob=True, mlp_only_layers=[1]
    ),
    "moe-even": Qwen3MoeConfig(
        **SIZES, **EXPERTS, head_dim=12, norm_topk_prob=False, mlp_only_layers=[], tie_word_embeddings=True
    ),
}
ALGO = AlgoConfig(clip_low=CLIP_LOW, clip_high=CLIP_HIGH)


def samples() -> list[list[TrainSample]]:
    """Rows of documents of uneven lengths; the last row, and one document, train nothing."""
    rng = random.Random(4)
    rows = []
    for row, lengths in enumerate(((1, 37, 5), (64, 23), (30,), (18, 3))):
        documents = []
        for number, length in enumerate(lengths):
            mask = [t > 0 and rng.random() < 0.6 and row != 3 for t in range(length)]
            values = [rng.gauss(0, 1) for _ in range(length)]
            documents.append(
                TrainSample(
                    trajectory_id=f"{row}/{number}",
                    input_ids=[rng.randrange(VOCAB) for _ in range(length)],
                    loss_mask=mask,
                    rollout_logprobs=[-5.8 + rng.gauss(0, 0.2) if m else 0.0 for m in mask],
                    old_logprobs=[-5.8 + rng.gauss(0, 0.2) if m else 0.0 for m in mask],
                    advantages=[v if m else 0.0 for v, m in zip(values, mask, strict=True)],
                    turn_ids=[0 if m else -1 for m in mask],
                    policy_version=0,
                    temperature=TEMPERATURE,
                    token_weights=[0.05 if m else 0.0 for m in mask],
                )
            )
        rows.append(documents)
    return rows


def model_of(family: str, dtype: torch.dtype) -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        model = AutoModelForCausalLM.from_config(CONFIGS[family], attn_implementation="eager")
        for name, parameter in model.named_parameters():
            if "norm" in name:
                torch.nn.init.uniform_(parameter, 0.5, 1.5)
            elif "bias" in name:
                torch.nn.init.normal_(parameter, std=0.1)
            elif "mlp.gate.weight" in name:  # tokens differ in their experts, and none nearly ties
                torch.nn.init.normal_(parameter, std=0.5)
            elif "mlp.experts" in name:
                torch.nn.init.normal_(parameter, std=0.05)
    return model.to(dtype)


def exact(norm: Any, x: Tensor) -> Tensor:
    """RMSNorm as transformers', which rounds to fp32 whatever the model computes in."""
    scaled: Tensor = norm.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.variance_epsilon)
    return scaled


def exact_router(router: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """transformers' router without its rounding to fp32."""
    logits = F.linear(hidden.reshape(-1, router.hidden_dim), router.weight)
    values, chosen = torch.topk(torch.softmax(logits, dim=-1), router.top_k, dim=-1)
    return logits, values / values.sum(-1, keepdim=True) if router.norm_topk_prob else values, chosen


def reference_model(family: str, dtype: torch.dtype) -> Any:
    """The same, in fp64 really so: transformers computes norms, routers and eager attention's softmax in fp32."""
    model = model_of(family, dtype)
    if dtype == torch.float64:
        model.set_attn_implementation("sdpa")
        model.set_experts_implementation("eager")  # the other ones have no fp64
        for module in model.modules():
            if type(module).__name__.endswith("RMSNorm"):
                module.forward = partial(exact, module)
            elif type(module).__name__.endswith("TopKRouter"):
                module.forward = partial(exact_router, module)
    return model


def reference_loss(model: Any) -> tuple[Tensor, list[Tensor]]:
    """(PPO's loss over all documents, logprobs [N - 1] of each document)."""
    total, found = torch.zeros((), dtype=model.dtype), []
    for sample in (document for row in samples() for document in row):
        ids = torch.tensor(sample.input_ids)
        logits = model(ids[None]).logits[0, :-1].to(model.dtype) / TEMPERATURE
        logprobs = F.log_softmax(logits, dim=-1).gather(1, ids[1:, None])[:, 0]
        found.append(logprobs.detach())
        columns = (sample.old_logprobs, sample.advantages, sample.token_weights)
        old, advantages, weights = (torch.tensor(column[1:], dtype=torch.float32) for column in columns)
        mask = torch.tensor(sample.loss_mask[1:], dtype=torch.bool)
        ratio = (logprobs - old).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantages)
        total = total - (gain * weights)[mask].sum()
    return total, found


def reference(family: str, dtype: torch.dtype) -> dict[str, Any]:
    """Loss, gradients, norm and logprobs; the losses after one and after two steps of AdamW."""
    model = reference_model(family, dtype)
    named = dict(model.named_parameters())
    found: dict[str, Any] = {"before": {name: parameter.detach().clone() for name, parameter in named.items()}}
    groups = [
        {"params": [p for p in named.values() if p.ndim >= 2], "weight_decay": DECAY},
        {"params": [p for p in named.values() if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), eps=1e-8)
    losses = []
    for step in range(3):
        loss, logprobs = reference_loss(model)
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        if step == 0:
            grads = {name: parameter.grad.clone() for name, parameter in named.items()}
            found |= {"grads": grads, "logprobs": logprobs}
        norm = torch.nn.utils.clip_grad_norm_(named.values(), 1.0)
        found.setdefault("norm", float(norm))
        optimizer.step()
    return {**found, "losses": losses}


def share(rank: int, size: int) -> list[PackedBatch]:
    """The rows that a rank brings; with four ranks the last one trains nothing."""
    return [pack_row(row) for row in samples()[rank::size]]


def make(case: dict[str, Any], folder: Path) -> MegatronBackend:
    cfg = TrainerConfig(backend="megatron", weight_decay=DECAY, learning_rate=RATE, max_grad_norm=1.0, **case["layout"])
    dtype = DTYPES[case["dtype"]]
    model = model_of(case["family"], dtype)
    if case.get("stream"):  # this rank reads its own parts of the files
        directory = folder / f"{case['name']}-model"
        model.config.name_or_path = str(directory)
        if dist.get_rank() == 0:
            model.save_pretrained(directory)
        dist.barrier()
        model = model.to("meta")
    return MegatronBackend(model, cfg, algo=ALGO, dtype=dtype)


def errors(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, str]:
    """(largest error of any tensor relative to its largest element, which)."""
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    worst = (0.0, "")
    for name, want in wanted.items():
        scale = float(want.abs().max()) or 1.0
        worst = max(worst, (float((found[name].double() - want.double()).abs().max()) / scale, name))
    return worst


def logprob_error(rank: int, size: int, scored: list[Tensor], wanted: list[Tensor]) -> float:
    """Of this rank's rows; NaN exactly where nothing trains."""
    starts, count = [], 0
    for row in samples():
        starts.append(count)
        count += len(row)
    worst = 0.0
    for values, row, start in zip(scored, samples()[rank::size], starts[rank::size], strict=True):
        own = torch.cat([F.pad(each, (0, 1)) for each in wanted[start : start + len(row)]])
        mask = torch.cat([torch.tensor([*sample.loss_mask[1:], False]) for sample in row])
        assert torch.equal(torch.isfinite(values), mask)
        if mask.any():
            worst = max(worst, float((values - own)[mask].abs().max()))
    return worst


class Engine:
    """What an engine in bf16 gets of a backend, bucket by bucket."""

    def __init__(self, backend: MegatronBackend) -> None:
        self.backend, self.version = backend, 0
        self.weights = {name: torch.zeros(w.shape, dtype=torch.bfloat16) for name, w in backend.weights().items()}
        self.inbox = WeightInbox(self.weights)
        self.source = backend.weight_source(dtype="bfloat16", bucket_bytes=1 << 14, remember=True)

    def take(self, *, delta: bool) -> float:
        """The share of a whole update's bytes that came. AssertionError unless every bit is the trainer's."""
        base = self.version if delta else None
        self.version += 1
        shapes = self.source.shapes
        plan = UpdatePlan(version=self.version, base_version=base, stream="test", dtype="bfloat16", shapes=shapes)
        totals = SyncTotals()
        assert self.inbox.start(plan)
        for bucket in self.source.buckets(totals, delta=delta):
            self.inbox.receive(bucket)
        assert self.inbox.finish(totals.checksums) == []
        assert not any(len(shard.values.untyped_storage()) for shard in self.source.shards.values())
        wanted = self.backend.weights()
        assert all(torch.equal(self.weights[name], wanted[name].bfloat16()) for name in wanted)
        return totals.sent_bytes / totals.full_bytes


def measure(case: dict[str, Any], want: dict[str, Any], rank: int, size: int, folder: Path) -> dict[str, Any]:
    backend, rows, first = make(case, folder), share(rank, size), want["losses"][0]
    writer = CheckpointWriter(behind=True)
    found: dict[str, Any] = {"start": errors(backend.weights(), want["before"])[0]}
    if "from" in case:
        backend.load_state_dict(checkpoint.load(folder / case["from"] / "checkpoints" / "step-00000001").backend)
    else:
        found["logprobs"] = logprob_error(rank, size, backend.logprobs(rows), want["logprobs"])
        totals = backend.backward(rows, objective="policy_gradient")
        found["loss"] = abs(totals._found["loss"] / first - 1)
        found["grads"], found["worst"] = errors(backend.gradients(), want["grads"])
        engine = Engine(backend)
        found["published"] = [engine.take(delta=False)]
        stats = backend.train_step(rows, learning_rate=RATE)
        found["published"] += [engine.take(delta=True), engine.take(delta=True)]
        found["norm"] = abs(stats.grad_norm / want["norm"] - 1)
        found["tokens"] = [stats.num_tokens, stats.num_loss_tokens]
        found["split"] = stats.details["train/context_split_frac"]
        writer.save(folder / case["name"], backend, step=1)  # of before the steps that come now
    found["second"] = abs(backend.train_step(rows, learning_rate=RATE).loss / want["losses"][1] - 1)
    found["third"] = abs(backend.train_step(rows, learning_rate=RATE).loss / want["losses"][2] - 1)
    writer.finish()
    writer.close()
    if "from" not in case:
        path = checkpoint.latest(folder / case["name"])
        assert path is not None
        assert len(list(path.glob("optimizer*.pt"))) == size
    return found


def start(rank: int, size: int, case: dict[str, Any], want: dict[str, Any], folder: Path) -> None:
    try:
        torch.set_num_threads(1)
        store = dist.FileStore(str(folder / f"store-{case['name']}"), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
        found = measure(case, want, rank, size, folder)
        (folder / f"{case['name']}-{rank}.json").write_text(json.dumps(found))
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        raise


def main(folder: Path) -> int:
    torch.set_num_threads(1)
    context = multiprocessing.get_context("fork")
    cases = json.loads((folder / "cases.json").read_text())
    references: dict[tuple[str, str], dict[str, Any]] = {}
    failed = []
    for case in cases:
        (folder / f"store-{case['name']}").unlink(missing_ok=True)
        key = (case["family"], case["dtype"])
        if key not in references:
            references[key] = reference(case["family"], DTYPES[case["dtype"]])
        size = case["processes"]
        ranks = [
            context.Process(target=start, args=(rank, size, case, references[key], folder)) for rank in range(size)
        ]
        for process in ranks:
            process.start()
        while any(process.is_alive() for process in ranks):
            ranks[0].join(0.2)
            if any(process.exitcode for process in ranks):  # the others would wait for it
                for process in ranks:
                    process.kill()
        if any(process.exitcode for process in ranks):
            failed.append(case["name"])
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return len(failed)


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
