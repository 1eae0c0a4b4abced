"""Time of the rotary embedding of packed queries and keys, beside the ways in which others compute it.

    python benchmarks/bench_rope.py [--tokens 4096,16384 --heads 40 --kv-heads 8 --head-dim 128] [--device cuda]
                                    [--mode forward_backward] [--threads 2] [--providers ours,transformers]
                                    [--record] [--plot]

Steps of all providers alternate in one process; a ratio is the median over repetitions of two steps of the same
repetition. The roofline is a copy of the same queries and keys (of their gradients as well), measured in the same
alternation: every implementation must read and write at least that. `--record` appends to baselines/rope_DEVICE.csv,
`--plot` draws that file.
"""

from __future__ import annotations

import argparse
import csv
import functools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from measure import Times, interleaved
from recording import append_row, circumstances, time_columns
from torch import Tensor

from swe_rl.ops import rope

BASELINES = Path(__file__).parent / "baselines"
BASE, ATTENTION_FACTOR = 1e6, 1.138629  # of Qwen3 with YaRN factor 4; speed does not depend on the frequencies
COPY = "copy"  # the roofline, timed like a provider
COLUMNS = (
    *("date", "commit", "machine", "threads", "load_1m", "device", "provider", "dtype", "T", "heads", "kv_heads"),
    *("head_dim", "mode", "repeats", "p20_s", "p50_s", "p80_s", "cpu_p50_s", "gb_per_s", "roofline_fraction"),
    *("ratio_to_ours", "cpu_ratio_to_ours", "error", "torch", "note"),
)
Step = Callable[[], tuple[Tensor, ...]]


@dataclass(frozen=True)
class RopeCase:
    """One size. `mode`: forward | forward_backward."""

    tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    mode: str
    dtype: str
    device: str

    @property
    def bytes_moved(self) -> int:
        """Read and written by a perfect implementation."""
        item = torch.empty(0, dtype=getattr(torch, self.dtype)).element_size()
        passes = 2 if self.mode == "forward_backward" else 1
        return 2 * passes * self.tokens * (self.heads + self.kv_heads) * self.head_dim * item


class RopeInputs:
    """Queries and keys as views of one fused projection, positions of packed documents, upstream gradients."""

    def __init__(self, case: RopeCase) -> None:
        generator = torch.Generator(case.device).manual_seed(0)
        options = {"dtype": getattr(torch, case.dtype), "device": case.device, "generator": generator}
        self.case = case
        self.fused = torch.randn(case.tokens, case.heads + case.kv_heads, case.head_dim, **options)
        self.upstream = torch.randn(case.tokens, case.heads + case.kv_heads, case.head_dim, **options)
        self.positions = torch.arange(case.tokens, device=case.device) * 7 % (131072 - 1)
        dimensions = torch.arange(0, case.head_dim, 2, device=case.device) / case.head_dim
        self.inv_freq = 1.0 / BASE**dimensions

        if case.mode == "forward_backward":
            self.fused.requires_grad_()

    def views(self) -> tuple[Tensor, Tensor]:
        """(queries [T, heads, D], keys [T, kv_heads, D])."""
        return self.fused[:, : self.case.heads], self.fused[:, self.case.heads :]


def ours(inputs: RopeInputs, *, impl: str = "auto") -> tuple[Tensor, ...]:
    q, k = inputs.views()
    turned = rope(q, k, inputs.positions, inputs.inv_freq, attention_factor=ATTENTION_FACTOR, impl=impl)
    return _finish(inputs, *turned)


def transformers_tables(inputs: RopeInputs) -> tuple[Tensor, ...]:
    """cos and sin of the layer are made once per step, as a model with one rotary embedding for all layers does; here
    that one layer pays for them."""
    from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

    q, k = inputs.views()
    angles = inputs.positions[:, None].float() * inputs.inv_freq
    both = torch.cat([angles, angles], dim=-1)
    cos, sin = ((table * ATTENTION_FACTOR).to(q.dtype)[None] for table in (both.cos(), both.sin()))
    q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos, sin)
    return _finish(inputs, q[0].transpose(0, 1), k[0].transpose(0, 1))


@functools.cache
def _compiled() -> Callable[[RopeInputs], tuple[Tensor, ...]]:
    return torch.compile(transformers_tables)


def transformers_compiled(inputs: RopeInputs) -> tuple[Tensor, ...]:
    return _compiled()(inputs)


def copy(inputs: RopeInputs) -> tuple[Tensor, ...]:
    """What must be moved at least."""
    out = inputs.fused.detach().clone()
    return (out, inputs.upstream.clone()) if inputs.case.mode == "forward_backward" else (out,)


def _finish(inputs: RopeInputs, q: Tensor, k: Tensor) -> tuple[Tensor, ...]:
    if inputs.case.mode == "forward_backward":
        heads = inputs.case.heads
        upstream = [inputs.upstream[:, :heads], inputs.upstream[:, heads:]]
        return q.detach(), k.detach(), *torch.autograd.grad([q, k], inputs.fused, upstream)
    return q, k


