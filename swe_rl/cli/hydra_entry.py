"""From command-line words to a checked configuration object: Hydra's compose API over conf/ and the dataclass schema.

conf/<config_name>.yaml lists `<config_name>_schema` first in its defaults; group files live in conf/<group>/, and
experiment files (`# @package _global_`) in conf/experiment/. `--config-dir DIR` adds a directory of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import product
from pathlib import Path
from typing import Any, Generic, TypeVar

from hydra import compose, initialize_config_module
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from swe_rl.cli.config_errors import dotted_keys, explain, unknown_key
from swe_rl.errors import ConfigError

C = TypeVar("C")
SWEEP_NUMBERS = ("--jobs", "--nproc-per-job", "--trials")  # options with a number, of -m only
CONFIG_MODULE = "swe_rl.conf"


@dataclass(frozen=True, slots=True)
class Composed(Generic[C]):
    config: C
    yaml: str  # resolved, as run directories keep it
    choices: Mapping[str, str]  # group -> chosen option, for example {"experiment": "smoke"}

    @property
    def label(self) -> str:
        """A short name for what runs: the experiment, else "custom"."""
        return self.choices.get("experiment") or "custom"


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The words before Hydra's: everything else on the command line is an override."""

    overrides: tuple[str, ...]
    help: bool = False
    show_config: bool = False
    multirun: bool = False
    config_dir: str = ""
    jobs: int = 1  # of a sweep at a time
    nproc_per_job: int = 0  # processes of each job of a sweep, under torchrun; 0: one, without it
    trials: int = 0  # jobs that optuna chooses; 0: every combination
    metric: str = ""  # column of the results table that is maximised and printed; "": the last result


def compose_config(schema: type[C], config_name: str, overrides: Sequence[str], *, config_dir: str = "") -> C:
    """The configuration object for these overrides. ConfigError (one line: key, suggestion, cure) for any mistake."""
    return compose_all(schema, config_name, overrides, config_dir=config_dir).config


def compose_all(schema: type[C], config_name: str, overrides: Sequence[str], *, config_dir: str = "") -> Composed[C]:
    """As `compose_config`, with the resolved YAML and the chosen group options."""
    ConfigStore.instance().store(f"{config_name}_schema", schema)
    known = [*dotted_keys(OmegaConf.structured(schema)), *groups()]
    searchpath = [f"hydra.searchpath=[file://{Path(config_dir).absolute()}]"] if config_dir else []
    if config_dir and not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir} is no directory")
    _refuse_empty_keys(overrides)
    try:
        with initialize_config_module(CONFIG_MODULE, version_base="1.3"):
            composed = compose(config_name, [*overrides, *searchpath], return_hydra_config=True)
        chosen = OmegaConf.to_container(composed.hydra.runtime.choices)
        config = _strict(composed, schema, known)
        return Composed(OmegaConf.to_object(config), OmegaConf.to_yaml(config, resolve=True), _own_choices(chosen))  # type: ignore[arg-type]
    except (HydraException, OmegaConfBaseException, YAMLError) as err:
        raise ConfigError(explain(err, known_keys=known)) from err


def hydra_main(
    argv: Sequence[str],
    *,
    command: str,
    schema: type[C],
    config_name: str,
    run: Callable[[Composed[C]], int | None],
    validate: Callable[[C], None] | None = None,
) -> int:
    """The whole life of a Hydra command: --help, --cfg, -m (one process tree per job), or `run(composed)`."""
    options = parse_options(argv)

    def check(words: Sequence[str]) -> Composed[C]:
        composed = compose_all(schema, config_name, words, config_dir=options.config_dir)
        if validate is not None:
            validate(composed.config)
        return composed

    if options.help:
        from swe_rl.cli.hydra_help import help_text

        print(help_text(command, schema))
        return 0
    if options.multirun:
        from swe_rl.cli.sweep import run_sweep

        return run_sweep(options, command=command, check=check)
    composed = check(options.overrides)
    if options.show_config:
        print(composed.yaml, end="")
        return 0
    return run(composed) or 0


