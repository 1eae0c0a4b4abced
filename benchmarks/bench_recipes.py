"""GRPO++ against GRPO, each ingredient off, and rejection fine-tuning before RL against RL alone, on the nano policy.

    python benchmarks/bench_recipes.py OUT --init-weights RUN/phases/rft [--study ingredients]
    python benchmarks/bench_recipes.py OUT --init-weights RUN/phases/warm_start --study rft
    python benchmarks/bench_recipes.py OUT --table-only --write benchmarks/baselines/recipes_ingredients.csv

Every arm starts from the same weights and trains on the same tasks with the same seeds; its rollouts are its own. One
process at a time, seeds outermost, so that what is there at any moment is paired. Stop it whenever you like: repeated
with the same OUT and sizes it goes on where it was, runs that are done are not run again. Budget: --seeds, --steps,
--tasks-per-step, --heldout, --arms. Writes OUT/<study>.csv (and --write), and curves as PNG where matplotlib is there.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import statistics
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swe_rl.cli.job_tree import run_job
from swe_rl.evaluation import paired_difference
from swe_rl.metrics import METRICS_FILE, read_metrics

GROUP_SIZE = 8
OPTIMIZER_STEPS = 4  # per iteration: below that neither clip nor old policy act
RFT_ROLLOUTS_PER_TASK = 4
FIELDS = ("study", "arm", "seeds", "start", "start_stderr", "success", "stderr", "gain", "gain_stderr", "gain_low")
FIELDS += ("gain_high", "verdict", "last_rollout_success", "minutes")


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    name: str
    overrides: tuple[str, ...] = ()
    rft: bool = False  # a phase of rejection fine-tuning before RL, paid for with iterations of RL


INGREDIENTS = (  # the first is what the others are compared with
    Arm(name="grpo_pp", overrides=("algo=grpo_pp",)),
    Arm(name="grpo", overrides=("algo=grpo",)),
    Arm(name="no_clip_high", overrides=("algo=grpo_pp", "algo.clip_high=0.2")),
    Arm(name="with_std", overrides=("algo=grpo_pp", "algo.advantage=group_std")),
    Arm(name="own_reward_in_baseline", overrides=("algo=grpo_pp", "algo.advantage=group_mean")),
    Arm(name="mean_over_own_length", overrides=("algo=grpo_pp", "algo.aggregation=seq_mean")),
    Arm(name="over_long_kept", overrides=("algo=grpo_pp", "algo.stop_preset=keep_all")),
    Arm(name="no_negatives", overrides=("algo=grpo_pp", "algo.negative_scale=0")),
    Arm(name="with_kl", overrides=("algo=grpo_pp", "algo.kl_coeff=0.01")),
    Arm(name="with_entropy_bonus", overrides=("algo=grpo_pp", "algo.entropy_coeff=0.001")),
)
RFT = (Arm(name="rl_alone"), Arm(name="rft_then_rl", rft=True))
STUDIES = {"ingredients": INGREDIENTS, "rft": RFT}


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    steps: int  # iterations of RL
    tasks_per_step: int
    heldout: int  # tasks of each evaluation
    learning_rate: float
    init_weights: str
    extra: tuple[str, ...] = ()  # overrides of every run


@dataclass(slots=True)
class Outcome:
    """What one run left."""

    start: dict[str, list[float]]  # attempts by held-out task, before
    end: dict[str, list[float]]  # after
    curve: list[float] = field(default_factory=list)  # success of the rollouts of each iteration
    minutes: float = 0.0


def overrides(arm: Arm, seed: int, budget: Budget) -> list[str]:
    """Of `swe-rl train` for one run. RFT before RL takes as many rollouts as a whole number of RL iterations."""
    minibatch = max(1, budget.tasks_per_step * GROUP_SIZE // OPTIMIZER_STEPS)
    rft_iterations = max(1, budget.steps // 3) if arm.rft else 0
    rft_tasks = rft_iterations * budget.tasks_per_step * GROUP_SIZE // RFT_ROLLOUTS_PER_TASK
    rft = (
        f"{{name: rft, data: passed_rollouts, num_tasks: {rft_tasks}, samples_per_task: {RFT_ROLLOUTS_PER_TASK}, "
        "epochs: 2, batch_size: 16, evaluate: false, "
        "overrides: {trainer: {learning_rate: 3.0e-4}, algo: {aggregation: token_mean}}}"
    )
    rl = (
        f"{{name: rl, data: rollouts, steps: {budget.steps - rft_iterations}, tasks_per_step: {budget.tasks_per_step}, "
        f"minibatch_size: {minibatch}, overrides: {{trainer: {{learning_rate: {budget.learning_rate}}}}}}}"
    )
    chain = [rft, rl] if arm.rft else [rl]
    return [
        "experiment=recipe_comparison",
        f"init_weights={budget.init_weights}",
        f"seed={seed}",
        f"eval.splits.heldout={budget.heldout}",
        f"eval.base_tasks={budget.heldout}",
        f"phases=[{','.join(chain)}]",
        *arm.overrides,
        *budget.extra,
    ]


def run_arm(run_dir: Path, arm: Arm, seed: int, budget: Budget) -> int:
    """Runs or continues one run; its exit code."""
    resume = ["resume=true"] if (run_dir / "config.yaml").exists() else []
    words = [*overrides(arm, seed, budget), f"run_dir={run_dir}", *resume]
    return run_job([sys.executable, "-m", "swe_rl", "train", *words])


def read_outcome(run_dir: Path) -> Outcome | None:
    """None when the run has not ended."""
    results = run_dir / "results.json"
    rows = json.loads(results.read_text()) if results.exists() else []
    found = {row["phase"]: row["by_task"] for row in rows if row["split"] == "heldout" and row["mode"] == "sampled"}
    if "rl" not in found:
        return None
    records = [r for r in read_metrics(run_dir / METRICS_FILE) if r.phase == "rl" and "rollout/success" in r.values]
    curve = [record.values["rollout/success"] for record in records]
    files = [path.stat().st_mtime for path in (run_dir / "config.yaml", results)]
    return Outcome(start=found["base"], end=found["rl"], curve=curve, minutes=(files[1] - files[0]) / 60)


def read_study(out: Path, arms: Sequence[Arm]) -> dict[str, dict[int, Outcome]]:
    """arm -> seed -> outcome, of the runs that have ended."""
    found: dict[str, dict[int, Outcome]] = {}
    for arm in arms:
        for path in sorted((out / arm.name).glob("seed*")):
            outcome = read_outcome(path)
            if outcome is not None:
                found.setdefault(arm.name, {})[int(path.name.removeprefix("seed"))] = outcome
    return found


def table(study: str, outcomes: Mapping[str, Mapping[int, Outcome]]) -> list[dict[str, Any]]:
    """One row per arm. Errors of success are over seeds; differences to the first arm are paired by seed and task,
    their interval is a bootstrap over tasks, their error comes from the seeds."""
    reference = next(iter(outcomes))
    rows = []
    for name, by_seed in outcomes.items():
        start, start_stderr = _mean([_rate(item.start) for item in by_seed.values()])
        success, stderr = _mean([_rate(item.end) for item in by_seed.values()])
        row: dict[str, Any] = {"study": study, "arm": name, "seeds": " ".join(map(str, sorted(by_seed)))}
        row |= {"start": start, "start_stderr": start_stderr, "success": success, "stderr": stderr}
        row["last_rollout_success"] = statistics.fmean(_last(item.curve) for item in by_seed.values())
        row["minutes"] = statistics.fmean(item.minutes for item in by_seed.values())
        common = sorted(set(by_seed) & set(outcomes[reference]))
        if name != reference and common:
            row |= _difference(by_seed, outcomes[reference], common)
        rows.append(row)
    return rows


def _difference(mine: Mapping[int, Outcome], other: Mapping[int, Outcome], seeds: Sequence[int]) -> dict[str, Any]:
    after = {f"{seed}/{task}": values for seed in seeds for task, values in mine[seed].end.items()}
    before = {f"{seed}/{task}": values for seed in seeds for task, values in other[seed].end.items()}
    found = paired_difference(after, before)
    _, stderr = _mean([_rate(mine[seed].end) - _rate(other[seed].end) for seed in seeds])
    verdict = "better" if found.low > 0 else "worse" if found.high < 0 else "no significant difference"
    return {
        "gain": found.mean,
        "gain_stderr": stderr,
        "gain_low": found.low,
        "gain_high": found.high,
        "verdict": verdict,
    }


def _rate(by_task: Mapping[str, Sequence[float]]) -> float:
    return statistics.fmean(value for values in by_task.values() for value in values)


def _mean(values: Sequence[float]) -> tuple[float, float]:
    """(mean, standard error over the values; nan for one)."""
    stderr = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return statistics.fmean(values), stderr


def _last(curve: Sequence[float]) -> float:
    """Success over the last third of the iterations."""
    return statistics.fmean(curve[-max(1, len(curve) // 3) :]) if curve else math.nan


def print_table(rows: Sequence[Mapping[str, Any]]) -> None:
    """In percent, one line per arm."""
    print(f"{'arm':24} {'start':>12} {'end':>12} {'rollouts':>9}  difference to the first, 95 % interval")
    for row in rows:
        start, end = (
            f"{100 * row[k]:5.1f} ± {100 * row[e]:.1f}" for k, e in (("start", "start_stderr"), ("success", "stderr"))
        )
        gain = ""
        if "gain" in row:
            low, high = 100 * row["gain_low"], 100 * row["gain_high"]
            gain = (
                f"{100 * row['gain']:+.1f} ± {100 * row['gain_stderr']:.1f} [{low:+.1f}, {high:+.1f}] {row['verdict']}"
            )
        print(f"{row['arm']:24} {start:>12} {end:>12} {100 * row['last_rollout_success']:9.1f}  {gain}")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """The rows of `table`, numbers to four digits."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, FIELDS)
        writer.writeheader()
        for row in rows:
            writer.writerow({key: round(v, 4) if isinstance(v, float) else v for key, v in row.items()})


