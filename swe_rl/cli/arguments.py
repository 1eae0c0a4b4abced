"""argparse with this package's manners: a bad argument is one line and exit code 2, and help ends with an example."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from swe_rl.errors import ConfigError


class ArgumentParser(argparse.ArgumentParser):
    """Raises ConfigError instead of printing usage; dispatch turns it into one line and exit code 2.

    Also the class of its subparsers: `parser.add_subparsers().add_parser("build", example="swe-rl tasks build ...")`.
    """

    def __init__(self, *, example: str = "", **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        kwargs.setdefault("allow_abbrev", False)
        super().__init__(epilog=f"example:\n  {example}" if example else None, **kwargs)

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} ({self.prog} --help)")