def parse_options(argv: Sequence[str]) -> Options:
    """Separates our options from Hydra's overrides. ConfigError for an unknown option."""
    overrides: list[str] = []
    flags: dict[str, Any] = {}
    words = list(argv)
    while words:
        word = words.pop(0)
        name, _, value = word.partition("=")
        if word in ("-h", "--help"):
            flags["help"] = True
        elif word in ("-m", "--multirun"):
            flags["multirun"] = True
        elif name in ("-c", "--cfg"):
            flags["show_config"] = True
            if not value and words and words[0] == "job":  # as `--cfg job` is spelt with Hydra's own entry point
                words.pop(0)
        elif name == "--config-dir":
            if not value and not words:
                raise ConfigError("--config-dir needs a directory")
            flags["config_dir"] = value or words.pop(0)
        elif name in SWEEP_NUMBERS or name == "--metric":
            if not value and not words:
                raise ConfigError(f"{name} needs a value")
            flags[name.lstrip("-").replace("-", "_")] = _sweep_value(name, value or words.pop(0))
        elif word.startswith("-"):
            raise ConfigError(f"{word} is no option: use key=value, -m, --cfg, --config-dir DIR or --help")
        else:
            overrides.append(word)
    options = Options(overrides=tuple(overrides), **flags)
    for name in (*SWEEP_NUMBERS, "--metric"):
        if name.lstrip("-").replace("-", "_") in flags and not options.multirun:
            raise ConfigError(f"{name} is for sweeps: add -m")
    return options


def _sweep_value(name: str, text: str) -> int | str:
    if name == "--metric":
        return text
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name} needs a number of at least 1, got {text!r}")
    return int(text)


def groups() -> dict[str, list[str]]:
    """Every group of conf/ and its options by file name."""
    root = resources.files(CONFIG_MODULE)
    found: dict[str, list[str]] = {}
    for folder in sorted(root.iterdir(), key=lambda entry: entry.name):
        if folder.is_dir() and not folder.name.startswith("_"):
            found[folder.name] = sorted(
                e.name.removesuffix(".yaml") for e in folder.iterdir() if e.name.endswith(".yaml")
            )
    return found


def sweep_jobs(overrides: Sequence[str]) -> list[tuple[str, ...]]:
    """One tuple of overrides per job: the product of all sweeps, the last one varies fastest."""
    axes: list[list[str]] = []
    for override in _parsed(overrides):
        if not override.is_sweep_override():
            axes.append([str(override.input_line)])
        elif not (override.is_choice_sweep() or override.is_range_sweep()):
            raise ConfigError(
                f"{override.input_line}: sweeps take a,b lists, choice(...) and range(...); "
                "interval(...) needs --trials N"
            )
        else:
            axes.append([f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator()])
    return list(product(*axes))


def fixed_and_swept(overrides: Sequence[str]) -> tuple[list[str], list[Any]]:
    """(overrides with one value, Hydra's parsed overrides with several)."""
    parsed = _parsed(overrides)
    fixed = [str(item.input_line) for item in parsed if not item.is_sweep_override()]
    return fixed, [item for item in parsed if item.is_sweep_override()]


def _parsed(overrides: Sequence[str]) -> list[Any]:
    try:
        return list(OverridesParser.create().parse_overrides(list(overrides)))
    except HydraException as err:
        raise ConfigError(explain(err, known_keys=())) from err


def _strict(composed: DictConfig, schema: type[Any], known: Sequence[str]) -> DictConfig:
    """The composed tree merged into a fresh schema: `+` and `++` add nothing that no component would read."""
    container: dict[str, Any] = OmegaConf.to_container(composed, resolve=False)  # type: ignore[assignment]
    container.pop("hydra", None)
    fresh = OmegaConf.structured(schema)
    for key in container:
        if key not in fresh:
            raise ConfigError(unknown_key(key, known_keys=known))
    for key in fresh:
        if key not in container:
            raise ConfigError(f"~{key} takes a group away that the schema needs: set its keys instead")
    return OmegaConf.merge(fresh, container)  # type: ignore[return-value]


def _refuse_empty_keys(overrides: Sequence[str]) -> None:
    for word in overrides:
        if not word.lstrip("+~").partition("=")[0].strip():
            raise ConfigError(f"the override {word!r} names no key: write key=value")


def _own_choices(chosen: Any) -> dict[str, str]:
    return {k: v for k, v in chosen.items() if not k.startswith("hydra") and isinstance(v, str)}
