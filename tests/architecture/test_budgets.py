"""Sizes and manners: files and functions fit on a screen, modules say what they are, no leftovers in the tree."""

from __future__ import annotations

import ast
import re
import subprocess
import warnings
from pathlib import Path

from source_tree import PACKAGE, ROOT, python_files

FILE_SOFT, FILE_HARD = 300, 500
FUNCTION_SOFT, FUNCTION_HARD = 40, 80
CSRC_SANDBOXD_HARD = 2200
# Written in two halves so that this file does not find itself.
LEFTOVERS = re.compile(r"\b(TO" + r"DO|FIX" + r"ME|XX" + r"X)\b|NotImplemented" + r"Error")
MACHINE_PATHS = re.compile(
    r"(?<![\w.])/(?:ho" + r"me|Us" + r"ers)/(?!agent\b)[a-z]\w*|/wo" + r"rk/(?:main|shared|\.library)|/tmp/ve" + r"nv"
)
FORBIDDEN_NAMES = ("utils.py", "util.py", "helpers.py", "misc.py", "common.py")


def tracked_files() -> list[Path]:
    """Files that git knows or would add; without git (an unpacked archive) everything but build leftovers."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True
    )
    if listed.returncode == 0:
        paths = [ROOT / name.decode() for name in listed.stdout.split(b"\0") if name]
        return [path for path in paths if path.is_file()]
    skipped = {"build", "dist", ".venv", "__pycache__", "runs"}
    return [p for p in ROOT.rglob("*") if p.is_file() and not skipped & set(p.relative_to(ROOT).parts)]


def text_lines() -> list[tuple[str, int, str]]:
    """(file, line number, line) of every text file in the tree."""
    found = []
    for path in tracked_files():
        data = path.read_bytes()
        if b"\0" in data[:8192]:
            continue
        lines = data.decode("utf-8", errors="replace").splitlines()
        found += [(path.relative_to(ROOT).as_posix(), number, line) for number, line in enumerate(lines, 1)]
    return found


def test_files_fit_the_budget() -> None:
    sizes = {path.relative_to(ROOT).as_posix(): len(path.read_text().splitlines()) for path in python_files()}
    for name, size in sizes.items():
        if size > FILE_SOFT:
            warnings.warn(f"{name} has {size} lines (aim: {FILE_SOFT})", stacklevel=1)
    too_long = {name: size for name, size in sizes.items() if size > FILE_HARD}
    assert not too_long, f"more than {FILE_HARD} lines: {too_long}"


def test_functions_fit_the_budget() -> None:
    too_long = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                size = (node.end_lineno or node.lineno) - node.lineno + 1
                if size > FUNCTION_HARD:
                    too_long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {size} lines")
                elif size > FUNCTION_SOFT:
                    where = f"{path.relative_to(ROOT)}:{node.lineno}"
                    warnings.warn(f"{where} {node.name} has {size} lines (aim: {FUNCTION_SOFT})", stacklevel=1)
    assert not too_long, "\n".join(too_long)


def test_launcher_and_supervisor_stay_small() -> None:
    sources = [path for path in (ROOT / "csrc" / "sandboxd").glob("*.[ch]")]
    assert sum(len(path.read_text().splitlines()) for path in sources) <= CSRC_SANDBOXD_HARD


def test_every_public_module_says_what_it_is() -> None:
    silent = []
    for path in python_files():
        if path.name.startswith("_") and path.name not in ("__init__.py", "__main__.py"):
            continue
        if not ast.get_docstring(ast.parse(path.read_text())):
            silent.append(path.relative_to(ROOT).as_posix())
    assert not silent, f"no module docstring: {silent}"


def test_no_file_has_a_name_that_says_nothing() -> None:
    vague = [p.relative_to(ROOT).as_posix() for p in python_files() if p.name in FORBIDDEN_NAMES]
    assert not vague, f"name these by what they hold: {vague}"


def test_names_of_test_modules_are_unique() -> None:
    """They are imported by their bare names: pytest refuses to collect the second of two."""
    names = [path.name for path in tracked_files() if path.suffix == ".py" and "tests" in path.relative_to(ROOT).parts]
    twice = {name for name in names if names.count(name) > 1} - {"conftest.py"}
    assert not twice, f"name these after what they test: {sorted(twice)}"


def test_nothing_is_swallowed() -> None:
    """No bare except; `except Exception` and wider must do more than pass."""
    wrong = []
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.ExceptHandler):
                continue
            wide = node.type is None or ast.unparse(node.type) in ("Exception", "BaseException")
            if node.type is None or (wide and all(isinstance(s, ast.Pass | ast.Continue) for s in node.body)):
                wrong.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert not wrong, f"these hide failures: {wrong}"


def test_no_leftovers_and_no_machine_paths_in_the_tree() -> None:
    wrong = [f"{n}:{i}: {line.strip()[:100]}" for n, i, line in text_lines() if LEFTOVERS.search(line)]
    wrong += [f"{n}:{i}: {line.strip()[:100]}" for n, i, line in text_lines() if MACHINE_PATHS.search(line)]
    assert not wrong, "\n".join(wrong)


def test_the_top_level_is_the_agreed_one() -> None:
    agreed = {"pyproject.toml", "setup.py", "README.md", "csrc", "kernels", "swe_rl", "conf", "benchmarks", "tests"}
    top = {path.relative_to(ROOT).parts[0] for path in tracked_files()}
    extra = {name for name in top if not name.startswith(".")} - agreed
    assert not extra, f"not part of the agreed layout: {sorted(extra)}"
    assert not (ROOT / "kernels" / "__init__.py").exists(), "a package named kernels would shadow another project's"
    assert PACKAGE.is_dir()
