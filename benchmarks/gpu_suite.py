"""Correctness and speed of the kernels on one GPU, unattended.

    python benchmarks/gpu_suite.py [--minutes 15] [--sections correctness,head_speed,...] [--out FILE]

Each section runs in a process of its own for at most 8 minutes, so that a hang or an illegal access costs one section;
each measurement is appended to the CSV file at once (default: baselines/gpu.csv). Columns `limit` and `verdict` compare
it with what is published or promised. Without a CUDA device every line says 'not measured' and the exit code is 0;
with one it is 1 if anything failed. Needs torch, triton, numpy and pytest, and the checkout on PYTHONPATH.
"""

from __future__ import annotations

import argparse
import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import gpu_checks
import torch
from bench_head import products
from gpu_attention import attention_section
from gpu_context import context_section
from gpu_train import train_section
from gpu_weight_delta import weight_delta_section
from head_cases import HeadCase, HeadInputs, make_inputs
from head_providers import NOTES, PROVIDERS, SCORING, first_line, run_provider, versions
from measure import interleaved, peak_memory
from recording import append_row
from rope_suite import rope_section

ROOT = Path(__file__).resolve().parent.parent
BASELINE = Path(__file__).resolve().parent / "baselines" / "gpu.csv"
SECTION_SECONDS = 8 * 60
MIN_SECONDS = 20  # a section with less time left is not started
GRACE_SECONDS = 20  # for the measurement that runs when the time is over
REPEATS = 15
HEAD_LIMIT_MS = 48.0  # forward + backward, 8192 x 4096 x 151936 bf16, H100 or H200 (three products alone: 42 ms)
SPEED_SHAPE = (8192, 4096, 151936)  # tokens, hidden, vocabulary
COLUMNS = ("date", "section", "name", "value", "unit", "limit", "verdict", "detail", "note", "gpu", "versions")


class Suite:
    """Where sections put their results. Without a device it says what would have been measured, and runs nothing."""

    def __init__(self, section: str, path: Path | None, seconds: float, gpu: str) -> None:
        self.section, self.path, self.gpu = section, path, gpu
        self.deadline = time.monotonic() + seconds
        self.failed = False

    @property
    def left(self) -> float:
        """Seconds, 0 when the time is over."""
        return max(self.deadline - time.monotonic(), 0.0)

    def measure(
        self,
        name: str,
        unit: str,
        step: Callable[[], float],
        *,
        limit: float | None = None,
        detail: str = "",
        required: bool = True,
    ) -> bool:
        """Records step(), which passes when it is at most `limit`, or why it could not be had; whether it ran.

        What is not required may fail to run without making the suite fail: other projects.
        """
        if reason := self.obstacle():
            self.skip(name, unit, reason, limit=limit)
            return False
        try:
            value = step()
        except Exception as error:
            self.failed |= required
            verdict = "failed" if required else "not measured"
            self._write(name, unit, limit=limit, verdict=verdict, note=first_line(error))
            return False
        self.record(name, unit, value, limit=limit, detail=detail)
        return True

    def obstacle(self) -> str:
        """Why nothing can be measured now; empty if it can."""
        if not self.gpu:
            return "no CUDA device"
        return "" if self.left else "out of time"

    def record(self, name: str, unit: str, value: float, *, limit: float | None = None, detail: str = "") -> None:
        verdict = "measured" if limit is None else ("passed" if value <= limit else "failed")
        self.failed |= verdict == "failed"
        self._write(name, unit, value=f"{value:.6g}", limit=limit, verdict=verdict, detail=detail)

    def skip(self, name: str, unit: str, reason: str, *, limit: float | None = None) -> None:
        self._write(name, unit, limit=limit, verdict="not measured", note=reason)

    def _write(self, name: str, unit: str, *, limit: float | None, **values: str) -> None:
        row = {
            **dict.fromkeys(COLUMNS, ""),
            "date": time.strftime("%Y-%m-%d"),
            "section": self.section,
            "name": name,
            "unit": unit,
            "limit": "" if limit is None else f"{limit:g}",
            "gpu": self.gpu,
            "versions": versions(),
            **values,
        }
        if self.path is not None:
            append_row(self.path, COLUMNS, row)
        value = f"{row['value']} {unit}" if row["value"] else ""
        bound = f"(limit {row['limit']})" if row["limit"] else ""
        shown = " ".join(text for text in (value, bound, row["detail"], row["note"]) if text)
        print(f"{row['verdict']:<13}{self.section:<12} {name:<44} {shown}", flush=True)


def correctness(suite: Suite) -> None:
    """Against fp64 on the device, bitwise repeats, then the tests in tests/gpu."""
    for name, limit, check in gpu_checks.CHECKS:
        suite.measure(name, "", check, limit=limit)
    for file in sorted((ROOT / "tests" / "gpu").glob("test_*.py")):
        suite.measure(f"pytest {file.name}", "exit code", functools.partial(_pytest, file, suite), limit=0)


