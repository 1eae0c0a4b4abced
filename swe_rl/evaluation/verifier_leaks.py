"""Does a log show what only the grader may know? Then it must not reach a verifier, neither to learn nor to judge.

A verifier that is trained on logs with hidden test output learns to read the result; one that sees the gold patch
compares. Both look excellent and are worth nothing on the next task. Checked is what the agent was shown; what it had
written itself is its own work, however right it is. When in doubt a log is refused: that costs one sample.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from unidiff import PatchSet
from unidiff.errors import UnidiffParseError
from unidiff.patch import Hunk

from swe_rl.errors import ConfigError
from swe_rl.evaluation.verifier_prompt import Log
from swe_rl.types import Task

MIN_LETTERS = 12  # of a line, or its occurrence says nothing
MIN_NAME = 5
_TEST = re.compile(r"^\s*(?:async\s+)?def\s+(test\w*)|^class\s+(Test\w*)", re.MULTILINE)
_TAG = re.compile(r"</?[\w=.-]+>")  # of an action format
_CHANGES = re.compile(r"sed -i|>|\btee\b|\bpython|\bperl\b|\bapply\b|\bpatch\b")  # in a shell command


class LeakError(ConfigError):
    """A log holds hidden test output, hidden tests or the gold patch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Secret:
    """A text that only the grader knows."""

    label: str
    text: str
    own: tuple[str, ...]  # lines that explain its sight when the agent had written all of them; () explains nothing


def leaks(log: Log, task: Task) -> Iterator[str]:
    """What the log gives away, in words."""
    visible = "\n".join(data.decode("utf-8", "replace") for data in task.tree.values())
    names = _hidden_names(task, visible)
    secrets = [*_gold(task, _normal(visible)), *_hidden_lines(task, visible)]
    hunks = [secret.text for secret in secrets if secret.text.startswith("@@")]
    patched = _lines("\n".join(line[1:] for line in log.patch.splitlines() if line.startswith("+")))
    written, changes = "", 0  # by the agent so far
    for where, text, own in _blocks(log):
        shown = _normal(text)
        if own:
            if any(hunk in shown for hunk in hunks):
                yield f"{where} holds a hunk of the gold patch"
            written += "\n" + text
            changes += _CHANGES.search(_TAG.sub(" ", text)) is not None
            continue
        mine = _lines(written) | (patched if changes else frozenset())
        for secret in secrets:
            if secret.text in shown and not (secret.own and all(_said(line, mine) for line in secret.own)):
                yield f"{where} shows {secret.label}: {secret.text.strip().splitlines()[0][:60]!r}"
        for name in names:
            if re.search(rf"(?<!\w){re.escape(name)}(?!\w)", text) and name not in written:
                yield f"{where} shows the hidden test {name!r}"


def _blocks(log: Log) -> Iterator[tuple[str, str, bool]]:
    """(place, text, whether the agent wrote it) in the order of the session."""
    yield "the system message", log.system, False
    yield "the issue", log.issue, False
    for number, step in enumerate(log.steps, 1):
        yield f"the action of step {number}", step.thought + step.action, True
        yield f"the output of step {number}", step.observation, False


def _said(line: str, mine: frozenset[str]) -> bool:
    return line in mine or any(line in other for other in mine)


def _lines(text: str) -> frozenset[str]:
    return frozenset(line.strip() for line in text.splitlines() if line.strip())


def _normal(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.splitlines())


def _hidden_names(task: Task, visible: str) -> list[str]:
    """Files and functions of the hidden tests that the repository does not have. In a task that comes as an image what
    it has is not known: then the functions that its hidden tests add."""
    ids = (*task.fail_to_pass, *task.pass_to_pass)
    functions = {item.rpartition("::")[2].partition("[")[0] for item in ids if "::" in item}
    if task.tree:
        files = {*task.hidden_files, *task.test_files} - set(task.tree)
        functions = {name for name in functions if not re.search(rf"(?<!\w){re.escape(name)}(?!\w)", visible)}
    else:
        files, functions = set(), {first or second for first, second in _TEST.findall(_added(task.test_patch))}
    return sorted(name for name in (*files, *functions) if sum(map(str.isalnum, name)) >= MIN_NAME)


def _hidden_lines(task: Task, visible: str) -> list[Secret]:
    """Lines of the hidden tests that say something and stand neither in the repository nor in the issue."""
    known = {line.strip() for text in (visible, task.problem_statement) for line in text.splitlines()}
    texts = [data.decode("utf-8", "replace") for data in task.hidden_files.values()]
    found = dict.fromkeys(line.strip() for text in (*texts, _added(task.test_patch)) for line in text.splitlines())
    # an import says where something is, not what is expected of it; names of tests are looked for on their own
    plain = ("import ", "from ", "def ", "class ", "@", "#")
    telling = [line for line in found if line not in known and _tells(line) and not line.startswith(plain)]
    return [Secret(label="a line of the hidden tests", text=line, own=(line,)) for line in telling]


def _gold(task: Task, visible: str) -> Iterator[Secret]:
    """Each hunk as a diff writes it, and as the repaired file shows it."""
    for hunk in _hunks(task):
        added = tuple(line.value.strip() for line in hunk if line.line_type == "+" and line.value.strip())
        yield Secret(label="a hunk of the gold patch", text=_normal(str(hunk)), own=added)
        repaired = "\n".join(line.value.rstrip() for line in hunk if line.line_type in " +")
        if added and _tells(repaired) and repaired not in visible:
            yield Secret(label="the repaired program", text=repaired, own=added)


def _hunks(task: Task) -> Sequence[Hunk]:
    try:
        return [hunk for file in PatchSet(task.gold_patch.decode("utf-8", "replace")) for hunk in file]
    except UnidiffParseError:
        return []


def _added(patch: bytes) -> str:
    lines = patch.decode("utf-8", "replace").splitlines()
    return "\n".join(line[1:] for line in lines if line.startswith("+") and not line.startswith("+++"))


def _tells(text: str) -> bool:
    return sum(map(str.isalnum, text)) >= MIN_LETTERS
