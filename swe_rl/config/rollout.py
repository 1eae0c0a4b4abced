"""The keys of the groups `engine` and `rollout`: how trajectories are sampled."""

from __future__ import annotations

from dataclasses import dataclass, field

from swe_rl.config.agent import AgentConfig
from swe_rl.config.bounds import Bounds
from swe_rl.config.model import ModelConfig
from swe_rl.config.trainer import BatchingConfig, TrainerConfig
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class EngineConfig:
    backend: str = "embedded"  # embedded (transformers in this process) | vllm
    dtype: str = "float32"
    num_slots: int = 32  # episodes decoded together by one replica; embedded: the decode shape is fixed to it
    prefill_chunk: int = 64  # embedded: tokens per prefill call; fixed shape
    # full: every version is sent as a whole. delta: only the bf16 values that changed, few at the learning rates of RL;
    # everything when an engine has lost a version. Both are checked tensor by tensor. delta needs dtype=bfloat16.
    weight_sync: str = "full"
    # Only for backend=vllm: the way of the weights. host: shared memory of this machine, for every layout and also
    # without GPUs | nccl: from GPU to GPU, for engines with GPUs of their own | ipc: on the GPU that trainer and engine
    # share (colocated). nccl and ipc have not run on GPUs yet; they send no deltas and no adapters.
    weight_transfer: str = "host"
    # What turns under way do during a weight update: pause (until it is done) | keep (sampling by the old weights while
    # the new ones arrive; over nccl and ipc as pause) | abort (they are asked anew, from the tokens they have;
    # embedded: they end as lost and are retried). Old keys and values are dropped.
    in_flight: str = "keep"
    # Only for backend=vllm:
    tensor_parallel: int = 1  # GPUs of one server
    gpu_memory: float = 0.9  # share of each GPU for weights, keys and values
    prefix_caching: bool = True
    cuda_graphs: bool = True
    attention: str = "auto"  # auto (vLLM's choice) | FLASH_ATTN | FLASHINFER | TRITON_ATTN
    cache_gib: float = 0.0  # for keys and values, per replica, in place of gpu_memory; on a CPU it has to be set
    # Where the replicas run; conf/cluster says which GPUs are whose:
    layout: str = "processes"  # processes (children of this one) | servers (HTTP) | ray (actors) | colocated
    replicas: int = 1  # copies of the model, each of tensor_parallel GPUs; colocated: one per training process
    urls: list[str] = field(default_factory=list)  # of servers that are there already, in place of `replicas` own ones
    max_skew: int = 8  # a session leaves its replica when that has so many requests more than the least busy one
    # A replica that gives no token for so long although it has requests is started anew: less than agent.episode_s.
    stall_s: float = 120.0
    # Mixtures of experts: the trainer takes the experts that the engine chose, where rounding would choose others.
    router_replay: bool = False
    parity_every: int = 0  # steps between two parity probes; 0: only the one when a phase of rollouts begins


@dataclass(kw_only=True)
class RolloutConfig:
    group_size: int = 8
    temperature: float = 1.0
    top_k: int = 0  # RL needs the full distribution: anything but 0, 1.0, 0.0 in these three is refused
    top_p: float = 1.0
    min_p: float = 0.0
    # Rollouts of a group that begin beyond group_size: the first group_size to finish are kept and the rest is cut. It
    # spares waiting for stragglers and favours short episodes: rollout/short_bias tells how much.
    spare_rollouts: int = 0
    max_staleness: int = 0  # iterations a rollout may lag behind; 0 is synchronous
    backend: str = "local"  # local (in this process) | ray (one process per node of a cluster)
    # Of the cluster, for backend=ray and engine.layout=ray; empty: RAY_ADDRESS, or one on this machine for this run.
    ray_address: str = ""