PROVIDERS: dict[str, Callable[[RopeInputs], tuple[Tensor, ...]]] = {
    "ours": ours,
    "reference": functools.partial(ours, impl="reference"),
    "transformers": transformers_tables,
    "transformers_compiled": transformers_compiled,
}


def exact(inputs: RopeInputs) -> tuple[Tensor, Tensor]:
    """In fp64 from the same rounded angles."""
    case, wide = inputs.case, inputs.fused.detach().double()
    angles = (inputs.positions[:, None].float() * inputs.inv_freq).double()[:, None]
    a, b = wide.chunk(2, dim=-1)
    turned = torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], dim=-1)
    turned *= ATTENTION_FACTOR
    return turned[:, : case.heads], turned[:, case.heads :]


def error_of(inputs: RopeInputs, provider: str) -> float:
    """Largest difference to fp64 over the largest value."""
    found, wanted = PROVIDERS[provider](inputs)[:2], exact(inputs)
    return max(float((a.double() - b).abs().max() / b.abs().max()) for a, b in zip(found, wanted, strict=True))


def bench(case: RopeCase, providers: list[str], args: argparse.Namespace) -> Iterator[dict[str, object]]:
    """One row per provider, whether it ran or not."""
    inputs = RopeInputs(case)
    steps: dict[str, Step] = {COPY: functools.partial(copy, inputs)}
    notes, errors = {}, {}
    for name in providers:
        try:
            errors[name] = f"{error_of(inputs, name):.1e}"
            steps[name] = functools.partial(PROVIDERS[name], inputs)
        except Exception as error:
            notes[name] = f"not measured: {str(error).splitlines()[0][:100]}"
    times = interleaved(steps, args.repeats, device=case.device)
    roofline = statistics.median(times[COPY].wall)
    for name in (COPY, *providers):
        row = {"provider": name, "note": notes.get(name, ""), "error": errors.get(name, "")}
        if name in times:
            row |= _columns(times[name], times.get("ours"), roofline, case)
        yield {**dict.fromkeys(COLUMNS, ""), **_common(case, args), **row}


def _columns(found: Times, reference: Times | None, roofline: float, case: RopeCase) -> dict[str, object]:
    p50 = found.quantile(0.5)
    return {
        **time_columns(found, reference),
        "gb_per_s": f"{case.bytes_moved / p50 / 1e9:.4g}",
        "roofline_fraction": f"{roofline / p50:.3f}",
    }


def _common(case: RopeCase, args: argparse.Namespace) -> dict[str, object]:
    return {
        **circumstances(case.device, args.threads),
        "device": case.device,
        "dtype": case.dtype,
        "T": case.tokens,
        "heads": case.heads,
        "kv_heads": case.kv_heads,
        "head_dim": case.head_dim,
        "mode": case.mode,
        "torch": torch.__version__,
    }


def plot(path: Path) -> Path:
    """Writes PATH with .png: seconds over tokens, one line per provider; later rows win. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with path.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["p50_s"]]
    modes = sorted({row["mode"] for row in rows})
    figure, panels = pyplot.subplots(1, len(modes), figsize=(4.6 * len(modes), 3.8), squeeze=False)
    for panel, mode in zip(panels[0], modes, strict=True):
        for name in dict.fromkeys(row["provider"] for row in rows):
            spots = {int(r["T"]): float(r["p50_s"]) for r in rows if (r["provider"], r["mode"]) == (name, mode)}
            panel.plot(
                *zip(*sorted(spots.items()), strict=True), marker="o", ls=":" if name == COPY else "-", label=name
            )
        panel.set(xscale="log", yscale="log", xlabel="tokens", ylabel="seconds, p50", title=mode)
    panels[0][0].legend(fontsize=7)
    figure.tight_layout()
    target = path.with_suffix(".png")
    figure.savefig(target, dpi=90)
    return target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default="4096,16384")
    parser.add_argument("--heads", type=int, default=40)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--mode", choices=("forward", "forward_backward"), default="forward")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=9)
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--plot", action="store_true")
    args = parser.parse_args()
    if unknown := set(args.providers.split(",")) - set(PROVIDERS):
        parser.error(f"--providers: {min(unknown)} is unknown, use some of {', '.join(PROVIDERS)}")
    torch.set_num_threads(args.threads)
    path = BASELINES / f"rope_{args.device}.csv"
    for tokens in map(int, args.tokens.split(",")):
        case = RopeCase(tokens, args.heads, args.kv_heads, args.head_dim, args.mode, args.dtype, args.device)
        print(case, flush=True)
        for row in bench(case, args.providers.split(","), args):
            shown = ("p50_s", "gb_per_s", "roofline_fraction", "ratio_to_ours", "error", "note")
            print(f"  {row['provider']:<22} " + "  ".join(f"{n}={row[n]}" for n in shown if row[n]), flush=True)
            if args.record:
                append_row(path, COLUMNS, row)
    if args.plot:
        print(f"wrote {plot(path)}")


if __name__ == "__main__":
    main()
