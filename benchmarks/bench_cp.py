"""Context parallelism on paper: balance of work, bytes per rank, and how much of the traffic attention can hide.

    python benchmarks/bench_cp.py [--tokens 131072] [--record]

Work is counted pair by pair from the mask of each row; `work` deals out blocks by it, `zigzag` is the usual head-tail
split. Bytes are what one rank sends per layer, forward and backward. Times are a model, not a measurement: attention at
--tflops forward and 0.65 of it backward, a link at its full rate. `exposed` is the share of a layer's attention time
that waiting adds: gather waits for all keys first, a ring only for what is slower than the part at hand, the exchange
of heads always. Every row of baselines/cp.csv says "model".
"""

from __future__ import annotations

import argparse
import datetime
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from recording import append_row
from torch import Tensor
from tree_cases import AgentGroup, bushy_ids

from swe_rl.batching.cp_split import place_rows, visible_keys
from swe_rl.batching.layout import lay_out
from swe_rl.ops import trie

BASELINE = Path(__file__).parent / "baselines" / "cp.csv"
COLUMNS = (
    *("date", "kind", "row", "tokens", "ranks", "placement", "padding", "max_over_mean", "pairs"),
    *("scheme", "link", "mib_per_layer", "attention_ms", "exposed_ms", "exposed_share"),
)
LINKS = {"nvlink": 450e9, "infiniband": 50e9}  # bytes per second, one direction
BACKWARD = 0.65  # of the forward rate; 2.5 times the work
SIZES = (2, 4, 8, 16)


@dataclass(frozen=True)
class Heads:
    """Of one layer: Qwen3-32B."""

    query: int = 64
    key: int = 8
    dim: int = 128

    def flops(self, pairs: float) -> float:
        """Of the forward pass."""
        return 4.0 * pairs * self.query * self.dim


def masks(tokens: int) -> dict[str, Tensor]:
    """kv_end of each row."""
    samples = [s for seed in range(6) for s in AgentGroup(4, 2_000, 24, 900, 300, spread=0.8).samples(seed)]
    packed = {
        name: max(lay_out(samples, max_tokens=tokens, layout=name).batches, key=lambda b: len(b.input_ids)).kv_end
        for name in ("sequence", "tree")
    }
    bushy = bushy_ids(tokens)
    ids = torch.tensor([i for sample in bushy for i in sample])
    offsets = trie.flat_offsets([len(sample) for sample in bushy])
    return {
        "one sequence": torch.full((tokens,), tokens, dtype=torch.int32),
        "packed rollouts": packed["sequence"],
        "tree of rollouts": packed["tree"],
        "bushy tree": trie.tree_rows(ids, offsets, trie.build_forest(ids, offsets)).kv_end,
    }


def balance(kv_end: Tensor, size: int, placement: str) -> dict[str, object]:
    rows, ends = place_rows(kv_end, num_ranks=size, placement=placement)
    work = visible_keys(ends)[rows].sum(dim=1).double()
    return {
        "tokens": len(kv_end),
        "ranks": size,
        "placement": placement,
        "padding": len(ends) - len(kv_end),
        "max_over_mean": round(float(work.max() / work.mean()), 4),
        "pairs": int(work.max()),
    }


def traffic(scheme: str, tokens: int, size: int, heads: Heads) -> tuple[float, float]:
    """Bytes that a rank sends in the forward and the backward pass of one layer; bf16, gradients of keys in fp32."""
    away = (size - 1) / size
    keys = 2 * tokens * heads.key * heads.dim
    if scheme in ("gather", "ring"):
        return 2 * keys * away, (2 + 4) * keys * away
    rows = tokens / size * (2 * heads.query + 2 * max(heads.key, size)) * heads.dim * away
    return 2 * rows, 2 * rows


def exposed(scheme: str, sent: tuple[float, float], compute: tuple[float, float], link: float, size: int) -> float:
    """Seconds of waiting in one layer, forward and backward."""
    waits = []
    for amount, busy in zip(sent, compute, strict=True):
        if scheme == "ring":
            waits.append(max(0.0, amount / link - busy * (size - 1) / size))
        else:
            waits.append(amount / link)
    return sum(waits)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--tflops", type=float, default=450.0)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    heads, today = Heads(), datetime.date.today().isoformat()
    for name, kv_end in masks(args.tokens).items():
        for size in SIZES:
            for placement in ("work", "zigzag"):
                figures = {"date": today, "kind": "model", "row": name, **balance(kv_end, size, placement)}
                forward = heads.flops(float(str(figures["pairs"]))) / (args.tflops * 1e12)
                compute = (forward, 2.5 * forward / BACKWARD)
                for scheme in ("gather", "ring", "heads"):
                    sent = traffic(scheme, len(kv_end), size, heads)
                    for link, rate in LINKS.items():
                        wait = exposed(scheme, sent, compute, rate, size)
                        row = {
                            **figures,
                            "scheme": scheme,
                            "link": link,
                            "mib_per_layer": round(sum(sent) / (1 << 20), 1),
                            "attention_ms": round(1e3 * sum(compute), 2),
                            "exposed_ms": round(1e3 * wait, 2),
                            "exposed_share": round(wait / sum(compute), 4),
                        }
                        print(*(f"{k}={v}" for k, v in row.items() if k not in ("date", "kind")), flush=True)
                        if args.record:
                            append_row(BASELINE, COLUMNS, row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
