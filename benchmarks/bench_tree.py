"""Trees: how many tokens are left of groups of rollouts, and what the trie and the packer cost.

    python benchmarks/bench_tree.py [--run runs/RUN] [--record]

Cases are synthetic groups (tree_cases.py); with --run also the rollouts of a training run, iteration by iteration.
`ratio` is tokens of the samples one by one / packed tokens, `efficiency` the packed tokens / room of the rows,
`build` the forest from ids (C++), `rows` the metadata of all packed rows, `twin` the forest by the Python twin,
`lay_out` everything from samples to tensors. Times are medians of `--repeats`; --record appends to baselines/tree.csv.
They are wall times, and `load_1m` says how many processes wanted the machine meanwhile; `lay_out_cpu` is the processor
time of lay_out, which others hardly change.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from recording import append_row
from tree_cases import AgentGroup, bushy_ids

from swe_rl.batching import to_samples
from swe_rl.batching.layout import lay_out
from swe_rl.ops import trie
from swe_rl.rollout.journal import read_parquet
from swe_rl.types import TrainSample

BASELINE = Path(__file__).parent / "baselines" / "tree.csv"
COLUMNS = (
    *("date", "machine", "load_1m", "case", "budget", "samples", "sample_tokens", "packed_tokens", "ratio", "rows"),
    *("efficiency", "build_ms", "rows_ms", "twin_ms", "twin_times", "lay_out_ms", "lay_out_cpu_ms"),
)
SWE = {"prompt": 4_000, "turns": 40, "per_turn": 1_500, "sampled": 500}
CASES: dict[str, tuple[list[AgentGroup], int]] = {  # name -> groups, budget in tokens
    "per turn, 40 x 1.5k": ([AgentGroup(size=1, style="per_turn", **SWE)], 131_072),
    "per turn, thinking stripped": ([AgentGroup(size=1, style="stripped", **SWE)], 131_072),
    "8 rollouts, linear": ([AgentGroup(size=8, style="linear", **SWE)], 131_072),
    "8 rollouts, compacted": ([AgentGroup(size=8, style="compacted", **SWE)], 131_072),
    "length mix: 16 groups of 8": (
        [
            AgentGroup(size=8, prompt=p, turns=t, per_turn=900, sampled=300, style=style, spread=0.7)
            for p in (1_500, 3_000)
            for t in (5, 12, 24, 40)
            for style in ("linear", "compacted")
        ],
        131_072,
    ),
}


def median_ms(step: Callable[[], object], repeats: int) -> float:
    return times_ms(step, repeats)[0]


def times_ms(step: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Medians of wall and of processor time."""
    wall, cpu = [], []
    for _ in range(repeats):
        started, used = time.perf_counter(), time.process_time()
        step()
        wall.append(1e3 * (time.perf_counter() - started))
        cpu.append(1e3 * (time.process_time() - used))
    return statistics.median(wall), statistics.median(cpu)


def flat(samples: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.tensor([i for sample in samples for i in sample], dtype=torch.int64)
    return ids, trie.flat_offsets([len(sample) for sample in samples])


def trie_times(ids: torch.Tensor, offsets: torch.Tensor, repeats: int, *, twin: bool) -> dict[str, float]:
    """Forest, metadata, and the forest by the twin."""
    forest = trie.build_forest(ids, offsets, impl="cpu")
    build = median_ms(lambda: trie.build_forest(ids, offsets, impl="cpu"), repeats)
    rows = median_ms(lambda: trie.tree_rows(ids, offsets, forest, impl="cpu"), repeats)
    found = {"build_ms": round(build, 2), "rows_ms": round(rows, 2)}
    if twin:
        slow = median_ms(lambda: trie.build_forest(ids, offsets, impl="reference"), 1)
        found |= {"twin_ms": round(slow, 1), "twin_times": round(slow / build, 1)}
    return found


def measure(samples: list[TrainSample], budget: int, repeats: int, *, twin: bool = True) -> dict[str, object]:
    layout = lay_out(samples, max_tokens=budget, layout="tree")
    raw = sum(len(sample.input_ids) for sample in samples)
    packed = sum(len(batch.input_ids) for batch in layout.batches)
    wall, cpu = times_ms(lambda: lay_out(samples, max_tokens=budget, layout="tree"), repeats)
    return {
        "budget": budget,
        "samples": len(samples),
        "sample_tokens": raw,
        "packed_tokens": packed,
        "ratio": round(raw / packed, 3),
        "rows": len(layout.batches),
        "efficiency": round(packed / (budget * len(layout.batches)), 4),
        **trie_times(*flat([sample.input_ids for sample in samples]), repeats, twin=twin),
        "lay_out_ms": round(wall, 1),
        "lay_out_cpu_ms": round(cpu, 1),
    }


def bushy(repeats: int) -> dict[str, object]:
    """131,072 rows of a tree that branches everywhere."""
    ids, offsets = flat(bushy_ids(131_072))
    rows = trie.tree_rows(ids, offsets, trie.build_forest(ids, offsets))
    sizes = {"samples": len(offsets) - 1, "sample_tokens": len(ids), "packed_tokens": len(rows.input_ids)}
    ratio = round(len(ids) / len(rows.input_ids), 3)
    return {**sizes, "ratio": ratio, **trie_times(ids, offsets, repeats, twin=True)}


def of_run(directory: Path) -> dict[str, list[TrainSample]]:
    """phase/step -> samples of its rollouts, as far as the journal has been compacted."""
    found: dict[str, list[TrainSample]] = {}
    for path in sorted(directory.rglob("*.parquet")):
        for trajectory in read_parquet(path):
            phase, step, _ = trajectory.group_id.split("/", 2)
            if not phase.startswith("eval-"):  # those do not train
                found.setdefault(f"{phase}/{step}", []).extend(to_samples(trajectory, 1.0))
    return found


def show(case: str, figures: dict[str, object], record: bool) -> None:
    print(case, *(f"{name}={value}" for name, value in figures.items()), flush=True)
    if record:
        row = {"date": datetime.date.today().isoformat(), "machine": platform.machine(), "case": case, **figures}
        append_row(BASELINE, COLUMNS, {**row, "load_1m": round(os.getloadavg()[0], 1)})


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--run", type=Path)
    parser.add_argument("--run-budget", type=int, default=10_240)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    for case, (groups, budget) in CASES.items():
        samples = [sample for seed, group in enumerate(groups) for sample in group.samples(seed)]
        show(case, measure(samples, budget, args.repeats), args.record)
    show("bushy tree", bushy(args.repeats), args.record)
    for name, samples in of_run(args.run).items() if args.run else ():
        show(f"run {name}", measure(samples, args.run_budget, args.repeats, twin=False), args.record)
    return 0


if __name__ == "__main__":
    sys.exit(main())
