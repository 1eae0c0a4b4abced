"""`--help` of the commands that take Hydra overrides: usage, example, the choices in conf/, every key and default."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

from swe_rl.cli.dispatch import COMMANDS
from swe_rl.cli.hydra_entry import groups

OPTIONS = """\
options:
  -h, --help         this text
  --cfg              print the resolved configuration and stop
  -m, --multirun     one job for each combination of `a,b`, choice(a,b) and range(start,stop,step) values, each in its
                     own process tree; repeated with the same run_dir=DIR, jobs that ended well are not run again
  --jobs N           with -m: so many jobs at a time (default 1)
  --nproc-per-job N  with -m: each job under torchrun, with so many processes
  --trials N         with -m: so many jobs that optuna chooses; values may be interval(low,high), on a logarithmic
                     scale tag(log,interval(low,high)), too
  --metric NAME      with -m: the column of DIR/results.csv to maximise and print (default: the last result)
  --config-dir DIR   a directory with configuration groups of your own, for example DIR/experiment/mine.yaml"""


def help_text(command: str, schema: type[Any]) -> str:
    """The whole page for one command."""
    entry = COMMANDS[command.partition(" ")[0]]
    choices = [f"  {group}={'|'.join(names)}" for group, names in groups().items()]
    return "\n".join(
        [
            f"usage: swe-rl {command} [options] [key=value ...]",
            "",
            entry.summary[0].upper() + entry.summary[1:] + ".",
            "",
            f"example:\n  {entry.example}",
            "",
            OPTIONS,
            "",
            "choices:",
            *choices,
            "",
            "keys and their defaults (what each means: swe_rl/config/):",
            *_key_lines(OmegaConf.structured(schema), prefix="  "),
        ]
    )


def _key_lines(config: DictConfig, *, prefix: str) -> list[str]:
    lines = []
    for name in map(str, config):
        child = config._get_node(name)
        if isinstance(child, DictConfig) and child._metadata.object_type not in (dict, None):
            lines += _key_lines(child, prefix=f"{prefix}{name}.")
        else:
            lines.append(f"{prefix}{name}={_plain(child)}")
    return lines


def _plain(node: Any) -> str:
    value = OmegaConf.to_container(node) if OmegaConf.is_config(node) else node._value()
    return str(value).replace("'", "") if not isinstance(value, bool) else str(value).lower()
