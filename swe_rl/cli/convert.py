"""`swe-rl convert SOURCE TARGET`: models between Hugging Face's form and that of Megatron ranks."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from swe_rl.cli.arguments import ArgumentParser
from swe_rl.errors import ConfigError

DESCRIPTION = """\
Converts a model between a Hugging Face directory and a directory of Megatron ranks, exactly: every bit and dtype stays.
What SOURCE is, is seen from its files. Families: Qwen2.5, Qwen3 (dense and mixture of experts), Llama 3, SmolLM2.
One tensor is in memory at a time. TARGET must not exist; it appears when it is complete."""
LAYOUT = {
    "tensor-parallel": ("TP", "tensor parallel ranks"),
    "pipeline-parallel": ("PP", "pipeline parallel ranks"),
    "virtual-pipeline": ("VP", "model chunks of each pipeline rank (interleaved schedule)"),
    "expert-parallel": ("EP", "expert parallel ranks; experts are cut over TP too"),
    "vocab-multiple": ("N", "the vocabulary is padded to a multiple of N times TP"),
}


def main(argv: Sequence[str]) -> int:
    """Entry point of `swe-rl convert`."""
    parser = ArgumentParser(
        prog="swe-rl convert",
        description=DESCRIPTION,
        example="swe-rl convert Qwen3-32B ranks --tensor-parallel 8 --pipeline-parallel 2 && swe-rl convert ranks back",
    )
    parser.add_argument("source", metavar="SOURCE", type=Path, help="the directory to read")
    parser.add_argument("target", metavar="TARGET", type=Path, help="the directory to write")
    parser.add_argument("--to", choices=("hf", "megatron"), help="default: the form that SOURCE does not have")
    for name, (metavar, what) in LAYOUT.items():
        default = 128 if name == "vocab-multiple" else 1
        parser.add_argument(f"--{name}", metavar=metavar, type=int, help=f"--to megatron: {what} (default {default})")
    parser.add_argument(
        "--modules", choices=("local", "te"), help="--to megatron: megatron-core's own modules (default), or TE's"
    )
    arguments = parser.parse_args(argv)

    from swe_rl.training.megatron import convert
    from swe_rl.training.megatron.convert_units import MegatronLayout

    if not arguments.source.is_dir():
        raise ConfigError(f"SOURCE {arguments.source} is no directory")
    form = arguments.to or ("hf" if (arguments.source / convert.MANIFEST).is_file() else "megatron")
    names = [*LAYOUT, "modules"]
    given = {name.replace("-", "_"): getattr(arguments, name.replace("-", "_")) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    if form == "hf":
        if given:
            raise ConfigError(f"--{next(iter(given)).replace('_', '-')} does nothing for --to hf: remove it")
        convert.to_hf(arguments.source, arguments.target, progress=_progress())
    else:
        layout = MegatronLayout(**given)
        convert.to_megatron(arguments.source, arguments.target, layout, progress=_progress())
    print(arguments.target)
    return 0


def _progress() -> Callable[[float], None]:
    """Share done: one line that changes on a terminal, else a line at most every ten seconds; on standard error."""
    terminal, last = sys.stderr.isatty(), time.monotonic()

    def show(share: float) -> None:
        nonlocal last
        if terminal:
            print(f"\rconverted {share:4.0%}", end="\n" if share >= 1 else "", file=sys.stderr, flush=True)
        elif time.monotonic() - last >= 10:
            last = time.monotonic()
            print(f"converted {share:.0%}", file=sys.stderr, flush=True)

    return show
