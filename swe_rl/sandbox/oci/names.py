"""Names of images: `python`, `docker.io/library/python:latest` and `index.docker.io/library/python` are one."""

from __future__ import annotations

import re

from swe_rl.errors import ConfigError

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_HEX = re.compile(r"(?:sha256:)?([0-9a-f]{12,64})")
_DEFAULTS = ("docker.io/library/", "index.docker.io/library/", "docker.io/", "index.docker.io/")


def normal_name(name: str) -> str:
    """The shortest form, with a tag. Raises ConfigError for what no image can be called."""
    short = name.strip()
    for prefix in _DEFAULTS:
        if short.startswith(prefix):
            short = short.removeprefix(prefix)
            break
    if (
        not short
        or re.search(r"[\s\0-\x1f\ud800-\udfff]", short)
        or short.startswith(("/", "-"))
        or short.endswith((":", "/", "@"))
    ):
        raise ConfigError(f"{name!r} is no image name: use NAME:TAG or sha256:DIGEST")
    repository, _, last = short.rpartition("/")
    if ":" not in last and "@" not in last:
        last += ":latest"
    return f"{repository}/{last}" if repository else last


def digest_prefix(reference: str) -> str:
    """The hexadecimal digits when `reference` is a digest or the start of one (12 digits or more), "" otherwise. Of
    NAME@DIGEST it is the digest."""
    found = _HEX.fullmatch(reference.rpartition("@")[2])
    return found.group(1) if found else ""


def is_digest(text: str) -> bool:
    """Whether it is "sha256:" and 64 hexadecimal digits, the one kind of digest that is supported."""
    return _DIGEST.fullmatch(text) is not None
