"""Which Tritons the tests run with: the installed one, and those in the folders that SWE_RL_TRITON_PATHS lists.

A folder is made by `pip install --target FOLDER --no-deps triton==VERSION`; with Triton 3.6 add numpy==2.3.5, as its
interpreter converts arrays of one element to numbers in a way that numpy 2.4 refuses. Each suite is a process of its
own: whether kernels are interpreted or compiled is settled when they are decorated, the version when it is imported.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_parts import require

from benchmarks.aot_head import Report

ROOT = Path(__file__).parents[3]
INSTALLED = "installed"
FOLDERS = [folder for folder in os.environ.get("SWE_RL_TRITON_PATHS", "").split(os.pathsep) if folder]
TRITONS = [INSTALLED, *FOLDERS]
# For suites of minutes: the older ones take their turn in .ci/nightly.
OLDER_BY_NIGHT = [INSTALLED, *(pytest.param(folder, marks=pytest.mark.nightly) for folder in FOLDERS)]


def run_with_triton(triton: str, arguments: list[str], **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs this Python with `arguments` in the checkout, so that `import triton` finds the one in `triton`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    before = [] if triton == INSTALLED else [triton]
    paths = [*before, str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env={**environment, **variables}, capture_output=True, text=True
    )


def interpret(cases: str, triton: str, *selection: str) -> None:
    """Runs a file of cases beside this one in Triton's interpreter; all of them must pass, none be skipped."""
    require(triton != INSTALLED or importlib.util.find_spec("triton") is not None, "package triton")
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", f"tests/unit/ops/{cases}", *selection]
    done = run_with_triton(triton, command, TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert "skipped" not in done.stdout


def compiled(script: str, triton: str, folder: Path, *options: str) -> list[Report]:
    """What benchmarks/`script` says of every kernel it compiles; `folder` is Triton's cache."""
    require(triton != INSTALLED or importlib.util.find_spec("triton") is not None, "package triton")
    done = run_with_triton(triton, [f"benchmarks/{script}", "--json", *options], TRITON_CACHE_DIR=str(folder))
    assert done.returncode == 0, done.stderr[-4000:]
    return [Report(**json.loads(line)) for line in done.stdout.splitlines()]
