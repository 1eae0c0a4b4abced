"""What a gloo rank does in test_context_parallel: attention of its rows, and its gradients to a file.

Run as a script: `python context_parallel_worker.py FOLDER KIND SIZE...` starts SIZE ranks, for one size after the
other; each works through `jobs(KIND)` and writes FOLDER/SIZE-RANK.pt. Ranks are forks: torch is imported once.
"""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch
import torch.distributed as dist
from forked_ranks import fork
from torch import Tensor

from swe_rl.batching.cp_split import place_rows
from swe_rl.ops import trie
from swe_rl.ops.context_parallel import SCHEMES, context_attention

HEADS = {"gather": (4, 2), "ring": (4, 2), "heads": (8, 2)}  # query and key heads; key heads fewer than ranks at size 4
HEAD_DIM = 8
LONG = 32_768
POISON = torch.tensor([torch.nan, torch.inf, -torch.inf], dtype=torch.float64)


@dataclass(frozen=True)
class Job:
    scheme: str
    mask: str
    placement: str
    dtype: torch.dtype

    def kv_end(self) -> Tensor:
        if self.mask == "one":
            return torch.full((53,), 53, dtype=torch.int32)
        if self.mask == "documents":  # the first ones shorter than the number of ranks
            lengths = (1, 2, 3, 1, 40, 17, 2, 29)
            ends = torch.tensor(list(accumulate(lengths)), dtype=torch.int32)
            return ends.repeat_interleave(torch.tensor(lengths))
        if self.mask == "long":
            return torch.full((LONG,), LONG, dtype=torch.int32)
        rng = random.Random(3)
        samples: list[list[int]] = []
        for _ in range(14):
            before = rng.choice(samples) if samples and rng.random() < 0.8 else []
            samples.append([*before[: rng.randrange(len(before) + 1)], *(rng.randrange(99) for _ in range(9))])
        ids = torch.tensor([i for sample in samples for i in sample])
        offsets = trie.flat_offsets([len(sample) for sample in samples])
        return trie.tree_rows(ids, offsets, trie.build_forest(ids, offsets)).kv_end

    def placed(self, size: int) -> tuple[Tensor, Tensor]:
        block = 512 if self.mask == "long" else 4
        return place_rows(self.kv_end(), num_ranks=size, placement=self.placement, block_tokens=block)

    def tensors(self, size: int) -> list[Tensor]:
        """q, k, v and the gradient of out, of all rows with padding; NaN and infinities stand on that."""
        rows = self.placed(size)[1].shape[0]
        tokens = len(self.kv_end())
        generator = torch.Generator().manual_seed(tokens)
        query_heads, key_heads = HEADS[self.scheme]
        made = []
        for heads in (query_heads, key_heads, key_heads, query_heads):
            full = POISON.repeat(rows * heads * HEAD_DIM)[: rows * heads * HEAD_DIM].view(rows, heads, HEAD_DIM)
            full[:tokens] = torch.randn(tokens, heads, HEAD_DIM, generator=generator, dtype=torch.float64)
            made.append(full.to(self.dtype))
        return made


def jobs(kind: str) -> list[Job]:
    """Of "short" and of "long"."""
    if kind == "long":
        return [Job(scheme, "long", "work", torch.float32) for scheme in SCHEMES]
    masks = ("one", "documents", "tree")
    made = [Job(s, m, "work", d) for s in SCHEMES for m in masks for d in (torch.float64, torch.float32)]
    return made + [Job(s, "one", "zigzag", torch.float64) for s in SCHEMES]


def run(job: Job, rank: int, size: int) -> list[Tensor]:
    """out, dq, dk, dv of this rank's rows."""
    placement, kv_end = job.placed(size)
    *inputs, grad = (t[placement[rank]].clone() for t in job.tensors(size))
    for tensor in inputs:
        tensor.requires_grad_()
    out = context_attention(
        *inputs, kv_end=kv_end, placement=placement, group=dist.group.WORLD, scheme=job.scheme, scale=0.4
    )
    out.backward(grad)
    return [out.detach(), *(tensor.grad for tensor in inputs)]


def run_rank(folder: Path, kind: str, rank: int, size: int) -> None:
    torch.save([run(job, rank, size) for job in jobs(kind)], folder / f"{size}-{rank}.pt")


def main() -> None:
    folder, kind, sizes = Path(sys.argv[1]), sys.argv[2], [int(size) for size in sys.argv[3:]]
    fork(folder, sizes, partial(run_rank, folder, kind))


if __name__ == "__main__":
    main()
