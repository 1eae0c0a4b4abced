"""Which layouts of a recipe fit on a cluster, and which of them is the fastest by the arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from swe_rl.config import EngineConfig, TrainConfig
from swe_rl.errors import ConfigError
from swe_rl.training.planning import memory_megatron, memory_torch
from swe_rl.training.planning.engine import (
    ENGINE_OVERHEAD,
    Engine,
    cache_tokens,
    kv_bytes,
    rollout_seconds,
    weight_bytes,
)
from swe_rl.training.planning.hardware import Device
from swe_rl.training.planning.memory_megatron import Work
from swe_rl.training.planning.parallel_layouts import ParallelLayout, megatron_layouts, problem, torch_layouts
from swe_rl.training.planning.parts import Part, total
from swe_rl.training.planning.shapes import ModelShape
from swe_rl.training.planning.times import scoring_seconds, sync_seconds, training_seconds, utilization
from swe_rl.training.planning.workload import Assumptions, PhaseWork

GIB, HEADROOM = 1 << 30, 0.05
MOST_NODES = 64  # that are tried for a recipe that does not fit
RESIDENT = ("parameters", "gradients", "optimizer", "reference")  # stay while the trainer waits


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """The cluster: nodes of equal GPUs. On a CPU one process, num_nodes = gpus_per_node = 1."""

    device: Device
    num_nodes: int
    gpus_per_node: int

    @property
    def num_gpus(self) -> int:
        return self.num_nodes * self.gpus_per_node

    @property
    def usable(self) -> int:
        """Bytes of one device that a plan may fill: the last of them are never in one piece."""
        return int(self.device.memory * (1 - HEADROOM))

    @property
    def cpu(self) -> bool:
        return "CPU" in self.device.name


@dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """GPUs of the trainer and of engines. Colocated engines use the trainer's GPUs while it waits."""

    trainer_gpus: int
    engine_gpus: int
    colocated: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PhaseTimes:
    """Seconds of one iteration of a phase by stage, and of one optimizer step by cause."""

    name: str
    stages: dict[str, float]  # rollout, scoring, training, sync
    training: dict[str, float]
    iteration: float  # stages one after the other, or the slower side where they overlap
    mfu: float  # of the training stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    layout: ParallelLayout
    split: Split
    parts: list[Part]  # of the fullest rank in the phase that needs most
    host_bytes: int
    reason: str = ""  # why it is no option; "" when it is
    missing_bytes: int = 0  # of device memory
    engine: Engine | None = None
    times: list[PhaseTimes] = field(default_factory=list)
    seconds: float = 0.0  # of the whole recipe

    @property
    def num_bytes(self) -> int:
        return total(self.parts)


