"""What this machine's Docker Engine and kernel cannot keep exactly, each in one line with its cure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swe_rl.sandbox.docker.engine import Abilities, Engine


def gaps(info: Mapping[str, Any], abilities: Abilities) -> list[tuple[str, str]]:
    """(what is not kept, cure) of what the engine says of itself (`Engine.info`) and could grant."""
    found = []
    if not info.get("MemoryLimit"):
        found.append(("memory of containers has no limit", "enable the memory controller of cgroups"))
    if not info.get("SwapLimit"):
        found.append(("swap of containers has no limit", "boot with swapaccount=1, or switch swap off"))
    if not info.get("PidsLimit"):
        found.append(("processes are counted by the supervisor only", "enable the pids controller of cgroups"))
    if not abilities.spares_supervisor:
        found.append(
            (
                "the memory killer may choose the supervisor: the sandbox is then lost",
                "grant the engine CAP_SYS_RESOURCE",
            )
        )
    if not any("seccomp" in option for option in info.get("SecurityOptions") or ()):
        found.append(("only our system call filter holds", "use an engine and a kernel with seccomp"))
    if not abilities.has_quota:
        found.append(
            (
                "a repository that an image brings has no quota: what is written is measured twice a second",
                "none is needed for tasks whose trees are layers: they lie in memory file systems of limited size",
            )
        )
    return found


def engine_gaps() -> list[tuple[str, str]]:
    """The same of the running engine. Raises SandboxError when it fails."""
    engine = Engine.shared()
    images = engine.image_ids()
    full = Abilities(spares_supervisor=True, has_quota=True)
    return gaps(engine.info(), engine.abilities(images[0]) if images else full)  # tried out with an image
