"""R2E-Gym's way of reading test output: the lines below "short test summary info", names from the first "::" on."""

from __future__ import annotations

import re
from collections.abc import Mapping

_COLOUR = re.compile(r"\x1b\[\d+m")
_SUMMARY = "short test summary info"
_STATUSES = ("PASSED", "FAILED", "ERROR")  # searched for in this order


def comparable(statuses: Mapping[str, str]) -> dict[str, str]:
    """A map of statuses as upstream compares it: names without colours and cut at " - " (a parametrisation with that
    in it, too), statuses in lower case. Names that fall together keep the status of the last one in sorted order."""
    plain = {_COLOUR.sub("", name): status.lower() for name, status in statuses.items()}
    return {name.split(" - ")[0]: plain[name] for name in sorted(plain)}


def parse_r2e_log(log: str) -> dict[str, str]:
    """Test name -> "passed", "failed" or "error", for `comparable`; empty when the output has no summary.

    A name is what follows the first "::", so that equal names of different files fall together: so it is upstream, and
    so the expected maps were made. A result without "::" has the name "".
    """
    statuses: dict[str, str] = {}
    for line in "".join(log.split(_SUMMARY)[1:2]).strip().split("\n"):
        status = next((word for word in _STATUSES if word in line), None)
        if status is not None:
            name = ".".join(line.split("::")[1:])
            statuses[name if status == "PASSED" else name.split(" - ")[0]] = status.lower()
    return comparable(statuses)
