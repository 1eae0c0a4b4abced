"""`swe-rl sandbox`: measures, enters and cleans up sandboxes, and keeps their images."""

from __future__ import annotations

import asyncio
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence

from swe_rl.cli import sandbox_bench, sandbox_images
from swe_rl.cli.arguments import ArgumentParser
from swe_rl.sandbox import open_sandbox
from swe_rl.types import Limits, SandboxSpec


def main(argv: Sequence[str]) -> int:
    """Runs one subcommand."""
    arguments = _parser().parse_args(argv)
    command: Callable[[Namespace], int] = arguments.run
    return command(arguments)


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="swe-rl sandbox",
        description="Measures, enters and cleans up sandboxes.",
        example="swe-rl sandbox shell --layer path/to/tree",
    )
    commands = parser.add_subparsers(required=True, metavar="bench|shell|reap|import|images|gc")
    sandbox_bench.add_parser(commands.add_parser)
    shell = commands.add_parser(
        "shell", help="run commands from standard input, one a line", example="swe-rl sandbox shell --layer ."
    )
    shell.add_argument("--backend", choices=("local", "docker"), default="local", help="default local")
    shell.add_argument("--image", default="", help="image to enter; empty: this machine's own programs")
    shell.add_argument("--workdir", default="/testbed", metavar="DIR", help="where commands start (default /testbed)")
    shell.add_argument(
        "--layer", action="append", default=[], metavar="DIR", help="tree at the work directory; uppermost first"
    )
    shell.add_argument(
        "--timeout", type=float, default=30.0, metavar="SECONDS", help="limit of one command (default 30)"
    )
    shell.set_defaults(run=_shell)
    reap = commands.add_parser(
        "reap", help="remove what sandboxes of dead processes left", example="swe-rl sandbox reap"
    )
    reap.set_defaults(run=_reap)
    sandbox_images.add_parsers(commands.add_parser)
    return parser


def _shell(arguments: Namespace) -> int:
    spec = SandboxSpec(
        backend=arguments.backend,
        image=arguments.image,
        workdir=arguments.workdir,
        layers=tuple(arguments.layer),
        limits=Limits(command_s=arguments.timeout),
    )
    return asyncio.run(_read_commands(spec))


async def _read_commands(spec: SandboxSpec) -> int:
    """Each line is its own shell; exit code of the last one."""
    code = 0
    prompt = "sandbox$ " if sys.stdin.isatty() else ""
    async with open_sandbox(spec) as sandbox:
        while True:
            print(prompt, end="", flush=True)
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                return code
            if not line.strip():
                continue
            result = await sandbox.exec(line)
            sys.stdout.write(result.stdout.decode(errors="replace"))
            sys.stderr.write(result.stderr.decode(errors="replace"))
            if result.outcome not in ("ok", "nonzero"):
                print(f"[{result.outcome}]", file=sys.stderr)
            code = result.exit_code


def _reap(arguments: Namespace) -> int:
    from swe_rl.sandbox.reap import reap

    found = reap()
    print(
        f"removed {found.processes} processes, {found.cgroups} cgroups, {found.directories} directories, "
        f"{found.containers} containers"
    )
    return 0