ENGINE_BOUNDS = Bounds(
    choices={
        "backend": ("embedded", "vllm"),
        "dtype": ("float32", "bfloat16"),
        "weight_sync": ("full", "delta"),
        "weight_transfer": ("host", "nccl", "ipc"),
        "attention": ("auto", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN"),
        "layout": ("processes", "servers", "ray", "colocated"),
        "in_flight": ("pause", "keep", "abort"),
    },
    positive=("num_slots", "prefill_chunk", "tensor_parallel", "gpu_memory", "replicas", "max_skew", "stall_s"),
    not_negative=("cache_gib", "parity_every"),
    at_most_one=("gpu_memory",),
)
ROLLOUT_BOUNDS = Bounds(
    choices={"backend": ("local", "ray")},
    positive=("group_size", "top_p"),
    not_negative=("temperature", "max_staleness", "spare_rollouts"),
)
UNCUT = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # the distribution that loss and evaluation assume


ENGINE_KEYS = {  # backend -> the keys that only it reads
    "embedded": ("prefill_chunk",),
    "vllm": (
        *("tensor_parallel", "gpu_memory", "prefix_caching", "cuda_graphs", "attention", "cache_gib", "layout"),
        *("replicas", "urls", "max_skew", "stall_s", "parity_every", "router_replay", "weight_transfer"),
    ),
}
DIRECT = ("nccl", "ipc")  # of weight_transfer: from GPU to GPU
# What a server is started with: nobody tells it to one that is there already.
SERVER_KEYS = ("num_slots", "tensor_parallel", "gpu_memory", "prefix_caching", "cuda_graphs", "attention", "cache_gib")


def validate_engine(cfg: EngineConfig) -> None:
    """No key of another backend is set, and deltas are worth it. ConfigError names the key and the cure."""
    if cfg.weight_sync == "delta" and cfg.dtype != "bfloat16":
        raise ConfigError(
            f"engine.weight_sync=delta saves nothing with engine.dtype={cfg.dtype}, where every value changes with "
            "every step: set engine.dtype=bfloat16 or engine.weight_sync=full"
        )
    default = EngineConfig()
    for backend, keys in ENGINE_KEYS.items():
        for key in keys:
            if backend != cfg.backend and getattr(cfg, key) != getattr(default, key):
                raise ConfigError(
                    f"engine.{key} does nothing for engine.backend={cfg.backend}, only for {backend}: remove it"
                )
    if cfg.urls and cfg.layout != "servers":
        raise ConfigError(f"engine.urls does nothing for engine.layout={cfg.layout}: set engine.layout=servers")
    for key in ("replicas", *SERVER_KEYS) if cfg.urls else ():
        if getattr(cfg, key) != getattr(default, key):
            raise ConfigError(
                f"engine.{key}={getattr(cfg, key)} does nothing with engine.urls, whoever starts the servers "
                "decides it: remove it (engine=vllm_urls has nothing of the kind)"
            )
    if cfg.layout == "colocated" and cfg.replicas != 1:
        raise ConfigError(
            f"engine.replicas={cfg.replicas} does nothing for engine.layout=colocated, where every training process "
            "has one: remove it, or choose another layout"
        )
    if cfg.weight_transfer in DIRECT:
        _validate_direct(cfg)
    if cfg.replicas == 1 and len(cfg.urls) < 2 and cfg.max_skew != default.max_skew:
        raise ConfigError("engine.max_skew does nothing with one replica: remove it, or raise engine.replicas")


def _validate_direct(cfg: EngineConfig) -> None:
    """Weights from GPU to GPU: whole ones, to engines that were started for it and lie where they must."""
    here = f"engine.weight_transfer={cfg.weight_transfer}"
    if cfg.urls:
        raise ConfigError(
            f"{here} needs engines that are started for it, engine.urls are there already: set it to host"
        )
    if cfg.weight_sync == "delta":
        raise ConfigError(f"{here} sends whole weights, not engine.weight_sync=delta: set it to host, or that to full")
    if (cfg.layout == "colocated") != (cfg.weight_transfer == "ipc"):
        other = "ipc" if cfg.weight_transfer == "nccl" else "nccl"
        raise ConfigError(f"{here} does not reach engines of engine.layout={cfg.layout}: set it to {other} or host")


def validate_stall(engine: EngineConfig, agent: AgentConfig) -> None:
    """A replica that hangs is found before the episodes that wait for it end. ConfigError names both keys."""
    if engine.backend == "vllm" and engine.stall_s >= agent.episode_s:
        raise ConfigError(
            f"engine.stall_s={engine.stall_s:g} must be smaller than agent.episode_s={agent.episode_s:g}, or every "
            "episode on a replica that hangs runs out of time first: lower the one or raise the other"
        )


def validate_adapters(engine: EngineConfig, model: ModelConfig) -> None:
    """Adapters are merged in the host's memory. ConfigError names both keys."""
    if engine.weight_transfer in DIRECT and model.lora_rank:
        raise ConfigError(
            f"engine.weight_transfer={engine.weight_transfer} sends whole weights, with model.lora_rank="
            f"{model.lora_rank} only adapters travel: set it to host"
        )


def validate_replay(engine: EngineConfig, batching: BatchingConfig, trainer: TrainerConfig) -> None:
    """Replayed experts reach the trainer as rows of plain documents. ConfigError names the key and the cure."""
    if not engine.router_replay:
        return
    for key, value, needed in (
        ("batching.layout", batching.layout, "sequence"),
        ("trainer.backend", trainer.backend, "torch"),
        ("trainer.context_parallel", trainer.context_parallel, 1),
        ("engine.prefix_caching", engine.prefix_caching, True),  # where vLLM keeps the experts of cached tokens
    ):
        if value != needed:
            raise ConfigError(f"engine.router_replay=true needs {key}={needed}, it is {value}")


def validate_rollout(cfg: RolloutConfig, engine: EngineConfig) -> None:
    """The distribution that is sampled is the one that the loss assumes. ConfigError names the key and the cure."""
    for key, value in UNCUT.items():
        if getattr(cfg, key) != value:
            raise ConfigError(
                f"rollout.{key}={getattr(cfg, key)} cuts the distribution that the loss assumes: "
                f"set rollout.{key}={value}"
            )
    if cfg.ray_address and cfg.backend != "ray" and engine.layout != "ray":
        raise ConfigError(
            f"rollout.ray_address={cfg.ray_address} does nothing for rollout.backend={cfg.backend}: add rollout=ray "
            "or engine.layout=ray"
        )
