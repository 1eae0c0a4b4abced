"""What the architecture tests look at: the files of the package, their run-time imports, and the layers."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "swe_rl"

# Top to bottom. A part imports parts of lower rows only; parts on one row never import each other.
ROWS: tuple[tuple[str, ...], ...] = (
    ("__main__",),
    ("cli",),
    ("train_loop",),
    ("evaluation", "curation", "sample_streams"),
    ("rollout", "training"),
    ("rewards", "agents", "inference", "algorithms", "batching"),
    ("models",),
    ("tasks", "sandbox", "ops"),
    ("config", "metrics", "metric_table", "ray_connection"),
    ("protocols", "egress_pair"),
    ("types", "errors"),
)
LAYER: dict[str, int] = {part: row for row, parts in enumerate(ROWS) for part in parts}
NATIVE = ("kernels", "_C", "conf")  # mapped or compiled into the package: who may import them is a rule of its own


@dataclass(frozen=True, slots=True)
class Import:
    file: Path
    line: int
    module: str  # absolute, "swe_rl.tasks.oracle"
    at_top: bool  # executed when the file is imported, as opposed to inside a function


def python_files(root: Path = PACKAGE) -> list[Path]:
    """Every Python file below `root`, sorted."""
    return sorted(path for path in root.rglob("*.py") if "__pycache__" not in path.parts)


def part_of(path: Path) -> str:
    """The part of the package that a file belongs to: its folder, or its own name at the top ("" for __init__)."""
    first = path.relative_to(PACKAGE).parts[0]
    name = first.removesuffix(".py")
    return "" if name == "__init__" else name


def runtime_imports(path: Path) -> list[Import]:
    """Imports that run, TYPE_CHECKING blocks left out. `from swe_rl import tasks` counts as swe_rl.tasks."""
    tree = ast.parse(path.read_text(encoding="utf-8"), filename=str(path))
    return list(_imports(tree, path, at_top=True))


def _imports(node: ast.AST, path: Path, *, at_top: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(path, child.lineno, alias.name, at_top) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            base = _absolute(child, path)
            yield from (Import(path, child.lineno, f"{base}.{alias.name}", at_top) for alias in child.names)
        elif isinstance(child, ast.If) and _is_type_checking(child.test):
            for statement in child.orelse:
                yield from _imports(ast.Module([statement], []), path, at_top=at_top)
        else:
            inside = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, path, at_top=at_top and not inside)


def _absolute(node: ast.ImportFrom, path: Path) -> str:
    if not node.level:
        return node.module or ""
    package = ("swe_rl", *path.relative_to(PACKAGE).parts[:-1])
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
