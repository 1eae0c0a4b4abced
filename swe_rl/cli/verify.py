"""`swe-rl verify train|score|select|pipeline`: test-time scaling."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence

from swe_rl.errors import ConfigError

WORDS = {  # word -> (function, what it does)
    "train": ("swe_rl.cli.verify_train:main", "train an execution-free verifier on rollouts"),
    "score": ("swe_rl.cli.verify_score:main", "score candidates: by a verifier, by existing tests, by written tests"),
    "pipeline": ("swe_rl.cli.verify_pipeline:main", "all of it: sample, train, write tests, score, select"),
    "select": ("swe_rl.cli.verify_select:main", "choose among the candidates of each task, and what that brings"),
}
HELP = "\n".join(
    [
        "usage: swe-rl verify train|score|select|pipeline [arguments]",
        "",
        *(f"  {word:<8}  {what}" for word, (_, what) in WORDS.items()),
        "",
        "swe-rl verify WORD --help tells more.",
        "",
        "example:\n  swe-rl verify select runs/RUN --by hybrid",
    ]
)


def main(argv: Sequence[str]) -> int:
    """Entry point of the command; returns the exit code. Raises ConfigError for bad input."""
    if not argv or argv[0] in ("-h", "--help"):
        print(HELP)
        return 0
    if argv[0] not in WORDS:
        raise ConfigError(f"verify {argv[0]} is unknown: use one of {', '.join(WORDS)} (swe-rl verify --help)")
    module, function = WORDS[argv[0]][0].split(":")
    chosen: Callable[[Sequence[str]], int] = getattr(importlib.import_module(module), function)
    return chosen(argv[1:])
