"""Sandboxes: isolated machines in which untrusted commands run. Read local.py for what one is and promises."""

from swe_rl.sandbox.pool import SandboxPool, open_sandbox

__all__ = ["SandboxPool", "open_sandbox"]
