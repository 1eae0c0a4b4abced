"""Sandboxes: isolated machines in which untrusted commands run. Read local.py for what one is and promises."""

from swe_rl.sandbox.backends import open_sandbox
from swe_rl.sandbox.node_manager import SandboxPool

__all__ = ["SandboxPool", "open_sandbox"]
