"""Command results as text for the policy: short, printable, and honest about limits."""

from __future__ import annotations

import re

from swe_rl.types import ExecResult, Outcome


class ToolError(Exception):
    """A call of the policy cannot be carried out; the message is the observation."""


# CSI, OSC (ended by BEL or ST), and two-character escapes.
_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)?|[@-Z\\^_])")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LIMITS: dict[Outcome, str] = {
    "timeout": "timeout: killed after {seconds:.0f} s",
    "oom": "killed: out of memory",
    "pids_limit": "killed: too many processes",
    "disk_full": "disk full",
    "output_limit": "killed: too much output",
    "lost": "the sandbox ended",
}


def clean_text(data: bytes) -> str:
    """Bytes of a terminal as plain text: invalid UTF-8 replaced, escape sequences and control characters removed, and
    of a progress line that was overwritten by carriage returns only the last state."""
    text = _ANSI.sub("", data.decode("utf-8", "replace")).replace("\r\n", "\n")
    if "\r" in text:
        text = "\n".join(line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return _CONTROL.sub("", text)


def describe(result: ExecResult) -> str:
    """Output, then the status line where it says something: a limit, a non-zero exit code, or success without
    output."""
    parts = [clean_text(stream).rstrip("\n") for stream in (result.stdout, result.stderr)]
    text = "\n".join(part for part in parts if part)
    if result.outcome in _LIMITS:
        status = _LIMITS[result.outcome].format(seconds=result.duration_s)
    elif result.exit_code != 0 or not text:
        status = f"exit {result.exit_code}"
    else:
        status = ""
    return "\n".join(part for part in (text, status) if part)
