"""Imports point down, heavy libraries stay where they are named, and what promises to be torch-free is."""

from __future__ import annotations

import subprocess
import sys

import pytest
from source_tree import LAYER, NATIVE, PACKAGE, Import, part_of, python_files, runtime_imports

HEAVY: dict[str, tuple[str, ...]] = {  # library -> words, one of which is in the path of every file that imports it
    "vllm": ("vllm",),
    "megatron": ("megatron",),
    "ray": ("ray",),
    "docker": ("docker",),
    "kubernetes": ("kubernetes", "k8s"),
    "swebench": ("swebench",),
    "flash_attn": ("flash", "attention"),
}
TORCH_FREE = (
    "types",
    "errors",
    "protocols",
    "config",
    "metrics",
    "metric_table",
    "tasks",
    "sandbox",
    "agents",
    "rewards",
    "rollout",
    "cli",
)

ALL_IMPORTS = [found for path in python_files() for found in runtime_imports(path)]


def _where(found: Import) -> str:
    return f"{found.file.relative_to(PACKAGE.parent)}:{found.line} imports {found.module}"


def _target(found: Import) -> str:
    """The part of swe_rl that an import reaches, "" for the package itself or another package."""
    words = found.module.split(".")
    return words[1] if words[0] == "swe_rl" and len(words) > 1 else ""


def test_every_part_of_the_package_has_a_layer() -> None:
    parts = {part_of(path) for path in python_files()} - {"", "testing"}
    assert parts <= set(LAYER), f"not in ROWS of source_tree.py: {sorted(parts - set(LAYER))}"


def test_imports_point_down_and_never_to_a_sibling() -> None:
    wrong = []
    for found in ALL_IMPORTS:
        source, target = part_of(found.file), _target(found)
        if source in LAYER and target in LAYER and source != target and LAYER[source] >= LAYER[target]:
            wrong.append(_where(found))
    assert not wrong, "these imports go up or sideways:\n" + "\n".join(wrong)


def test_testing_imports_the_contract_only_and_nothing_imports_testing() -> None:
    allowed = ("protocols", "types", "errors")
    wrong = [
        _where(found)
        for found in ALL_IMPORTS
        if (part_of(found.file) == "testing" and _target(found) and _target(found) not in allowed)
        or (part_of(found.file) != "testing" and _target(found) == "testing")
    ]
    assert not wrong, "\n".join(wrong)


def test_only_ops_imports_the_kernels_and_the_extension() -> None:
    wrong = [_where(f) for f in ALL_IMPORTS if _target(f) in ("kernels", "_C") and part_of(f.file) != "ops"]
    assert not wrong, "\n".join(wrong)
    unknown = [_where(f) for f in ALL_IMPORTS if _target(f) and not _exists(_target(f))]
    assert not unknown, "these name no part of the package:\n" + "\n".join(unknown)


def _exists(part: str) -> bool:
    return part in (*LAYER, *NATIVE, "testing", "__version__") or (PACKAGE / part).exists()


def test_heavy_libraries_are_imported_lazily_in_files_named_for_them() -> None:
    wrong = []
    for found in ALL_IMPORTS:
        words = HEAVY.get(found.module.split(".")[0])
        path = found.file.relative_to(PACKAGE).as_posix()
        if words is None:
            continue
        if not any(word in path for word in words):
            wrong.append(f"{_where(found)}: only files named for it may")
        elif found.at_top and not any(word in path.rsplit("/", 1)[0] for word in words):
            wrong.append(f"{_where(found)} at the top: import it inside a function")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("part", TORCH_FREE)
def test_part_imports_without_torch(part: str) -> None:
    if not (PACKAGE / part).exists() and not (PACKAGE / f"{part}.py").exists():
        pytest.fail(f"swe_rl.{part} does not exist")
    modules = ", ".join(["torch", "transformers", "vllm", "megatron", "ray", "docker", "kubernetes"])
    code = (
        "import sys, pkgutil, importlib\n"
        f"top = importlib.import_module('swe_rl.{part}')\n"
        f"folders = [] if {part!r} == 'cli' else getattr(top, '__path__', [])\n"
        "for module in pkgutil.walk_packages(folders, top.__name__ + '.'):\n"
        "    importlib.import_module(module.name)\n"
        f"heavy = [m for m in '{modules}'.split(', ') if m in sys.modules]\n"
        "assert not heavy, heavy\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_importing_the_package_writes_nothing_and_reads_no_user_file() -> None:
    code = (
        "import sys\n"
        "opened = []\n"
        "def hook(event, args):\n"
        "    if event in ('os.mkdir', 'os.remove', 'os.rename', 'socket.connect', 'subprocess.Popen'):\n"
        "        opened.append((event, args))\n"
        "    if event == 'open' and isinstance(args[1], str) and set(args[1]) & set('wax+'):\n"
        "        opened.append((event, args))\n"
        "sys.dont_write_bytecode = True\n"
        "sys.addaudithook(hook)\n"
        f"for part in {TORCH_FREE!r}:\n"
        "    __import__('swe_rl.' + part)\n"
        "assert not opened, opened\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
