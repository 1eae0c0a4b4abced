"""Time and memory of the policy-gradient head, beside the ways in which others compute it.

    python benchmarks/bench_head.py [--tokens 4096 --hidden 576 --vocab 49152 --fraction 0.2] [--mode scoring]
                                    [--threads 2] [--providers ours,eager] [--record] [--plot]
    python benchmarks/bench_head.py --targets [--record]     the cases that have targets, and a verdict on each

Steps of all providers alternate in one process, and a ratio is the median over repetitions of two steps of the same
repetition, in wall time and in time on the CPU (which a busy machine disturbs less). Peak memory is that of a process
of its own per provider (CPU: resident memory). The roofline is the time of the three matrix products of the trained
rows (one for scoring), measured in the same alternation. `--record` appends the rows to baselines/head_DEVICE.csv,
`--plot` draws that file.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from head_cases import HeadCase, HeadInputs, make_inputs
from head_providers import CROSS_ENTROPY, NOTES, PROVIDERS, CannotRun, first_line, run_provider, run_reference, versions
from head_targets import TARGETS, verdicts
from measure import interleaved, peak_memory
from recording import Row, append_row, circumstances, memory_in_child, print_memory, time_columns
from torch import Tensor

BASELINES = Path(__file__).parent / "baselines"
PRODUCTS = "products"  # the roofline, timed like a provider
ALL_LOGITS = {"eager": 4, "trl_selective": 5}  # who keeps [T, V] fp32, and about how many of them at once
COLUMNS = (
    *("date", "commit", "machine", "threads", "load_1m", "kernel", "provider", "device", "dtype", "T", "H", "V"),
    *("trained_fraction", "mode", "repeats", "p20_s", "p50_s", "p80_s", "cpu_p50_s", "peak_mib_over_base"),
    *("roofline_s", "roofline_fraction", "ratio_to_ours", "cpu_ratio_to_ours", "gradient_error", "versions", "note"),
)


def bench_case(case: HeadCase, providers: Sequence[str], args: argparse.Namespace) -> Iterator[Row]:
    """One row per provider, whether it ran or not."""
    results: dict[str, Row] = {name: {} for name in providers}
    if args.speed:
        for name, found in speed(case, providers, args.repeats).items():
            results[name] |= found
    if args.memory:
        for name in providers:
            if "note" not in results[name]:
                results[name] |= memory_in_child(__file__, case, name, args.threads)
    for name, found in results.items():
        yield {**_common(case, args, name), "note": NOTES.get(name, ""), **found}


def speed(case: HeadCase, providers: Sequence[str], repeats: int) -> dict[str, Row]:
    """Per provider its times, or a note why there are none."""
    inputs = make_inputs(case)
    results: dict[str, Row] = {}
    steps: dict[str, Callable[[], object]] = {}
    references: dict[str, Tensor] = {}
    for name in providers:
        wanted = "cross_entropy" if name in CROSS_ENTROPY else "policy"
        try:
            _check_size(name, case)
            got = run_provider(name, inputs)[-1]
            if wanted not in references:
                references[wanted] = run_reference(name, inputs)[-1]
            results[name] = {"gradient_error": f"{_distance(got, references[wanted]):.1e}"}
            del got
            steps[name] = functools.partial(run_provider, name, inputs)  # compiled and warm by now
        except Exception as error:
            results[name] = {"note": f"not measured: {first_line(error)}"}
    references.clear()
    steps[PRODUCTS] = products(inputs)
    times = interleaved(steps, repeats, device=case.device)
    roofline = statistics.median(times.pop(PRODUCTS).wall)
    for name, found in times.items():
        share = roofline / found.quantile(0.5)
        results[name] |= {"roofline_s": f"{roofline:.5g}", "roofline_fraction": f"{share:.3f}"}
        results[name] |= time_columns(found, times.get("ours"))
    return results


def products(inputs: HeadInputs) -> Callable[[], None]:
    """The matrix products that no implementation can do without: of the trained rows, results allocated before."""
    weight = inputs.weight.detach()
    rows = inputs.hidden.detach()[inputs.loss_mask]
    logits = rows.new_empty(len(rows), len(weight))
    grad_rows, grad_weight = torch.empty_like(rows), torch.empty_like(weight)

    def run() -> None:
        torch.mm(rows, weight.T, out=logits)
        if inputs.case.mode == "forward_backward":
            torch.mm(logits, weight, out=grad_rows)
            torch.mm(logits.T, rows, out=grad_weight)

    run()
    return run


def memory_of(case: HeadCase, name: str) -> Row:
    """Peak memory of one provider in this process."""
    try:
        _check_size(name, case)
        inputs = make_inputs(case)
        step = functools.partial(run_provider, name, inputs)
        peak = peak_memory(step, device=case.device, clear=inputs.clear_gradients)
        return {"peak_mib_over_base": round(peak, 1)}
    except Exception as error:
        return {"note": f"memory not measured: {first_line(error)}"}


def _common(case: HeadCase, args: argparse.Namespace, provider: str) -> Row:
    return {
        **circumstances(case.device, args.threads),
        **case.columns,
        "provider": provider,
        "versions": versions(),
    }


def _check_size(name: str, case: HeadCase) -> None:
    need = ALL_LOGITS.get(name, 0) * case.logits_bytes
    if case.device == "cuda":
        free = torch.cuda.mem_get_info()[0]
    else:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    if need > 0.8 * free:
        raise CannotRun(f"needs about {need / 1e9:.0f} GB, {free / 1e9:.0f} GB are free")


def _distance(value: Tensor, reference: Tensor) -> float:
    """Relative, in the Euclidean norm."""
    return float((value.float() - reference.float()).norm() / reference.float().norm())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument("--vocab", type=int, default=49152)
    parser.add_argument("--fraction", type=float, default=0.2)
    parser.add_argument("--mode", choices=("forward_backward", "scoring"), default="forward_backward")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--providers", default=",".join(PROVIDERS))
    parser.add_argument("--no-speed", dest="speed", action="store_false")
    parser.add_argument("--no-memory", dest="memory", action="store_false")
    parser.add_argument("--targets", action="store_true", help="the three cases that have targets")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--plot", action="store_true")
    parser.add_argument("--memory-of", help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.providers = args.providers.split(",")
    if unknown := set(args.providers) - set(PROVIDERS):
        parser.error(f"--providers: {min(unknown)} is unknown, use some of {', '.join(PROVIDERS)}")
    return args


def main() -> None:
    args = _arguments()
    if args.memory_of:
        print_memory(args.memory_of, HeadCase, memory_of)
        return
    torch.set_num_threads(args.threads)
    sizes = (args.tokens, args.hidden, args.vocab, args.fraction)
    one = {HeadCase(*sizes, args.mode, args.dtype, args.device): args.providers}
    path = BASELINES / f"head_{args.device}.csv"
    rows = []
    for case, providers in (TARGETS if args.targets else one).items():
        print(case, flush=True)
        for row in bench_case(case, [name for name in providers if name in args.providers], args):
            rows.append(row)
            shown = ("p50_s", "ratio_to_ours", "cpu_ratio_to_ours", "roofline_fraction", "peak_mib_over_base", "note")
            text = "  ".join(f"{name}={row[name]}" for name in shown if row.get(name))
            print(f"  {row['provider']:<18} {text}", flush=True)
            if args.record:
                append_row(path, COLUMNS, row)
    print("\n".join(verdicts(rows)))
    if args.plot:
        from plot_head import plot

        print(f"wrote {plot(path)}")


if __name__ == "__main__":
    main()
