"""The language of a task from the files that it touches, where a row does not say it."""

from __future__ import annotations

import posixpath
from collections import Counter
from collections.abc import Iterable

_BY_ENDING = {
    ".py": "python", ".js": "javascript", ".jsx": "javascript", ".mjs": "javascript", ".ts": "typescript",
    ".tsx": "typescript", ".go": "go", ".rs": "rust", ".java": "java", ".kt": "kotlin", ".rb": "ruby", ".php": "php",
    ".c": "c", ".h": "c", ".cc": "cpp", ".cpp": "cpp", ".hpp": "cpp", ".cs": "csharp", ".scala": "scala",
}  # fmt: skip


def language_of(paths: Iterable[str], default: str = "") -> str:
    """The language of most of these files; of equally many the first; `default` where no ending is known."""
    known = (_BY_ENDING.get(posixpath.splitext(path)[1].lower()) for path in paths)
    counts = Counter(language for language in known if language is not None)
    return counts.most_common(1)[0][0] if counts else default
