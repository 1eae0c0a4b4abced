"""What an execution-free verifier reads: an interaction log and a final patch, and one question about them.

The order of the blocks is R2E-Gym's (reference facts: system message, issue, then per step what was said and what was
seen, the final patch, the question); the wording is our own, and `verifier.instruction` takes another one where scores
have to agree with a published adapter. Answers are `<judgement>YES</judgement>` and `<judgement>NO</judgement>`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from swe_rl.agents.formats import ActionFormat, FormatError
from swe_rl.errors import PatchError
from swe_rl.evaluation.equivalence import normal_patch
from swe_rl.rewards.diff import split_patch
from swe_rl.types import Task, Trajectory

Messages = list[Mapping[str, str]]

YES, NO = "YES", "NO"
OPEN, CLOSE = "<judgement>", "</judgement>"
THOUGHT_LEFT_OUT = "(a longer thought is left out here)"
OUTPUT_LEFT_OUT = "(a longer output is left out here)"

INSTRUCTION = """\
You judge the work of a software engineer. You get the log of a session in which an issue of a repository was worked
on, and the patch that was handed in. Decide whether the patch really solves the issue. Look at four things:
1. The main point: does the patch do what the issue asks for?
2. Edge cases: does it also hold for unusual input, and does everything else still work as before?
3. Errors: does the log show errors that were never put right?
4. Verification: was the change tried out, and did what was seen support it?
Answer with <judgement>YES</judgement> if the issue is solved, with <judgement>NO</judgement> if it is not. Say nothing
else."""
QUESTION = "Is the issue solved by this patch? Answer with <judgement>YES</judgement> or <judgement>NO</judgement>."


def answer(solved: bool) -> str:
    """The whole answer about a trajectory."""
    return f"{OPEN}{YES if solved else NO}{CLOSE}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One turn of the log."""

    thought: str
    action: str
    observation: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Log:
    """A trajectory as text, without anything that only the grader knows."""

    system: str  # "" where the agent had no system message
    issue: str
    steps: tuple[Step, ...]
    patch: str  # of files that the repository had before


@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a log is written down."""

    name: str
    instruction: str  # system message of the verifier, "" for none
    question: str
    block: Callable[[str, str], str]  # (heading, text) -> text
    steps: bool  # whether steps are numbered


def _bracketed(heading: str, text: str) -> str:
    return f"[{heading}]\n{text}\n"


def _plain(heading: str, text: str) -> str:
    return f"{heading.lower()}\n{text}\n"


FORMS: dict[str, Form] = {
    "r2e": Form(name="r2e", instruction=INSTRUCTION, question=QUESTION, block=_bracketed, steps=True),
    # For a model of a few million parameters every token costs: role words, which are one token each, and no question.
    "nano": Form(name="nano", instruction="", question="", block=_plain, steps=False),
}


def make_log(
    trajectory: Trajectory,
    task: Task,
    *,
    opening: Sequence[Mapping[str, str]],
    decode: Callable[[Sequence[int]], str],
    action_format: ActionFormat,
) -> Log:
    """The log of a finished trajectory.

    opening: the messages that the agent began with; decode: sampled ids to text, without the stop token. What a turn
    shows is `Turn.observation`, which is what the policy saw of it.
    """
    steps = []
    for turn in trajectory.turns:
        text = decode(turn.completion.token_ids)
        parsed = action_format.parse(text)
        thought = "" if isinstance(parsed, FormatError) else parsed.thought
        steps.append(Step(thought=thought, action=text[len(thought) :], observation=turn.observation))
    return Log(
        system="\n".join(message["content"] for message in opening if message["role"] == "system"),
        issue="\n".join(message["content"] for message in opening if message["role"] == "user"),
        steps=tuple(steps),
        patch=known_files(trajectory.patch or b"", task),
    )


def known_files(patch: bytes, task: Task) -> str:
    """The parts of a patch about files that were there before. New files are mostly the agent's own scratch work.

    Of a task that comes as an image, whose files are not known here, the parts that create no file.
    """
    try:
        parts = split_patch(patch) if patch else []
    except PatchError:
        return ""
    kept = [part.data for part in parts if not part.is_new and (not task.tree or _known(part.paths, task))]
    return normal_patch(b"".join(kept)).decode("utf-8", "replace")


def _known(paths: Sequence[bytes], task: Task) -> bool:
    return any(path.decode("utf-8", "surrogateescape") in task.tree for path in paths)


def write_log(log: Log, form: Form) -> str:
    """The user message of the verifier."""
    parts = [form.block("SYSTEM", log.system)] if log.system else []
    parts.append(form.block("USER", log.issue))
    for number, step in enumerate(log.steps, 1):
        parts += [f"[STEP] {number}\n"] if form.steps else []
        parts.append(form.block("ASSISTANT", step.thought + step.action))
        parts += [form.block("USER", step.observation)] if step.observation else []
    parts.append(form.block("PATCH", log.patch))
    return "".join(parts) + form.question


def messages(log: Log, form: Form, *, instruction: str = "") -> Messages:
    """The chat that is completed by an answer. `instruction` replaces that of the form."""
    system = instruction or form.instruction
    opening: Messages = [{"role": "system", "content": system}] if system else []
    return [*opening, {"role": "user", "content": write_log(log, form)}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Condensed:
    log: Log
    thoughts: int  # left out
    outputs: int
    fits: bool


def condense(log: Log, *, budget: int, total: int, count: Callable[[str], int]) -> Condensed:
    """The log with its longest thoughts left out, one after the other, until it costs at most `budget` tokens.

    total: tokens of the whole prompt as it is; count: tokens of a text. When all thoughts that are longer than the note
    in their place are gone, the longest outputs go the same way; what is still too long then does not fit.
    """
    steps = list(log.steps)
    costs = [{name: count(getattr(step, name)) for name in ("thought", "observation")} for step in steps]
    left_out = {"thought": 0, "observation": 0}
    for name, note in (("thought", THOUGHT_LEFT_OUT), ("observation", OUTPUT_LEFT_OUT)):
        price = count(note)
        order = sorted(range(len(steps)), key=lambda i, name=name: (-costs[i][name], i))  # type: ignore[misc]
        for i in order:
            if total <= budget or costs[i][name] <= price:
                break
            steps[i] = replace(steps[i], **{name: note})
            total -= costs[i][name] - price
            left_out[name] += 1
    return Condensed(
        log=replace(log, steps=tuple(steps)),
        thoughts=left_out["thought"],
        outputs=left_out["observation"],
        fits=total <= budget,
    )
