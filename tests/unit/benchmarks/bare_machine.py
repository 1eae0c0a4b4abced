"""python bare_machine.py CODE: runs CODE as on a machine where nobody has installed more than the kernels need.

There are torch, triton, transformers, numpy and pytest, with what they require themselves; the checkout is on
PYTHONPATH, not installed. Every other package is invisible, as if it were not there.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
PACKAGES = {
    *("torch", "triton", "transformers", "numpy", "pytest", "swe_rl"),
    *("functorch", "torchgen", "sympy", "mpmath", "networkx", "jinja2", "markupsafe", "fsspec", "filelock"),
    *("typing_extensions", "setuptools"),
}


class Bare:
    """Another finder, blind to everything else."""

    def __init__(self, finder: Any) -> None:
        self.finder = finder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        top = name.partition(".")[0]
        visible = PACKAGES | sys.stdlib_module_names | {file.stem for file in BENCHMARKS.glob("*.py")}
        if top in visible or top.startswith("_sysconfigdata"):
            return self.finder.find_spec(name, path, target)
        return None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.finder, name)


def main() -> None:
    finders = [finder for finder in sys.meta_path if not getattr(finder, "__module__", "").startswith("__editable__")]
    sys.meta_path[:] = [Bare(finder) for finder in finders]
    sys.path[0] = str(BENCHMARKS)  # as for a script there
    exec(sys.argv[1], {"__name__": "__main__"})


if __name__ == "__main__":
    main()
