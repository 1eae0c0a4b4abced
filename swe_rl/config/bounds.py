"""What a group of configuration keys declares about single values, and the check of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from swe_rl.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Allowed values of the keys of one group; a key may stand in several of them."""

    choices: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    positive: tuple[str, ...] = ()
    not_negative: tuple[str, ...] = ()
    at_most_one: tuple[str, ...] = ()

    def check(self, group: Any, name: str) -> None:
        """ConfigError for the first key of `group` that is out of bounds; `name` is the group's ("" at the root)."""
        prefix = f"{name}." if name else ""
        for key, allowed in self.choices.items():
            if getattr(group, key) not in allowed:
                raise ConfigError(f"{prefix}{key}={getattr(group, key)!r} is unknown: use one of {', '.join(allowed)}")
        for key in self.positive:  # written so that NaN is refused as well
            if not getattr(group, key) > 0:
                raise ConfigError(f"{prefix}{key} must be positive, got {getattr(group, key)}")
        for key in self.not_negative:
            if not getattr(group, key) >= 0:
                raise ConfigError(f"{prefix}{key} must be 0 or more, got {getattr(group, key)}")
        for key in self.at_most_one:
            if not getattr(group, key) <= 1:
                raise ConfigError(f"{prefix}{key} must be between 0 and 1, got {getattr(group, key)}")
