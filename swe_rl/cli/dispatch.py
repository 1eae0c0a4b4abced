"""The table of commands, and the one place where failures become exit codes.

0 done, 1 failed while running, 2 bad arguments or configuration (one line on standard error, no traceback),
130 interrupted. A command is a function main(argv) -> exit code; it is imported only when it is called.
"""

from __future__ import annotations

import importlib
import logging
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from swe_rl.errors import CheckpointError, ConfigError

DONE, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130
USER_ERRORS = (ConfigError, CheckpointError)


@dataclass(frozen=True, slots=True)
class Command:
    target: str  # "module:function"
    summary: str
    example: str


COMMANDS: dict[str, Command] = {
    "train": Command(
        "swe_rl.cli.train:main", "train a policy, phase by phase", "swe-rl train experiment=quickstart seed=1"
    ),
    "rft": Command(
        "swe_rl.cli.rft:main",
        "imitate the rollouts that pass the hidden tests",
        "swe-rl rft init_weights=runs/RUN/phases/warm_start phases.0.num_tasks=200",
    ),
    "eval": Command(
        "swe_rl.cli.eval:main",
        "measure a policy on tasks; compare, show and import evaluations",
        "swe-rl eval policy=runs/RUN eval.samples_per_task=4",
    ),
    "verify": Command(
        "swe_rl.cli.verify:main",
        "verifiers: train one, score candidates, choose among them",
        "swe-rl verify select runs/RUN --by hybrid",
    ),
    "tasks": Command(
        "swe_rl.cli.tasks:main",
        "build and describe bug-fix tasks",
        "swe-rl tasks build --package toolz==1.2.0 --num-tasks 40 --out DIR",
    ),
    "sandbox": Command("swe_rl.cli.sandbox:main", "measure, enter and clean up sandboxes", "swe-rl sandbox bench"),
    "rollout": Command(
        "swe_rl.cli.rollout:main", "replay recorded episodes token by token", "swe-rl rollout --show runs/RUN"
    ),
    "plan": Command(
        "swe_rl.cli.plan:main",
        "memory and time of a recipe on a cluster, and the layouts that fit",
        "swe-rl plan experiment=deepswe cluster=h100_8x8",
    ),
    "convert": Command(
        "swe_rl.cli.convert:main",
        "models between Hugging Face directories and Megatron ranks",
        "swe-rl convert Qwen3-32B ranks --tensor-parallel 8 --pipeline-parallel 2",
    ),
    "report": Command("swe_rl.cli.report:main", "render a run directory as one HTML file", "swe-rl report runs/RUN"),
    "doctor": Command("swe_rl.cli.doctor:main", "check what this machine has and lacks", "swe-rl doctor"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit code; never raises except for a bug in this file."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments and arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return DONE
    if arguments and arguments[0] in ("-V", "--version"):
        return _version()
    if not arguments or arguments[0] not in COMMANDS:
        return _unknown(arguments)
    name, rest = arguments[0], arguments[1:]
    _configure_logging()
    return run_guarded(lambda: load(name)(rest), label=f"swe-rl {name}")


def load(name: str) -> Callable[[Sequence[str]], int | None]:
    """Imports the function behind one command."""
    module, function = COMMANDS[name].target.split(":")
    return getattr(importlib.import_module(module), function)


def run_guarded(call: Callable[[], int | None], *, label: str) -> int:
    """Calls and turns what comes back or escapes into an exit code."""
    try:
        return call() or DONE
    except SystemExit as err:  # argparse: 0 after --help, 2 after a bad argument
        return _exit_code(err)
    except BrokenPipeError:  # the reader of our output went away, as in `swe-rl ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except BaseException as err:
        return _report_failure(err, label)


def help_text() -> str:
    """What `swe-rl --help` prints."""
    width = max(map(len, COMMANDS))
    rows = [f"  {name:<{width}}  {c.summary}\n  {'':<{width}}    {c.example}" for name, c in COMMANDS.items()]
    return "\n".join(
        [
            "usage: swe-rl COMMAND [arguments]        (also: python -m swe_rl COMMAND, torchrun ... -m swe_rl COMMAND)",
            "",
            "Trains software-engineering agents by multi-turn reinforcement learning.",
            "",
            "commands, each with an example:",
            *rows,
            "",
            "swe-rl COMMAND --help tells more. Exit codes: 0 done, 1 failed, 2 bad input, 130 interrupted.",
        ]
    )


def _report_failure(err: BaseException, label: str) -> int:
    leaves = list(_leaves(err))
    user_error = next((leaf for leaf in leaves if isinstance(leaf, USER_ERRORS)), None)
    if any(isinstance(leaf, KeyboardInterrupt) for leaf in leaves):
        print(f"{label}: interrupted", file=sys.stderr)
        return INTERRUPTED
    if user_error is not None and all(isinstance(leaf, USER_ERRORS) for leaf in leaves):
        print(f"{label}: {_rank_prefix()}{one_line(user_error)}", file=sys.stderr)
        return BAD_INPUT
    traceback.print_exception(err)
    print(f"{label}: {_rank_prefix()}failed: {type(leaves[0]).__name__}: {one_line(leaves[0])}", file=sys.stderr)
    return FAILED


def _leaves(err: BaseException) -> list[BaseException]:
    """The exceptions inside (nested) groups, as a TaskGroup raises them."""
    if isinstance(err, BaseExceptionGroup):
        return [leaf for inner in err.exceptions for leaf in _leaves(inner)]
    return [err]


def one_line(err: BaseException) -> str:
    """The message of an exception without line breaks."""
    return " ".join(str(err).split()) or type(err).__name__


def _rank_prefix() -> str:
    """Names the process where several ranks may print the same line."""
    return f"[rank {os.environ.get('RANK', '0')}] " if int(os.environ.get("WORLD_SIZE") or 1) > 1 else ""


def _exit_code(err: SystemExit) -> int:
    if err.code is None or isinstance(err.code, int):
        return err.code or DONE
    print(err.code, file=sys.stderr)
    return FAILED


def _unknown(arguments: list[str]) -> int:
    if not arguments:
        print(help_text(), file=sys.stderr)
        return BAD_INPUT
    import difflib

    near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
    hint = f"did you mean {near[0]}?" if near else f"use one of {', '.join(COMMANDS)}"
    print(f"swe-rl: {arguments[0]!r} is no command: {hint} (swe-rl --help)", file=sys.stderr)
    return BAD_INPUT


def _version() -> int:
    from importlib.metadata import version

    print(f"swe-rl {version('swe-rl')}")
    return DONE


def _configure_logging() -> None:
    """Own messages from INFO on, those of libraries from WARNING on, all on standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stderr)
    logging.getLogger("swe_rl").setLevel(logging.INFO)
