"""An entry of the list of hosts that sandboxes may reach: configuration and proxy read it alike."""

from __future__ import annotations

import ipaddress
import re

from swe_rl.errors import ConfigError

_HOST = re.compile(r"(?!-)[a-z0-9-]+(\.[a-z0-9-]+)*\.?", re.ASCII)


def egress_pair(entry: str) -> tuple[str, int]:
    """(host in lower case, port) of "host:port" or "[IPv6]:port". ConfigError for anything else."""
    host, _, port = entry.rpartition(":")
    host = host.lower()
    cure = f"sandbox.egress: {entry[:100]!r} must be host:port, as files.example.org:443; no patterns"
    if not (port.isascii() and port.isdigit() and len(port) <= 5 and 0 < int(port) < 65536):
        raise ConfigError(cure)
    if host.startswith("[") and host.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(host[1:-1])), int(port)
        except ValueError:
            raise ConfigError(cure) from None
    if len(host) > 253 or not _HOST.fullmatch(host):
        raise ConfigError(cure)
    if host == "localhost":
        raise ConfigError(f"sandbox.egress: {entry!r} is this machine: list its address, 127.0.0.1, if that is meant")
    return host.rstrip("."), int(port)
