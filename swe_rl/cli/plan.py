"""`swe-rl plan`: what a recipe needs on a cluster, which layouts fit, and why none does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from swe_rl.cli.hydra_entry import compose_all, parse_options
from swe_rl.cli.text_table import text_table
from swe_rl.config import TrainConfig, validate
from swe_rl.errors import ConfigError

if TYPE_CHECKING:
    from swe_rl.training.planning.search import Candidate, Planner, Site
    from swe_rl.training.planning.workload import Assumptions

GIB = 1 << 30
NUMBERS = {  # option -> (field of Assumptions or of its efficiency, what it is)
    "--mean-share": ("mean_share", "mean length of a trajectory over the longest (default 0.25)"),
    "--sampled-share": ("sampled_share", "share of a trajectory's tokens that the policy wrote (default 0.25)"),
    "--tool-s": ("tool_s", "seconds of one command of the agent (default 5)"),
    "--matmul": ("matmul", "share of the peak that matrix products reach (default 0.6)"),
}
COUNTS = {
    "--engine-nodes": "nodes for the engine, 0: it shares the trainer's GPUs (default: the fastest)",
    "--layouts": "lines of the ranking (default 8)",
}
HELP = """\
usage: swe-rl plan [options] [key=value ...]

Memory and time of a recipe on a cluster: bytes of the fullest GPU by component, seconds by stage, and the layouts that
fit, the fastest first. Exit code 2 and the reason when none fits. Times are estimates: what they assume is printed, and
can be set.

example:
  swe-rl plan experiment=deepswe cluster=h100_8x8

options:
  -h, --help         this text
  --json             one JSON object in place of the text
  --config-dir DIR   a directory with configuration groups of your own
"""


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code."""
    words, given, as_json = _split_words(argv)
    options = parse_options(words)
    if options.help:
        lines = [f"  {name:<18} {what}" for name, what in [*((n, t[1]) for n, t in NUMBERS.items()), *COUNTS.items()]]
        print(HELP + "\n".join(lines))
        return 0
    if options.multirun or options.show_config:
        raise ConfigError("swe-rl plan takes neither -m nor --cfg: swe-rl train --cfg prints the configuration")
    composed = compose_all(TrainConfig, "train", options.overrides, config_dir=options.config_dir)
    validate(composed.config)
    return _plan(composed.config, given, as_json=as_json)


def _split_words(argv: Sequence[str]) -> tuple[list[str], dict[str, float], bool]:
    """(words for Hydra, our options, --json). ConfigError for an option without a number."""
    rest: list[str] = []
    given: dict[str, float] = {}
    words, as_json = list(argv), False
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if name == "--json":
            as_json = True
        elif name in NUMBERS or name in COUNTS:
            text = value or (words.pop(0) if words else "")
            given[name] = _number(name, text, whole=name in COUNTS)
        else:
            rest.append(word)
    return rest, given, as_json


def _number(name: str, text: str, *, whole: bool) -> float:
    try:
        number = int(text) if whole else float(text)
    except ValueError:
        number = -1
    most = 1.0 if name.endswith(("share", "matmul")) else float("inf")
    least = 0.0 if name in ("--engine-nodes", "--tool-s") else 1e-9
    if not least <= number <= most:
        kind = "a whole number" if whole else f"a number above 0{' and at most 1' if most == 1 else ''}"
        raise ConfigError(f"{name} needs {kind}, got {text!r}")
    return number


