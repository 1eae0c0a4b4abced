"""Which parts of a patch reach the grader. A fix edits the program; what decides how tests are found and judged stays.

Dropped, and counted as tampering: files that configure or extend test runs, code that Python runs at start-up, existing
tests, hidden tests, modules that shadow the standard library or the test framework, links that escape or redirect.
Dropped without blame: new test files of the agent's own and by-products of running code.
"""

from __future__ import annotations

import posixpath
import sys
from collections.abc import Iterable
from dataclasses import dataclass

from swe_rl.rewards.diff import FilePatch, split_patch

POLICY_VERSION = 2  # part of the cache key of results

_CONFIG_NAMES = frozenset(
    b"conftest.py pytest.ini .pytest.ini pytest.toml .pytest.toml tox.ini setup.cfg pyproject.toml setup.py noxfile.py "
    b"sitecustomize.py usercustomize.py entry_points.txt .coveragerc .gitattributes .gitmodules".split()
)
_TEST_DIRS = frozenset((b"tests", b"test", b"testing"))
_JUNK_DIRS = frozenset((b"__pycache__", b".pytest_cache", b".mypy_cache", b".ruff_cache", b".hypothesis"))
_JUNK_SUFFIXES = (b".pyc", b".pyo")
_RESERVED = sys.stdlib_module_names | {
    "pytest",
    "_pytest",
    "pluggy",
    "py",
    "iniconfig",
    "packaging",
    "pygments",
    "xdist",
    "sitecustomize",  # as packages; the files are refused wherever they are
    "usercustomize",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FilteredPatch:
    patch: bytes  # what remains, verbatim; b"" when nothing does
    kept: tuple[bytes, ...]  # paths
    dropped: tuple[bytes, ...]  # paths
    tamper: int  # parts dropped with blame


def filter_patch(patch: bytes, *, hidden: Iterable[str] = (), existing: Iterable[str] = ()) -> FilteredPatch:
    """Applies the policy to a diff.

    `hidden`: paths written at grading; `existing`: files of the base tree. Raises PatchError(reason="malformed").
    """
    hidden_paths = frozenset(_encode(path) for path in hidden)
    modules = frozenset(_top_level_module(_encode(path)) for path in existing)
    kept: list[FilePatch] = []
    dropped: list[bytes] = []
    tamper = 0
    for part in split_patch(patch) if patch else []:
        verdict = _judge(part, hidden_paths, modules)
        if verdict == "keep":
            kept.append(part)
        else:
            dropped.extend(part.paths)
            tamper += verdict == "tamper"
    return FilteredPatch(
        patch=b"".join(part.data for part in kept),
        kept=tuple(path for part in kept for path in part.paths),
        dropped=tuple(dropped),
        tamper=tamper,
    )


def is_test_path(path: bytes) -> bool:
    """By pytest's and unittest's naming habits: a tests folder anywhere, test_*.py, *_test.py."""
    *folders, name = path.split(b"/")
    named = name.endswith(b".py") and (name.startswith(b"test_") or name.endswith(b"_test.py") or name == b"tests.py")
    return named or not _TEST_DIRS.isdisjoint(folders) or name in _TEST_DIRS


def _judge(part: FilePatch, hidden: frozenset[bytes], modules: frozenset[str]) -> str:
    verdicts = [_judge_path(path, part, hidden, modules) for path in part.paths]
    return next((v for v in ("tamper", "drop") if v in verdicts), "keep")


def _judge_path(path: bytes, part: FilePatch, hidden: frozenset[bytes], modules: frozenset[str]) -> str:
    *folders, name = path.split(b"/")
    if not _JUNK_DIRS.isdisjoint(folders) or name.endswith(_JUNK_SUFFIXES):
        return "drop"
    if path in hidden or any(other.startswith(path + b"/") or path.startswith(other + b"/") for other in hidden):
        return "tamper"
    if name.lower() in _CONFIG_NAMES or name.endswith(b".pth") or b".git" in (*folders, name):
        return "tamper"
    if any(folder.endswith((b".dist-info", b".egg-info")) for folder in folders):
        return "tamper"
    if is_test_path(path):
        return "drop" if part.is_new and part.mode != b"120000" else "tamper"
    if part.mode == b"160000" or (part.mode == b"120000" and _redirects(path, part, hidden)):
        return "tamper"
    if _shadows(path, part, modules):
        return "tamper"
    return "keep"


def _redirects(path: bytes, part: FilePatch, hidden: frozenset[bytes]) -> bool:
    """A link that leaves the workspace or stands for something protected."""
    lines = part.data.split(b"\n@@ ", 1)[-1].split(b"\n")
    target = b"\n".join(line[1:] for line in lines if line.startswith(b"+"))
    place = posixpath.normpath(posixpath.join(posixpath.dirname(path), target))
    if target.startswith(b"/") or place.split(b"/")[0] in (b"..", b".", b".git"):
        return True
    return is_test_path(place) or any(other == place or other.startswith(place + b"/") for other in hidden)


def _shadows(path: bytes, part: FilePatch, existing: frozenset[str]) -> bool:
    """A new importable top-level name (also below src/ or lib/) that the interpreter or pytest would find first."""
    top = _top_level_module(path)
    return (part.is_new or part.is_moved) and top in _RESERVED and top not in existing


def _top_level_module(path: bytes) -> str:
    """The module that `path` defines when its root, or src/ or lib/, is on sys.path; "" if none."""
    pieces = path.split(b"/")
    if pieces[0] in (b"src", b"lib") and len(pieces) > 1:
        pieces = pieces[1:]
    name = pieces[0].split(b".")[0].decode("utf-8", "replace")
    is_module = len(pieces) == 1 and pieces[0].endswith((b".py", b".so", b".pyi"))
    return name if is_module or (len(pieces) == 2 and pieces[1] == b"__init__.py") else ""


def _encode(path: str) -> bytes:
    return path.encode("utf-8", "surrogateescape")
