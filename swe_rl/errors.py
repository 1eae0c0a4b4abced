"""Whose failure is it? One tree; everything the package raises on purpose is in it.

SweRlError
├── ConfigError       the user's input is wrong: exit code 2, one line naming the key and the cure
│   └── ImageError           a container image is missing, damaged, or reaches out of itself
├── SandboxError      the machine's failure: retried, then the sample leaves its group; never a reward
│   ├── SandboxLost          the sandbox ended while a request was in flight
│   └── SandboxUnavailable   this machine cannot make one (no user namespaces, no launcher, ...)
├── EngineError       the inference engine failed; handled like SandboxError
│   └── EngineDead           it will never answer again: stop the run
├── PatchError        what the agent left cannot be made into, or is not, a patch: the agent's doing, scored
├── CheckpointError   a checkpoint is missing, partial or does not fit
└── InvariantError    a promise of the system was broken (token drift, non-finite logprob): stop the run
"""


class SweRlError(Exception):
    """Base of every deliberate error."""


class ConfigError(SweRlError, ValueError):
    """Bad argument, configuration or input file. The message is one line: what is wrong and the cure."""


class ImageError(ConfigError):
    """A container image is missing, damaged, or reaches out of itself; the message says which and what to do."""


class SandboxError(SweRlError):
    """Infrastructure trouble around a sandbox."""


class SandboxLost(SandboxError):
    """The sandbox or its stream ended while a request was in flight.

    `from_inside`: PID 1 was ended by something in the sandbox, as far as its owner can tell: it gave no reason, its
    lease was not over and nobody closed it. One such loss proves nothing yet; see sandbox/replay.py.
    """

    def __init__(self, message: str = "", *, from_inside: bool = False) -> None:
        super().__init__(message)
        self.from_inside = from_inside


class SandboxUnavailable(SandboxError, ConfigError):
    """Sandboxes of this kind cannot be made here; the message says why and what to set."""


class EngineError(SweRlError):
    """The inference engine failed."""


class EngineDead(EngineError):
    """The engine has ended by a failure of its own; every further request would fail, so no retry helps."""


class PatchError(SweRlError):
    """The agent's tree cannot be expressed as a patch, or the bytes are not one. `reason` is a short stable word."""

    def __init__(self, message: str, *, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


class CheckpointError(SweRlError):
    """A checkpoint is missing, partial or does not fit the model."""


class InvariantError(SweRlError, AssertionError):
    """A promise of the system was broken; training on would be silently wrong."""
