"""The plan of a recipe as text for people and as a dictionary for programs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from swe_rl.training.planning.engine import Engine, cache_tokens, kv_bytes, running_episodes, weight_bytes
from swe_rl.training.planning.parallel_layouts import CONFIGURABLE, RECOMPUTE
from swe_rl.training.planning.parts import billions, total
from swe_rl.training.planning.search import Candidate, PhaseTimes, Planner, Site
from swe_rl.training.planning.shapes import ModelShape
from swe_rl.training.planning.workload import Assumptions, PhaseWork

GIB = 1 << 30
Rows = list[list[str]]


def heading(shape: ModelShape, site: Site, *, model: str) -> list[str]:
    """What is planned, on what."""
    experts = f", {shape.num_experts} experts of which {shape.experts_per_token} per token" if shape.num_experts else ""
    return [
        f"model    {model}: {billions(shape.num_params)} parameters, {shape.num_layers} layers of {shape.hidden}, "
        f"{shape.num_heads}/{shape.num_kv_heads} heads of {shape.head_dim}, vocabulary {shape.vocab}{experts}",
        f"cluster  {site.num_nodes} x {site.gpus_per_node} {site.device.name}, {site.device.memory / GIB:.1f} GiB each",
    ]


def work_lines(work: Sequence[PhaseWork]) -> list[str]:
    """One line per phase."""
    lines = []
    for phase in work:
        step = phase.step
        text = f"phase    {phase.name}: {phase.iterations} iterations"
        if phase.episodes is not None:
            text += f" of {phase.episodes.count} episodes, up to {phase.episodes.max_tokens} tokens"
        steps = f"{phase.optimizer_steps} optimizer step{'s' if phase.optimizer_steps > 1 else ''}"
        lines.append(
            f"{text}; {steps} of {step.documents} trajectories each, {step.mean_tokens} tokens on average: "
            f"{phase.rows_per_step} micro-batches of {phase.row_tokens}"
        )
    return lines


def memory_rows(candidate: Candidate, site: Site) -> Rows:
    """A table of the components of the fullest rank."""
    rows = [["memory of a GPU", "GiB", "arithmetic"]]
    rows += [[part.name, f"{part.num_bytes / GIB:.2f}", part.how] for part in candidate.parts]
    rows.append(["together", f"{candidate.num_bytes / GIB:.2f}", f"of {site.usable / GIB:.1f} GiB that may be filled"])
    if candidate.host_bytes:
        rows.append(
            ["in host memory", f"{candidate.host_bytes / GIB:.2f}", f"of {site.device.host_memory / GIB:.0f} GiB"]
        )
    return rows


def recompute_line(planner: Planner, candidate: Candidate) -> str:
    """GiB of activations in this layout under each way of recomputation."""
    modes = RECOMPUTE if candidate.layout.backend == "megatron" else CONFIGURABLE
    found = []
    for mode in modes:
        layout = replace(candidate.layout, recompute=mode)
        parts, _ = max(
            (planner.memory(layout, candidate.split, phase) for phase in planner.work), key=lambda m: total(m[0])
        )
        found.append(f"{mode} {sum(p.num_bytes for p in parts if p.name == 'activations') / GIB:.2f}")
    return f"recompute  GiB of activations: {', '.join(found)}"


def engine_line(planner: Planner, engine: Engine) -> str:
    """What the replicas hold."""
    shape = planner.shape
    weights = weight_bytes(shape, tensor_parallel=engine.tensor_parallel, dtype=engine.dtype)
    each = kv_bytes(shape, tensor_parallel=engine.tensor_parallel, dtype=engine.dtype)
    running = min(
        running_episodes(shape, engine, phase.episodes) for phase in planner.work if phase.episodes is not None
    )
    return (
        f"engine   {engine.replicas} x TP{engine.tensor_parallel}: {weights / GIB:.2f} GiB of weights per GPU, "
        f"{each} B per token: {cache_tokens(shape, engine)} tokens of keys and values, {running} episodes at a time"
    )


def time_rows(times: Sequence[PhaseTimes]) -> Rows:
    """A table of seconds by stage."""
    stages = list(dict.fromkeys(stage for time in times for stage in time.stages))
    rows = [["phase", *(f"{stage} s" for stage in stages), "iteration s", "MFU", "of the training"]]
    for time in times:
        whole = sum(time.training.values())
        causes = ", ".join(f"{name} {value / whole:.0%}" for name, value in time.training.items() if value > 0)
        cells = [f"{time.stages[stage]:.1f}" if stage in time.stages else "-" for stage in stages]
        rows.append([time.name, *cells, f"{time.iteration:.1f}", f"{time.mfu:.2f}", causes])
    return rows


def ranking_rows(candidates: Sequence[Candidate], site: Site) -> Rows:
    """A table of layouts, the best first."""
    rows = [["rank", "trainer GPUs", "engine GPUs", "layout", "GiB", *([] if site.cpu else ["hours"])]]
    for number, candidate in enumerate(candidates, 1):
        split = candidate.split
        engines = "the same" if split.colocated else str(split.engine_gpus)
        hours = [] if site.cpu else [f"{candidate.seconds / 3600:.1f}"]
        layout = candidate.layout.describe()
        rows.append([str(number), str(split.trainer_gpus), engines, layout, f"{candidate.num_bytes / GIB:.1f}", *hours])
    return rows


def command_words(planner: Planner, candidate: Candidate) -> list[str]:
    """Overrides that choose a candidate."""
    words = candidate.layout.overrides()
    if candidate.split.colocated and planner.cfg.engine.backend == "vllm" and planner.cfg.engine.layout != "colocated":
        words.append("engine.layout=colocated")
    if not candidate.split.colocated and candidate.engine is not None:
        if planner.cfg.engine.layout == "processes" and planner.site.num_nodes > 1:
            words.append("engine.layout=ray")  # child processes would be on the trainer's own nodes
        words += [
            f"engine.replicas={candidate.engine.replicas}",
            f"cluster.num_nodes={candidate.split.trainer_gpus // planner.site.gpus_per_node}",
        ]
    return words


def assumption_line(assumed: Assumptions) -> str:
    """What the configuration does not say."""
    e = assumed.efficiency
    return (
        f"assumed  trajectories of {assumed.mean_share:.0%} of the context, {assumed.sampled_share:.0%} of it sampled, "
        f"{assumed.tool_s:g} s per command; of the peaks {e.matmul:.0%} in products, {e.attention_forward:.0%} and "
        f"{e.attention_backward:.0%} in attention, {e.memory:.0%} of memory and {e.network:.0%} of network bandwidth"
    )


def as_dict(planner: Planner, candidate: Candidate) -> dict[str, Any]:
    """A candidate for programs: bytes and seconds."""
    layout = candidate.layout
    return {
        "layout": {name: getattr(layout, name) for name in layout.__slots__},
        "trainer_gpus": candidate.split.trainer_gpus,
        "engine_gpus": candidate.split.engine_gpus,
        "colocated": candidate.split.colocated,
        "memory_bytes": {part.name: part.num_bytes for part in candidate.parts},
        "total_bytes": candidate.num_bytes,
        "host_bytes": candidate.host_bytes,
        "reason": candidate.reason,
        "phases": {
            time.name: {"stages_s": time.stages, "iteration_s": time.iteration, "mfu": time.mfu}
            for time in candidate.times
        },
        "seconds": candidate.seconds,
        "overrides": command_words(planner, candidate),
    }