def _plan(cfg: TrainConfig, given: dict[str, float], *, as_json: bool) -> int:
    from swe_rl.training.planning import report
    from swe_rl.training.planning.search import Planner, search
    from swe_rl.training.planning.shapes import model_shape
    from swe_rl.training.planning.workload import phases

    assumed = _assumptions(given)
    shape, site = model_shape(cfg.model), _site(cfg)
    planner = Planner(cfg, shape, site, phases(cfg, assumed), assumed)
    nodes = int(given["--engine-nodes"]) if "--engine-nodes" in given else None
    found = search(planner, engine_nodes=nodes)
    fitting = [candidate for candidate in found if not candidate.reason]
    best = fitting[0] if fitting else found[0]
    if as_json:
        shown = [report.as_dict(planner, candidate) for candidate in fitting[: int(given.get("--layouts", 8))]]
        print(json.dumps({"fits": bool(fitting), "best": report.as_dict(planner, best), "layouts": shown}))
    else:
        print("\n".join([*report.heading(shape, site, model=cfg.model.name), *report.work_lines(planner.work), ""]))
        _print_candidate(planner, best)
    if not fitting:
        raise ConfigError(_refusal(planner, best, count=len(found)))
    if not as_json:
        print(f"\n{len(fitting)} of {len(found)} layouts fit; the fastest:")
        print(text_table(report.ranking_rows(fitting[: int(given.get("--layouts", 8))], site)))
        _print_configured(planner, best)
        print(report.assumption_line(assumed))
        print(f"choose   {' '.join(report.command_words(planner, best))}")
    return 0


def _assumptions(given: dict[str, float]) -> Assumptions:
    from swe_rl.training.planning.hardware import Efficiency
    from swe_rl.training.planning.workload import Assumptions

    own: dict[str, Any] = {field: given[name] for name, (field, _) in NUMBERS.items() if name in given}
    efficiency = replace(Efficiency(), matmul=own.pop("matmul", Efficiency().matmul))
    return Assumptions(efficiency=efficiency, **own)


def _site(cfg: TrainConfig) -> Site:
    """The cluster of the configuration, or one process on this machine."""
    from swe_rl.training.planning.hardware import device
    from swe_rl.training.planning.search import Site

    if cfg.cluster.num_nodes and not cfg.cluster.gpu:
        raise ConfigError("cluster.gpu is not set: swe-rl plan needs it, for example cluster.gpu=h100")
    nodes, gpus = cfg.cluster.num_nodes or 1, cfg.cluster.gpus_per_node or 1
    return Site(device=device(cfg.cluster.gpu), num_nodes=nodes, gpus_per_node=gpus)


def _print_candidate(planner: Planner, best: Candidate) -> None:
    from swe_rl.training.planning import report

    split, site = best.split, planner.site
    where = "which engines share" if split.colocated else f"engines on {split.engine_gpus} others"
    print(f"layout   {best.layout.describe()}: {split.trainer_gpus} GPUs, {where}\n")
    if not best.parts:
        return
    print(text_table(report.memory_rows(best, site)))
    print(report.recompute_line(planner, best))
    if best.engine is not None and best.times and planner.cfg.engine.backend == "vllm":
        print(f"\n{report.engine_line(planner, best.engine)}\n")
    if best.times and not site.cpu:  # seconds are known of GPUs only
        print(text_table(report.time_rows(best.times)))


def _print_configured(planner: Planner, best: Candidate) -> None:
    """Whether what the recipe says now would run."""
    layout = planner.configured(best.split)
    if layout is None:
        print(f"recipe   its trainer.*_parallel do not divide {best.split.trainer_gpus} GPUs")
        return
    judged = planner.judge(layout, best.split)
    verdict = judged.reason or (f"fits, {judged.seconds / 3600:.1f} hours" if not planner.site.cpu else "fits")
    print(f"recipe   {layout.describe()} as configured: {verdict}")


def _refusal(planner: Planner, nearest: Candidate, *, count: int) -> str:
    """One line: what fails, by how much, and what would help."""
    from swe_rl.training.planning.search import smallest_cluster

    site = planner.site
    where = f"{site.num_gpus} {site.device.name}"
    text = f"none of {count} layouts fits on {where}: the nearest, {nearest.layout.describe()}, fails: {nearest.reason}"
    if nearest.missing_bytes:
        times = nearest.num_bytes / site.usable
        text += f", {nearest.missing_bytes / GIB:.1f} GiB are missing ({times:.2f} times what there is)"
    enough = 0 if site.cpu else smallest_cluster(planner)
    more = f"cluster.num_nodes={enough}" if enough else "more or larger GPUs"
    return f"{text}: take {more}, a shorter agent.max_context_tokens, or a smaller model"
