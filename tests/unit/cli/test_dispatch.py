"""Exit codes and what reaches standard error, for every way in which a command can end."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from typing import Any, NoReturn

import pytest

from swe_rl.cli import dispatch
from swe_rl.cli.arguments import ArgumentParser
from swe_rl.cli.dispatch import COMMANDS, main, run_guarded
from swe_rl.errors import CheckpointError, ConfigError, InvariantError, SandboxUnavailable


def raising(err: BaseException) -> Callable[[], NoReturn]:
    def call() -> NoReturn:
        raise err

    return call


async def _task_group(*errors: Exception) -> None:
    async def fail(err: Exception) -> None:
        await asyncio.sleep(0)
        raise err

    async with asyncio.TaskGroup() as group:
        for err in errors:
            group.create_task(fail(err))


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: None, 0),
        (lambda: 0, 0),
        (lambda: 1, 1),
        (lambda: sys.exit(0), 0),
        (lambda: sys.exit(2), 2),
        (raising(SystemExit("gone")), 1),
        (raising(KeyboardInterrupt()), 130),
        (raising(ConfigError("task.num_train=0 is too few: raise it")), 2),
        (raising(CheckpointError("no checkpoint in x")), 2),
        (raising(SandboxUnavailable("no user namespaces")), 2),
        (raising(InvariantError("drift")), 1),
        (raising(RuntimeError("boom")), 1),
        (lambda: asyncio.run(_task_group(ConfigError("a"), ConfigError("b"))), 2),
        (lambda: asyncio.run(_task_group(ConfigError("a"), RuntimeError("b"))), 1),
        (raising(BaseExceptionGroup("g", [KeyboardInterrupt(), RuntimeError("x")])), 130),
    ],
)
def test_exit_codes(call: Callable[[], Any], code: int) -> None:
    assert run_guarded(call, label="swe-rl x") == code


def test_user_errors_are_one_line_and_bugs_keep_their_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    run_guarded(raising(ConfigError("first\n  second")), label="swe-rl x")
    assert capsys.readouterr().err == "swe-rl x: first second\n"
    run_guarded(raising(RuntimeError("boom")), label="swe-rl x")
    err = capsys.readouterr().err
    assert "Traceback" in err
    assert err.splitlines()[-1] == "swe-rl x: failed: RuntimeError: boom"


def test_ranks_name_themselves(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    run_guarded(raising(ConfigError("no model")), label="swe-rl train")
    assert capsys.readouterr().err == "swe-rl train: [rank 1] no model\n"


@pytest.mark.parametrize(
    ("words", "hint"), [(["trian"], "did you mean train?"), (["zzz"], "use one of train, rft, eval"), ([], "usage")]
)
def test_unknown_and_missing_commands(words: list[str], hint: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert hint in capsys.readouterr().err


def test_help_lists_every_command_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    for name, command in COMMANDS.items():
        assert name in text
        assert command.example in text
        assert command.example.startswith(f"swe-rl {name}")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_exists_and_its_help_has_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert callable(dispatch.load(name))
    assert main([name, "--help"]) == 0
    text = capsys.readouterr().out
    assert "example" in text
    assert f"swe-rl {name}" in text


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_a_bad_option_is_one_line_and_exit_code_2(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, "--no-such-option"]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_help_is_instant_and_loads_nothing_heavy() -> None:
    code = (
        "import sys; from swe_rl.cli import main; main(['--help']);"
        "heavy = {'torch', 'hydra', 'omegaconf', 'numpy', 'rich', 'pyarrow'} & set(sys.modules);"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", "import swe_rl.cli"], check=True)  # compiled once
    spent = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        assert done.returncode == 0, done.stderr
        spent.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    assert min(spent) < 0.3  # processor seconds: a busy machine does not change the answer


def test_a_closed_pipe_is_no_traceback() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    code = "import sys; from swe_rl.cli.dispatch import run_guarded\n" + (
        "def call():\n    for i in range(100000): print(i)\nsys.exit(run_guarded(call, label='x'))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_module_and_version() -> None:
    done = subprocess.run([sys.executable, "-m", "swe_rl", "--version"], capture_output=True, text=True, cwd="/")
    assert done.stdout.startswith("swe-rl ")
    assert subprocess.run([sys.executable, "-m", "swe_rl", "nothing"], capture_output=True, cwd="/").returncode == 2


def test_subcommands_share_the_manners_of_the_parser() -> None:
    parser = ArgumentParser(prog="swe-rl tasks")
    build = parser.add_subparsers(dest="action").add_parser("build", example="swe-rl tasks build --out DIR")
    build.add_argument("--out", required=True)
    assert "example:\n  swe-rl tasks build --out DIR" in build.format_help()
    with pytest.raises(ConfigError, match="--out"):
        parser.parse_args(["build"])
    with pytest.raises(ConfigError, match="--ou"):  # no abbreviations: a later option could make them ambiguous
        parser.parse_args(["build", "--ou", "x"])
