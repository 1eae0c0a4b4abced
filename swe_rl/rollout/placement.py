"""Which node plays a rollout: one that has its environment already, unless that node is much busier than another."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

from swe_rl.types import Task

MAX_KNOWN = 4096  # environments remembered per node
WORTH = 0.25  # of a node's places: so much busier may a node be that has the environment


@dataclass(slots=True)
class NodeLoad:
    """What the driver knows of one node."""

    places: int
    in_flight: int = 0
    placed: int = 0  # since the start
    known: OrderedDict[str, None] = field(default_factory=OrderedDict)  # environments, least recently used first

    @property
    def load(self) -> float:
        return self.in_flight / self.places

    def learn(self, environment: str) -> None:
        """The node has that environment from now on."""
        self.known[environment] = None
        self.known.move_to_end(environment)
        while len(self.known) > MAX_KNOWN:
            self.known.popitem(last=False)


def environment_of(task: Task) -> str:
    """What a node must have to play `task`, and keeps afterwards: its image, or its materialised tree."""
    return task.image or task.base_commit


def choose_node(nodes: Sequence[NodeLoad], environment: str) -> int:
    """Index of the node to take; of equally good ones the first. Raises ValueError when there is none."""
    if not nodes:
        raise ValueError("there is no node to choose from")
    return min(range(len(nodes)), key=lambda i: nodes[i].load + (0.0 if environment in nodes[i].known else WORTH))
