"""R2E-Gym's parsed commits as unified diffs: file_diffs[] with hunks[] of typed lines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from swe_rl.tasks.sources.fields import RowError, SkipRow

FIELD = "parsed_commit_content"
_ENTITIES = ("deleted", "added", "modified")
_SIGNS = {"context": " ", "added": "+", "deleted": "-"}


def commit_patch(commit: Mapping[str, Any], *, where: str, tests: bool = False) -> bytes:
    """The diff of a commit, without its test files unless `tests`. Raises RowError for what is not of that form,
    SkipRow for a binary file."""
    try:
        files = [_file_diff(item) for item in commit["file_diffs"] if tests or not is_test(_path(item))]
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise RowError(
            where, FIELD, f"has no {error!s} where one is needed, expected file_diffs[] of header, hunks[] and lines"
        ) from error
    text = "".join(files)
    if not text:
        raise RowError(where, FIELD, "changes no file outside the tests, expected a commit that does")
    return text.encode("utf-8", "surrogatepass")


def count_entities(commit: Mapping[str, Any]) -> dict[str, int]:
    """Distinct entities outside the tests that the commit deleted, added and modified, and statements of any of these.
    Empty when its hunks do not name entities."""
    found: dict[str, set[str]] = {"deleted": set(), "added": set(), "modified": set(), "statements": set()}
    named = False
    for item in commit.get("file_diffs") or ():
        if is_test(_path(item)):
            continue
        for hunk, kind in ((hunk, kind) for hunk in item.get("hunks") or () for kind in _ENTITIES):
            entities = hunk.get(f"{kind}_entities")
            named = named or entities is not None
            for entity in entities or ():
                group = "statements" if entity.get("type") == "statement" else kind
                found[group].add(f"{_path(item)}:{entity.get('name')}")
    return {name: len(members) for name, members in found.items()} if named else {}


def is_test(path: str) -> bool:
    """Whether a path belongs to the tests: a folder or the file's name says so."""
    *folders, name = path.lower().split("/")
    in_folder = any(folder in ("test", "tests", "testing", "r2e_tests") for folder in folders)
    return in_folder or name.startswith("test_") or name.endswith(("_test.py", "_tests.py")) or name == "conftest.py"


def _path(item: Mapping[str, Any]) -> str:
    return item["header"]["file"]["path"]


def _file_diff(item: Mapping[str, Any]) -> str:
    path = _path(item)
    lines = [f"diff --git a/{path} b/{path}"]
    if misc := item["header"].get("misc_line") or item.get("misc_line"):
        lines.append(misc)  # "new file mode 100644" and the like
    if index := item.get("index_line"):
        lines.append(_index(index))
    if item.get("is_binary_file"):
        raise SkipRow("the solution changes a binary file, whose content the row does not have")
    hunks = item.get("hunks") or []
    if hunks:
        lines += [f"--- {_side(item.get('minus_file'), 'a', path)}", f"+++ {_side(item.get('plus_file'), 'b', path)}"]
    for hunk in hunks:
        descriptor = hunk["descriptor"]
        ranges = f"@@ -{_range(descriptor['old_range'])} +{_range(descriptor['new_range'])} @@"
        section = descriptor.get("section") or ""
        lines.append(f"{ranges} {section}".rstrip() if section else ranges)
        lines += [_line(line) for line in hunk["line_group"]["all_lines"]]
    return "\n".join(lines) + "\n"


def _index(index: Any) -> str:
    if isinstance(index, str):
        return index
    mode = f" {index['mode']}" if index.get("mode") else ""
    return f"index {index['old_commit_hash']}..{index['new_commit_hash']}{mode}"


def _side(file: Any, prefix: str, path: str) -> str:
    """Path of one side; upstream gives {"path": "a/x.py"}, {"path": "/dev/null"} or nothing."""
    found = file.get("path") if isinstance(file, Mapping) else file
    if not found:
        return f"{prefix}/{path}"
    return found if found == "/dev/null" or found.startswith(("a/", "b/")) else f"{prefix}/{found}"


def _range(span: Any) -> str:
    length = span.get("length")
    return f"{span['start']}" if length is None else f"{span['start']},{length}"


def _line(line: Mapping[str, Any]) -> str:
    if line["type"] == "note":
        return "\\ " + line["content"].removeprefix("\\").lstrip()  # "No newline at end of file"
    return _SIGNS[line["type"]] + line["content"]