def _pytest(file: Path, suite: Suite) -> float:
    """Without the repository's configuration and conftest.py, which need more packages than a bare machine has."""
    options = ["-q", "--noconftest", "-c", os.devnull, f"--rootdir={ROOT}", "-p", "no:cacheprovider"]
    path = os.pathsep.join(str(folder) for folder in (ROOT, ROOT / "tests"))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (path, os.environ.get("PYTHONPATH"))))}
    command = [sys.executable, "-m", "pytest", *options, str(file)]
    return float(subprocess.run(command, env=environment, timeout=suite.left, check=False).returncode)


def head_speed(suite: Suite) -> None:
    """Forward and backward of the training head at the published shape."""
    for fraction in (1.0, 0.2):
        _speed(suite, HeadCase(*SPEED_SHAPE, fraction, "forward_backward", "bfloat16", "cuda"), tuple(PROVIDERS))


def scoring(suite: Suite) -> None:
    """Log-probabilities without gradients."""
    for fraction in (1.0, 0.2):
        _speed(suite, HeadCase(*SPEED_SHAPE, fraction, "scoring", "bfloat16", "cuda"), SCORING)


def _speed(suite: Suite, case: HeadCase, providers: tuple[str, ...]) -> None:
    """Memory of each provider, then times of all in alternation; rows come as soon as a number is there."""
    label = f"f={case.trained_fraction:g}"
    inputs = None if suite.obstacle() else make_inputs(case)
    steps = {}
    for name in providers:
        options = {"required": name == "ours", "detail": NOTES.get(name, "")}
        if suite.measure(f"{label} {name} memory", "MiB over base", functools.partial(_peak, name, inputs), **options):
            steps[name] = functools.partial(run_provider, name, inputs)
    if reason := suite.obstacle() or ("" if "ours" in steps else "ours did not run"):
        for name in (*providers, "products"):
            suite.skip(f"{label} {name} time", "ms", reason, limit=_time_limit(name, case))
        return
    times = interleaved({**steps, "products": products(inputs)}, REPEATS, device=case.device)
    roofline = times["products"].quantile(0.5)
    for name, found in times.items():
        p20, p50, p80 = (1000 * found.quantile(share) for share in (0.2, 0.5, 0.8))
        ratio = found.median_ratio_to(times["ours"])
        detail = f"p20={p20:.2f} p80={p80:.2f} roofline={1000 * roofline / p50:.3f} ratio_to_ours={ratio:.2f}"
        suite.record(f"{label} {name} time", "ms", p50, limit=_time_limit(name, case), detail=detail)


def _peak(name: str, inputs: HeadInputs) -> float:
    try:
        step = functools.partial(run_provider, name, inputs)
        return peak_memory(step, device=inputs.case.device, clear=inputs.clear_gradients)
    finally:
        inputs.clear_gradients()


def _time_limit(name: str, case: HeadCase) -> float | None:
    published = case.mode == "forward_backward" and case.trained_fraction == 1.0
    return HEAD_LIMIT_MS if name == "ours" and published else None


SECTIONS: dict[str, Callable[[Suite], None]] = {
    "correctness": correctness,
    "head_speed": head_speed,
    "scoring": scoring,
    "attention": attention_section,
    "context": context_section,
    "weight_delta": weight_delta_section,
    "rope": rope_section,
    "train": train_section,
}


def run_section(name: str, path: Path | None, seconds: float) -> int:
    """In this process. Exit code 1 if anything failed."""
    suite = Suite(name, path, seconds, _gpu_name())
    SECTIONS[name](suite)
    return int(suite.failed)


def run_sections(names: list[str], path: Path, minutes: float) -> int:
    """Each in a child process, within the time that is left. Exit code 1 if anything failed."""
    end = time.monotonic() + 60 * minutes
    failed = False
    for name in names:
        seconds = min(end - time.monotonic(), SECTION_SECONDS)
        suite = Suite(name, path, seconds, _gpu_name())
        if seconds < MIN_SECONDS:
            suite.skip("whole section", "", "out of time")
            continue
        command = [sys.executable, __file__, "--child", name, "--seconds", f"{seconds:.0f}", "--out", str(path)]
        try:
            code = subprocess.run(command, timeout=seconds + GRACE_SECONDS, check=False).returncode
            reason = f"ended with exit code {code}" if code not in (0, 1) else ""
        except subprocess.TimeoutExpired:
            code, reason = 1, f"did not end within {seconds:.0f} s"
        if reason:
            suite.record("section completed", "failures", 1, limit=0, detail=reason)
        failed |= code != 0
    return int(failed)


def _gpu_name() -> str:
    return torch.cuda.get_device_name() if torch.cuda.is_available() else ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=15)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--out", type=Path, help=f"default: {BASELINE.relative_to(ROOT)}; without a GPU none")
    parser.add_argument("--child", choices=list(SECTIONS), help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECTION_SECONDS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return run_section(args.child, args.out, args.seconds)
    names = args.sections.split(",")
    if unknown := set(names) - set(SECTIONS):
        parser.error(f"--sections: {min(unknown)} is unknown, use some of {', '.join(SECTIONS)}")
    if not _gpu_name():
        return max(run_section(name, args.out, SECTION_SECONDS) for name in names)
    return run_sections(names, args.out or BASELINE, args.minutes)


if __name__ == "__main__":
    sys.exit(main())
