"""Package mapping, and the native parts: built with the system compiler, never required to install.

kernels/triton_ops is installed as swe_rl.kernels and conf/ as swe_rl.conf. The sandbox launcher and supervisor are
compiled into swe_rl/sandbox/bin, the CPU kernels into swe_rl/ops/bin: of the source tree if installed editable,
of the wheel otherwise. Without a compiler the installation still succeeds; the reason is then in MISSING.txt beside
them, where `swe-rl doctor` and the first attempt to use them find it (pip shows what a build prints only
with -v).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from setuptools import Distribution, find_packages, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent.resolve()


@dataclass(frozen=True)
class NativePart:
    """A folder of sources whose build.sh writes binaries into the directory that it is given."""

    sources: Path
    target: str  # inside the package
    compilers: tuple[str, ...]
    missing: str  # what cannot run without it, and the cure


NATIVE_PARTS = (
    NativePart(
        ROOT / "csrc" / "sandboxd",
        "sandbox/bin",
        ("musl-gcc", "gcc", "cc", "clang"),
        "no C compiler was found at installation: install gcc (or musl-tools) and reinstall swe-rl",
    ),
    NativePart(
        ROOT / "csrc" / "ops",
        "ops/bin",
        ("g++", "c++", "clang++"),
        "no C++ compiler was found at installation: install g++ and reinstall swe-rl",
    ),
)


def build_native(part: NativePart, package: Path) -> None:
    """Compiles one part below `package`; leaves MISSING.txt there when that is not possible."""
    target = package / part.target
    target.mkdir(parents=True, exist_ok=True)
    note = target / "MISSING.txt"
    if not any(shutil.which(compiler) for compiler in part.compilers):
        _note_missing(note, part.missing)
        return
    with tempfile.TemporaryDirectory() as scratch:
        done = subprocess.run(
            ["sh", str(part.sources / "build.sh"), scratch], cwd=part.sources, capture_output=True, text=True
        )
        sys.stdout.write(done.stdout)
        if done.returncode != 0:
            _note_missing(note, f"{part.sources.name}/build.sh failed:\n{done.stderr.strip()[-4000:]}")
            return
        for binary in Path(scratch).iterdir():  # by rename: a running process keeps the file that it was started from
            staged = target / f".{binary.name}.{os.getpid()}"
            shutil.copy2(binary, staged)
            os.replace(staged, target / binary.name)
    note.unlink(missing_ok=True)


def _note_missing(note: Path, reason: str) -> None:
    note.write_text(reason + "\n")  # older binaries beside it (editable installation) keep working
    print(f"swe-rl: {note.parent.parent.name}: not built: {reason}", file=sys.stderr)


class BuildWithNative(build_py):
    """Builds the native parts after the Python ones, into the same place."""

    def run(self) -> None:
        package = ROOT / "swe_rl" if self.editable_mode else Path(self.build_lib) / "swe_rl"
        if not self.editable_mode:  # setuptools would pack what an earlier build left there
            shutil.rmtree(package, ignore_errors=True)
        super().run()
        for part in NATIVE_PARTS:
            build_native(part, package)

    def get_source_files(self) -> list[str]:
        """Adds the C sources to source distributions."""
        native = sorted(str(p.relative_to(ROOT)) for p in (ROOT / "csrc").rglob("*") if p.is_file())
        return [*super().get_source_files(), *native]


class PlatformDistribution(Distribution):
    """Not pure Python, although setuptools sees no extension module."""

    def has_ext_modules(self) -> bool:
        return True


class PlatformWheel(bdist_wheel):
    """The binaries need no Python and no torch headers: any Python 3, but one processor architecture."""

    def get_tag(self) -> tuple[str, str, str]:
        return "py3", "none", super().get_tag()[2]


setup(
    packages=[*find_packages(include=["swe_rl", "swe_rl.*"]), "swe_rl.kernels", "swe_rl.conf"],
    package_dir={"swe_rl.kernels": "kernels/triton_ops", "swe_rl.conf": "conf"},
    package_data={"swe_rl.conf": ["**/*.yaml", "launch/*"], "swe_rl": ["py.typed", "agents/prompts/*"]},
    include_package_data=False,
    distclass=PlatformDistribution,
    cmdclass={"build_py": BuildWithNative, "bdist_wheel": PlatformWheel},
    zip_safe=False,
)
