"""The keys of the group `sandbox`."""

from __future__ import annotations

from dataclasses import dataclass, field

from swe_rl.config.bounds import Bounds
from swe_rl.egress_pair import egress_pair
from swe_rl.errors import ConfigError


@dataclass(kw_only=True)
class SandboxConfig:
    backend: str = "local"  # local | docker | kubernetes
    isolation: str = "namespaces"  # namespaces | none (trusted code only; grading then runs unprotected)
    image: str = ""  # of tasks that name none; empty: the programs of this machine (local), an error elsewhere
    concurrency: int = 16  # agents' sandboxes alive at a time, on each node (under torchrun: in each process)
    command_s: float = 20.0
    cpus: float = 0.0  # processors' worth of time for one sandbox, where a cgroup can keep it; 0: no bound
    memory_mib: int = 512
    pids: int = 64
    disk_mib: int = 64
    output_kib: int = 16
    lease_s: float = 600.0  # after this a sandbox ends by itself: at least agent.episode_s + command_s
    infra_retries: int = 2  # fresh sandboxes tried before a sample leaves its group
    grading_concurrency: int = 0  # sandboxes that grade at a time, beside those of agents; 0: two per core
    node_memory_mib: int = 0  # that a node's sandboxes may take together, by their limits; 0: all that it has
    # "host:port" that agents may reach, through an HTTP proxy that refuses everything else (names are no patterns
    # and lead to public addresses only: list an internal address itself); empty: no network. Grading never has any.
    egress: list[str] = field(default_factory=list)
    warm: int = 0  # sandboxes started ahead for the coming tasks, at most so many; containers gain most
    runtime: str = ""  # docker: runtime of the containers, as "runsc" (gVisor with --host-uds=open); "": the engine's
    daemon_calls: int = 6  # container backends: starts and ends in flight at the daemon


BOUNDS = Bounds(
    choices={"backend": ("local", "docker", "kubernetes"), "isolation": ("namespaces", "none")},
    positive=("daemon_calls", "concurrency", "command_s", "memory_mib", "pids", "disk_mib", "output_kib"),
    not_negative=("cpus", "infra_retries", "grading_concurrency", "node_memory_mib", "warm"),
)


def validate_sandbox(cfg: SandboxConfig) -> None:
    """No key is set that the backend does not read. ConfigError names the key and the cure."""
    if cfg.image and cfg.isolation == "none":
        raise ConfigError(f"sandbox.image={cfg.image} needs sandbox.isolation=namespaces: without, no image is entered")
    if cfg.runtime and cfg.backend != "docker":
        raise ConfigError(f"sandbox.runtime={cfg.runtime} does nothing for sandbox.backend={cfg.backend}: remove it")
    if cfg.backend == "docker" and cfg.isolation == "none":
        raise ConfigError("sandbox.isolation=none is for sandbox.backend=local: a container is isolated, so remove it")
    for entry in cfg.egress:
        egress_pair(entry)
    if cfg.egress and (cfg.isolation == "none" or cfg.backend == "kubernetes"):
        chosen = "backend=kubernetes" if cfg.backend == "kubernetes" else "isolation=none"
        raise ConfigError(f"sandbox.egress does nothing for sandbox.{chosen}: use local or docker with namespaces")
    if cfg.backend == "local" and cfg.daemon_calls != SandboxConfig.daemon_calls:
        raise ConfigError(
            f"sandbox.daemon_calls={cfg.daemon_calls} does nothing for sandbox.backend=local, which has no daemon: "
            "remove it"
        )
