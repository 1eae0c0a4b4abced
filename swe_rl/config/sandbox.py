"""The keys of the group `sandbox`."""

from __future__ import annotations

from dataclasses import dataclass

from swe_rl.config.bounds import Bounds


@dataclass(kw_only=True)
class SandboxConfig:
    backend: str = "local"  # local
    isolation: str = "namespaces"  # namespaces | none (trusted code only; grading then runs unprotected)
    image: str = ""  # of tasks that name none; empty: the programs of this machine (local), an error elsewhere
    concurrency: int = 16  # sandboxes alive at a time in this process
    command_s: float = 20.0
    memory_mib: int = 512
    pids: int = 64
    disk_mib: int = 64
    output_kib: int = 16
    lease_s: float = 600.0  # after this a sandbox ends by itself: at least agent.episode_s + command_s
    infra_retries: int = 2  # fresh sandboxes tried before a sample leaves its group


BOUNDS = Bounds(
    choices={"backend": ("local",), "isolation": ("namespaces", "none")},
    positive=("concurrency", "command_s", "memory_mib", "pids", "disk_mib", "output_kib"),
    not_negative=("infra_retries",),
)