def plot(path: Path, outcomes: Mapping[str, Mapping[int, Outcome]]) -> None:
    """Success of the rollouts by iteration, mean over seeds with their range; beside it success on held-out tasks."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.5), width_ratios=(2, 1))
    for place, (name, by_seed) in enumerate(outcomes.items()):
        curves = [_smooth(item.curve) for item in by_seed.values()]
        length = min(map(len, curves))
        points = [[100 * curve[i] for curve in curves] for i in range(length)]
        (line,) = left.plot(range(1, length + 1), [statistics.fmean(p) for p in points], label=name)
        left.fill_between(
            range(1, length + 1), [min(p) for p in points], [max(p) for p in points], alpha=0.08, color=line.get_color()
        )
        mean, stderr = _mean([_rate(item.end) for item in by_seed.values()])
        right.errorbar(
            100 * mean, place, xerr=0 if math.isnan(stderr) else 100 * stderr, fmt="o", color=line.get_color()
        )
    left.set(xlabel="iteration", ylabel="rollouts that pass, %, mean of three iterations")
    left.legend(fontsize=7)
    right.set(xlabel="held-out at the end, %, ± standard error")
    right.set_yticks(range(len(outcomes)), list(outcomes), fontsize=7)
    right.invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, dpi=90)


def _smooth(curve: Sequence[float], width: int = 3) -> list[float]:
    return [statistics.fmean(curve[max(0, i - width + 1) : i + 1]) for i in range(len(curve))]


def report(out: Path, study: str, write: Path | None) -> None:
    """Table, CSV file and curves of what is there."""
    outcomes = read_study(out / study, STUDIES[study])
    if not outcomes:
        print("no run has ended yet")
        return
    rows = table(study, outcomes)
    print_table(rows)
    targets = [out / f"{study}.csv", *([write] if write else [])]
    for target in targets:
        write_csv(target, rows)
        try:
            plot(target.with_suffix(".png"), outcomes)
        except ImportError:
            print(f"{target.with_suffix('.png')} is not drawn: pip install matplotlib", file=sys.stderr)


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="directory of the runs")
    parser.add_argument("--study", choices=STUDIES, default="ingredients")
    parser.add_argument("--init-weights", default="", help="what every run starts from: RUN/phases/NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--arms", nargs="+", default=[], help="only these (default: all)")
    parser.add_argument("--steps", type=int, default=12, help="iterations of sampling and training (default 12)")
    parser.add_argument("--tasks-per-step", type=int, default=12, help="groups of 8 per iteration (default 12)")
    parser.add_argument("--heldout", type=int, default=128, help="tasks of an evaluation (default 128)")
    parser.add_argument("--learning-rate", type=float, default=3e-4)
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="overrides of every run")
    parser.add_argument("--table-only", action="store_true", help="run nothing")
    parser.add_argument("--write", type=Path, help="CSV to write beside OUT/<study>.csv, with its PNG")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs what is missing, seed by seed; 130 after an interrupt, 1 if a run failed."""
    args = parse(argv)
    arms = [arm for arm in STUDIES[args.study] if not args.arms or arm.name in args.arms]
    budget = Budget(
        steps=args.steps,
        tasks_per_step=args.tasks_per_step,
        heldout=args.heldout,
        learning_rate=args.learning_rate,
        init_weights=str(Path(args.init_weights).absolute()) if args.init_weights else "",
        extra=tuple(args.set),
    )
    failed = 0
    for seed in [] if args.table_only else args.seeds:
        for arm in arms:
            run_dir = args.out / args.study / arm.name / f"seed{seed}"
            if read_outcome(run_dir) is not None:
                continue
            code = run_arm(run_dir, arm, seed, budget)
            if code == 130:
                return code
            failed += code != 0
        report(args.out, args.study, None)
    report(args.out, args.study, args.write)
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