class Planner:
    """Judges layouts of one recipe on one cluster."""

    def __init__(
        self, cfg: TrainConfig, shape: ModelShape, site: Site, work: Sequence[PhaseWork], assumed: Assumptions
    ) -> None:
        self.cfg, self.shape, self.site, self.work, self.assumed = cfg, shape, site, list(work), assumed

    def splits(self, engine_nodes: int | None = None) -> list[Split]:
        """Ways to divide the GPUs; shared ones too where the engine would leave none to the trainer.

        ConfigError for engine_nodes that the cluster does not have, and for an engine that is larger than the cluster.
        """
        site, tensor = self.site, self.cfg.engine.tensor_parallel
        if not any(phase.episodes for phase in self.work) or self.cfg.engine.backend == "embedded":
            return [Split(trainer_gpus=site.num_gpus, engine_gpus=site.num_gpus, colocated=True)]
        if tensor > site.num_gpus:
            raise ConfigError(
                f"engine.tensor_parallel={tensor} needs more than the {site.num_gpus} GPUs of the cluster"
            )
        shared = Split(trainer_gpus=site.num_gpus, engine_gpus=site.num_gpus // tensor * tensor, colocated=True)
        if self.cfg.engine.layout == "colocated" or engine_nodes == 0:
            return [shared]
        unit = tensor if site.num_nodes == 1 else max(tensor, site.gpus_per_node)
        counts = range(unit, site.num_gpus, unit)
        if engine_nodes is not None:
            counts = range(engine_nodes * site.gpus_per_node, engine_nodes * site.gpus_per_node + 1)
        found = [Split(trainer_gpus=site.num_gpus - n, engine_gpus=n, colocated=False) for n in counts]
        if any(split.trainer_gpus <= 0 or split.engine_gpus < tensor for split in found):
            raise ConfigError(
                f"--engine-nodes {engine_nodes} of {site.num_nodes} leaves no GPU to the trainer, or fewer than "
                f"engine.tensor_parallel={tensor} to the engine"
            )
        return found or [shared]

    def layouts(self, split: Split) -> Iterator[ParallelLayout]:
        if self.cfg.trainer.backend == "torch":
            yield from torch_layouts(num_gpus=split.trainer_gpus)
        else:
            yield from megatron_layouts(self.shape, num_gpus=split.trainer_gpus)

    def configured(self, split: Split) -> ParallelLayout | None:
        """The layout that the recipe names; None when it does not divide the GPUs."""
        cfg = self.cfg.trainer
        recompute = "full" if cfg.activation_checkpointing else "none"
        one = cfg.tensor_parallel * cfg.context_parallel * cfg.pipeline_parallel
        if split.trainer_gpus % one:
            return None
        return ParallelLayout(
            backend=cfg.backend,
            data=split.trainer_gpus // one,
            tensor=cfg.tensor_parallel,
            context=cfg.context_parallel,
            pipeline=cfg.pipeline_parallel,
            virtual=cfg.virtual_pipeline,
            expert=cfg.expert_parallel,
            recompute=recompute,
            offload=cfg.offload,
            sharded=cfg.fsdp,
        )

    def judge(self, layout: ParallelLayout, split: Split) -> Candidate:
        """Memory, and where that fits, time."""
        if layout.backend == "megatron":
            rows = min(phase.rows_per_step for phase in self.work)
            reason = problem(layout, self.shape, gpus_per_node=self.site.gpus_per_node, rows_per_step=rows)
            if reason:
                return Candidate(layout=layout, split=split, parts=[], host_bytes=0, reason=reason)
        parts, host = max((self.memory(layout, split, phase) for phase in self.work), key=lambda found: total(found[0]))
        candidate = Candidate(layout=layout, split=split, parts=parts, host_bytes=host)
        missing = candidate.num_bytes - self.site.usable
        if missing > 0:
            reason = f"needs {candidate.num_bytes / GIB:.1f} GiB per GPU, {self.site.usable / GIB:.1f} are usable"
            return replace(candidate, reason=reason, missing_bytes=missing)
        if host > self.site.device.host_memory:
            reason = f"needs {host / GIB:.0f} GiB of host memory per GPU of {self.site.device.host_memory / GIB:.0f}"
            return replace(candidate, reason=reason)
        engine = self._engine(candidate)
        if engine is not None and (short := self._engine_problem(engine)):
            return replace(candidate, reason=short, engine=engine)
        return self._timed(replace(candidate, engine=engine))

    def memory(self, layout: ParallelLayout, split: Split, phase: PhaseWork) -> tuple[list[Part], int]:
        """Components of the fullest rank in a phase, and its bytes in host memory."""
        work = Work(
            row_tokens=phase.row_tokens,
            rows_per_rank=phase.rows_per_rank(layout.data),
            trained_share=phase.step.trained_share,
            dtype=phase.dtype,
            optimizer=phase.optimizer,
            reference=phase.reference,
            engine_sleeps=split.colocated and self.cfg.engine.backend == "vllm" and bool(phase.episodes),
        )
        if layout.backend == "megatron":
            shape = self.shape
            return memory_megatron.rank_memory(shape, layout, work), memory_megatron.host_memory(shape, layout, work)
        parts = memory_torch.rank_memory(self.shape, layout, work, cpu=self.site.cpu)
        if self.cfg.engine.backend == "embedded":
            parts.append(embedded_engine(self.shape, self.cfg.engine, max_context=self.cfg.agent.max_context_tokens))
        return parts, 0

    def _engine(self, candidate: Candidate) -> Engine | None:
        cfg, split = self.cfg.engine, candidate.split
        if not any(phase.episodes for phase in self.work):
            return None
        if cfg.backend == "embedded":
            held = embedded_engine(self.shape, cfg, max_context=self.cfg.agent.max_context_tokens).num_bytes
            replicas, tensor, memory = split.trainer_gpus, 1, held + ENGINE_OVERHEAD
        else:
            replicas, tensor = split.engine_gpus // cfg.tensor_parallel, cfg.tensor_parallel
            memory = int(cfg.gpu_memory * self.site.device.memory)
        if split.colocated and cfg.backend == "vllm":  # beside what the trainer keeps while it waits
            resident = total(part for part in candidate.parts if part.name in RESIDENT)
            memory = min(memory, self.site.usable - resident - memory_megatron.CONTEXT_BYTES)
        places = self.cfg.sandbox.concurrency * self.site.num_nodes  # a key of each node
        running = min(cfg.num_slots, -(-places // replicas))
        return Engine(replicas=replicas, tensor_parallel=tensor, memory=memory, dtype=cfg.dtype, max_running=running)

    def _engine_problem(self, engine: Engine) -> str:
        longest = max(phase.episodes.max_tokens for phase in self.work if phase.episodes is not None)
        tokens = cache_tokens(self.shape, engine)
        if tokens >= longest:
            return ""
        weights = weight_bytes(self.shape, tensor_parallel=engine.tensor_parallel, dtype=engine.dtype)
        return (
            f"the engine may have {max(engine.memory, 0) / GIB:.1f} GiB of a GPU and needs {weights / GIB:.1f} for its "
            f"weights: keys and values of {max(tokens, 0)} tokens fit, one episode has up to {longest}"
        )

    def _timed(self, candidate: Candidate) -> Candidate:
        times = [self._phase_times(candidate, phase) for phase in self.work]
        seconds = sum(time.iteration * phase.iterations for time, phase in zip(times, self.work, strict=True))
        return replace(candidate, times=times, seconds=seconds)

    def _phase_times(self, candidate: Candidate, phase: PhaseWork) -> PhaseTimes:
        layout, device, efficiency = candidate.layout, self.site.device, self.assumed.efficiency
        work = Work(
            row_tokens=phase.row_tokens,
            rows_per_rank=phase.rows_per_rank(layout.data),
            trained_share=phase.step.trained_share,
            dtype=phase.dtype,
        )
        training = training_seconds(
            self.shape, layout, work, phase.step, device, efficiency, gpus_per_node=self.site.gpus_per_node
        )
        # Ranks with fewer micro-batches than others wait: full rows are an integer number.
        uneven = phase.rows_per_rank(layout.data) * layout.data / phase.rows_per_step
        step = sum(training.values()) * uneven
        stages = {"training": step * phase.optimizer_steps}
        if phase.episodes is not None and candidate.engine is not None:
            delta = self.cfg.engine.weight_sync == "delta"
            sync = sync_seconds(self.shape, dtype=candidate.engine.dtype, delta=delta)
            score = scoring_seconds(self.shape, layout, phase.step, device, efficiency) * phase.optimizer_steps
            stages = {
                "rollout": rollout_seconds(self.shape, candidate.engine, phase.episodes, device, efficiency),
                "scoring": score * phase.scoring_passes,
                **stages,
                "sync": sync * phase.online,
            }
        rollout, rest = stages.get("rollout", 0.0), sum(v for name, v in stages.items() if name != "rollout")
        apart = phase.overlaps and not candidate.split.colocated
        return PhaseTimes(
            name=phase.name,
            stages=stages,
            training=training,
            iteration=max(rollout, rest) if apart else rollout + rest,
            mfu=utilization(self.shape, phase.step, device, gpus=layout.num_gpus, seconds=step),
        )


def embedded_engine(shape: ModelShape, cfg: EngineConfig, *, max_context: int) -> Part:
    """Its own copy of the weights, its head in fp32, and the slots' keys and values."""
    size = 2 if cfg.dtype == "bfloat16" else 4
    weights = size * shape.num_params
    length = -(-max_context // 512) * 512
    cache = kv_bytes(shape, tensor_parallel=1, dtype=cfg.dtype) * cfg.num_slots * length
    return Part("engine", weights + cache, f"weights {weights >> 20} MiB, {cfg.num_slots} slots {cache >> 20} MiB")


def search(planner: Planner, *, engine_nodes: int | None = None) -> list[Candidate]:
    """Every layout of every split, the best first: those that fit by time, then the others by what they lack."""
    found = [
        planner.judge(layout, split) for split in planner.splits(engine_nodes) for layout in planner.layouts(split)
    ]
    return sorted(found, key=_rank)


def smallest_cluster(planner: Planner) -> int:
    """How many nodes something fits on, in doublings of what there is; 0: not on MOST_NODES of them."""
    nodes = planner.site.num_nodes * 2
    while nodes <= MOST_NODES:
        site = replace(planner.site, num_nodes=nodes)
        larger = Planner(planner.cfg, planner.shape, site, planner.work, planner.assumed)
        judged = (larger.judge(layout, split) for split in larger.splits() for layout in larger.layouts(split))
        if any(not candidate.reason for candidate in judged):
            return nodes
        nodes *= 2
    return 0


def _rank(candidate: Candidate) -> tuple[bool, bool, float, float]:
    illegal = bool(candidate.reason) and not candidate.parts
    return (bool(candidate.reason), illegal, candidate.missing_bytes or candidate.seconds, candidate.num_bytes)
