"""Turns what Hydra and OmegaConf raise into one line that names the key, the nearest known key and the cure."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, ListConfig, OmegaConf
from yaml import MarkedYAMLError

FULL_KEY = re.compile(r"full_key: (\S+)")
IN_FILE = re.compile(r"In '([^']+)': ")
UNKNOWN = re.compile(r"Key '([^']+)' (?:is )?not in ('?[\w]+'?)")
INDEX = re.compile(r"\[(\d+)\]")
HEADLINES = ("Error merging override", "Could not override", "To append to", "In '")
EXPECTED = (  # what OmegaConf says when a value does not fit -> what to give instead
    ("converted to Integer", "an integer"),
    ("converted to Float", "a number"),
    ("not a valid bool", "true or false"),
    ("is not Optional", "a value, not null"),
    ("str is not a subclass of", "a value for one of its keys (KEY.NAME=value)"),
    ("does not support deletion", "a value: keys cannot be removed with ~"),
    ("Invalid value assigned: ", "a value of the type that the key has by default"),
)


def explain(err: Exception, *, known_keys: Sequence[str]) -> str:
    """One line for any exception of composing a configuration.

    known_keys: every dotted key of the schema, list elements as `*` (see `dotted_keys`), and every group name.
    """
    text = "\n".join(str(e) for e in _chain(err))
    if isinstance(err, MissingConfigException) and err.missing_cfg_file is not None:
        return _missing_option(str(err.missing_cfg_file), list(err.options or ()))
    if isinstance(err, OverrideParseException):
        reason = text.splitlines()[1] if text.startswith("Error parsing") else text.splitlines()[0]
        return f"the override {err.override!r} cannot be read ({reason}): write key=value, and quote special characters"
    if isinstance(err, MarkedYAMLError):
        return f"a configuration file is no valid YAML: {' '.join(str(err).split())}"
    if "Ambiguous value for argument" in text:
        argument = text.split("'")[1]
        return f"{argument} has several values: add -m to run one job for each, or write [a,b] for a list"
    return _key_error(text, known_keys=known_keys)


def unknown_key(key: str, *, known_keys: Sequence[str], where: str = "") -> str:
    """The line for a key that the schema does not have."""
    near = suggest(key, known_keys)
    cure = f"did you mean {near}?" if near else "--help lists the keys"
    return f"{where}{key} is no configuration key: {cure}"


def suggest(key: str, known_keys: Iterable[str]) -> str | None:
    """The known key nearest to `key`: same leaf in another group, then by likeness of the whole, then of the leaf."""
    indices = re.findall(r"(?<=\.)\d+(?=\.|$)", key)
    pattern = re.sub(r"(?<=\.)\d+(?=\.|$)", "*", key)
    known = sorted(set(known_keys) - {pattern})
    leaf = pattern.rsplit(".", 1)[-1]
    same_leaf = [k for k in known if k.rsplit(".", 1)[-1] == leaf]
    near = same_leaf[:1] or difflib.get_close_matches(pattern, known, n=1, cutoff=0.75)
    if not near:
        leaves = {k.rsplit(".", 1)[-1]: k for k in reversed(known)}
        near = [leaves[match] for match in difflib.get_close_matches(leaf, leaves, n=1, cutoff=0.7)]
    if not near:
        return None
    for index in indices:
        near[0] = near[0].replace("*", index, 1)
    return near[0]


def dotted_keys(config: Any, *, prefix: str = "") -> Iterator[str]:
    """Every key below a DictConfig, groups included; values are not resolved."""
    for name in config:
        key = f"{prefix}{name}"
        yield key
        child = None if OmegaConf.is_missing(config, name) else config._get_node(name)
        if isinstance(child, DictConfig):
            yield from dotted_keys(child, prefix=f"{key}.")
        elif isinstance(child, ListConfig) and hasattr(child._metadata.element_type, "__dataclass_fields__"):
            yield from dotted_keys(OmegaConf.structured(child._metadata.element_type), prefix=f"{key}.*.")


def _chain(err: BaseException | None) -> Iterator[BaseException]:
    while err is not None:
        yield err
        err = err.__cause__


def _missing_option(missing: str, options: list[str]) -> str:
    group, _, name = missing.rpartition("/")
    near = difflib.get_close_matches(name, options, n=1)
    cure = f"did you mean {near[0]}? " if near else ""
    return f"{group}={name} does not exist: {cure}there is {', '.join(options) or 'no such group'}"


def _key_error(text: str, *, known_keys: Sequence[str]) -> str:
    found = FULL_KEY.search(text)
    key = INDEX.sub(r".\1", found.group(1)) if found else ""
    file = IN_FILE.search(text)
    where = f"conf/{file.group(1)}.yaml: " if file else ""
    unknown = UNKNOWN.search(text)
    if unknown and "not in struct" in text and key.rpartition(".")[0] in known_keys:
        return f"{where}{key} is a new entry of {key.rpartition('.')[0]}: write +{key}=value to add it"
    if unknown and unknown.group(2).strip("'") == "PhaseConfig" and "." not in key:
        key = f"phases.*.{key}"
    if unknown:
        return unknown_key(key, known_keys=known_keys, where=where)
    reason = next((line for line in text.splitlines() if line and not line.startswith(HEADLINES)), text.splitlines()[0])
    expected = next((what for mark, what in EXPECTED if mark in text), None)
    cure = f": give {expected}" if expected else ""
    return f"{where}{key or 'configuration'}: {reason.strip(' .')}{cure}"
