"""Package mapping, and the native parts: built with the system compiler, never required to install."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).parent
SANDBOXD_SOURCES = ROOT / "csrc" / "sandboxd"


def build_sandboxd(target: Path) -> None:
    """Compiles the static supervisor and launcher into `target`; says what is missing instead of failing."""
    script = SANDBOXD_SOURCES / "build.sh"
    compiler = next((c for c in ("musl-gcc", "cc", "gcc", "clang") if shutil.which(c)), None)
    if compiler is None:
        print("swe-rl: no C compiler found, the local sandbox is not built; install gcc and reinstall", file=sys.stderr)
        return
    target.mkdir(parents=True, exist_ok=True)
    try:
        subprocess.run(["sh", str(script), str(target)], check=True, env=None)
    except (OSError, subprocess.CalledProcessError) as err:
        print(f"swe-rl: building csrc/sandboxd failed ({err}); the local sandbox is not available", file=sys.stderr)


class BuildWithNative(build_py):
    def run(self) -> None:
        super().run()
        in_tree = self.editable_mode if hasattr(self, "editable_mode") else False
        package = ROOT / "swe_rl" if in_tree else Path(self.build_lib) / "swe_rl"
        build_sandboxd(package / "sandbox" / "bin")


PACKAGES = [*find_packages(include=["swe_rl", "swe_rl.*"]), "swe_rl.kernels", "swe_rl.conf"]

setup(
    packages=PACKAGES,
    package_dir={"swe_rl.kernels": "kernels/triton_ops", "swe_rl.conf": "conf"},
    package_data={"swe_rl.conf": ["*.yaml", "**/*.yaml"], "swe_rl": ["sandbox/bin/*", "py.typed", "agents/prompts/*.jinja"]},
    include_package_data=False,
    cmdclass={"build_py": BuildWithNative},
    zip_safe=False,
)
