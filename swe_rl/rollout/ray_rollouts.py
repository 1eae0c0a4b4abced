"""Rollouts on a Ray cluster: the driver keeps groups, journal and policy, the nodes play and grade.

One RolloutNode per node (no CPU reserved, bound to its node, restarted for ever when it dies), never an actor per
sandbox. A rollout whose node is lost is played again elsewhere under the same key and seeds; nothing of it was kept but
what the journal has, and nothing is scored. Ray is imported when a cluster is opened.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from swe_rl.config import TrainConfig
from swe_rl.errors import SandboxError
from swe_rl.protocols import Policy
from swe_rl.ray_connection import ray_connection
from swe_rl.rollout.journal import RolloutKey
from swe_rl.rollout.placement import NodeLoad, choose_node, environment_of
from swe_rl.rollout.ray_node import Reply, RolloutNode, RunnerSetup
from swe_rl.rollout.ray_relay import Failure, PolicyRelay, PolicyServer
from swe_rl.rollout.runner import grading_lost, not_begun
from swe_rl.types import Task, Trajectory

log = logging.getLogger(__name__)

MAX_CALLS = 100_000  # of an actor at a time; what runs at a time is bounded by the sandbox pools
WATCH_S = 2.0  # between two looks at which nodes there are
NO_NODE_S = 120.0  # how long a rollout waits for a node before it counts as lost
LOST_NODES = 5  # nodes that a rollout may lose before it counts as lost itself
START_S = 120.0
CLOSE_S = 15.0
TASKS_KEPT = 512  # in the object store


@dataclass(slots=True)
class _Node:
    node_id: str
    actor: Any
    load: NodeLoad
    suspect: bool = False  # a call failed; taken again when it answers


@dataclass(slots=True)
class RayCluster:
    """The nodes of a run. Open one with `open_cluster`."""

    cfg: TrainConfig
    run_id: str
    counts: Counter[str] = field(default_factory=Counter)  # of all nodes, see sandbox/stats.py
    nodes: dict[str, _Node] = field(default_factory=dict)  # by Ray's node id
    _relay: Any = None
    _server: PolicyServer | None = None
    _changed: asyncio.Event = field(default_factory=asyncio.Event)
    _watch: asyncio.Task[None] | None = None
    _checks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def server(self) -> PolicyServer:
        assert self._server is not None
        return self._server

    @property
    def places(self) -> int:
        """Episodes that all nodes together play at a time."""
        return max(1, len(self.nodes)) * self.cfg.sandbox.concurrency

    async def start(self) -> None:
        """Starts the relay beside the driver and one actor on each node. Raises SandboxError when no node answers."""
        import ray

        self._relay = (
            ray.remote(PolicyRelay)
            .options(**_pinned(ray.get_runtime_context().get_node_id()), max_restarts=-1)
            .remote()
        )
        self._server = PolicyServer(self._relay)
        await self._look()
        await self._first_node()
        self._watch = asyncio.create_task(self._keep_looking(), name="ray-nodes")

    async def close(self) -> None:
        """Ends sandboxes and actors. Idempotent."""
        import ray

        tasks = [*self._checks, *([self._watch] if self._watch else [])]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        if self._server is not None:
            await self._server.close()
        with suppress(Exception):  # a node that does not answer any more cannot be asked to tidy up: its leases do it
            last = asyncio.gather(*(node.actor.close.remote() for node in self.nodes.values()), return_exceptions=True)
            for counts in await asyncio.wait_for(last, CLOSE_S):
                if isinstance(counts, Counter):
                    self.counts.update(counts)
        for actor in [*(node.actor for node in self.nodes.values()), self._relay]:
            ray.kill(actor)
        self.nodes.clear()

    async def place(self, environment: str) -> _Node:
        """The node for one more rollout, charged with it. Raises SandboxError when none appears in NO_NODE_S."""
        await asyncio.wait_for(self._any_node(), NO_NODE_S)
        usable = self.usable()
        node = usable[choose_node([node.load for node in usable], environment)]
        node.load.in_flight += 1
        node.load.placed += 1
        node.load.learn(environment)
        return node

    def lost(self, node: _Node) -> None:
        """A call to that node failed with it: nothing goes there until it answers again."""
        self.counts["nodes_lost"] += not node.suspect
        node.suspect = True

    def usable(self) -> list[_Node]:
        """Nodes that answer, as far as is known."""
        return [node for node in self.nodes.values() if not node.suspect]

    async def _first_node(self) -> None:
        try:
            await asyncio.wait_for(self._any_node(), START_S)
        except TimeoutError as err:
            raise SandboxError(
                f"none of the {len(self.nodes)} nodes of the Ray cluster was ready after {START_S:.0f} s: is swe_rl "
                "installed there, and is there memory for one more process?"
            ) from err

    async def _any_node(self) -> None:
        while not self.usable():
            self._changed.clear()
            await self._changed.wait()

    async def _keep_looking(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            await self._look()

    async def _look(self) -> None:
        """Takes up new nodes, lets go of those that Ray gave up, and asks suspects whether they are back."""
        import ray

        alive = {node["NodeID"] for node in await asyncio.to_thread(ray.nodes) if node["Alive"]}
        for node_id in set(self.nodes) - alive:
            del self.nodes[node_id]
            self.counts["nodes_gone"] += 1
        for node_id in sorted(alive - set(self.nodes)):
            actor = ray.remote(RolloutNode).options(**_pinned(node_id), max_restarts=-1)
            made = actor.remote(self.cfg.sandbox, self._relay, run_id=self.run_id)
            self.nodes[node_id] = _Node(node_id, made, NodeLoad(self.cfg.sandbox.concurrency), suspect=True)
        for node in self.nodes.values():
            if node.suspect:
                check = asyncio.create_task(self._check(node))
                self._checks.add(check)
                check.add_done_callback(self._checks.discard)

    async def _check(self, node: _Node) -> None:
        from ray.exceptions import RayError

        try:
            pid, counts = await node.actor.ready.remote()
        except RayError as err:
            log.warning("node %s does not answer: %s", node.node_id[:8], type(err).__name__)
            return
        self.counts.update(counts)
        if node.suspect:
            log.info("node %s is ready (process %d)", node.node_id[:8], pid)
        node.suspect = False
        self._changed.set()


def _pinned(node_id: str) -> dict[str, Any]:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    return {"num_cpus": 0, "max_concurrency": MAX_CALLS, "scheduling_strategy": where}


class RemoteRunner:
    """Implements collector.Runner on the nodes of a cluster."""

    def __init__(self, cluster: RayCluster, policy: Policy, setup: Callable[[str], RunnerSetup]) -> None:
        """`setup` makes the set-up for the channel on which `policy` is served."""
        import ray

        self._cluster = cluster
        self._channel = cluster.server.serve(policy)
        self._setup = [ray.put(setup(self._channel))]
        self._tasks: OrderedDict[str, Any] = OrderedDict()
        self.retried = 0

    def sandbox_counts(self) -> Counter[str]:
        return Counter(self._cluster.counts)

    async def expect(self, tasks: Sequence[Task], copies: int) -> None:
        """Tells each node which tasks it is likely to get."""
        if not self._cluster.cfg.sandbox.warm:
            return
        nodes = self._cluster.usable()
        for index, node in enumerate(nodes):
            own = list(tasks[index :: len(nodes)])
            for task in own:
                node.load.learn(environment_of(task))
            node.actor.expect.remote(self._setup, self._channel, own, copies)

    async def play(self, task: Task, key: RolloutKey, *, temperature: float) -> Trajectory:
        """As RolloutRunner.play; a lost node is a repeated attempt."""
        found = await self._call("play", task, key, temperature, session=key.trajectory_id)
        if isinstance(found, SandboxError):
            return not_begun(key, temperature, detail=repr(found))
        return found

    async def grade(self, task: Task, trajectory: Trajectory) -> Trajectory:
        """As RolloutRunner.grade."""
        if trajectory.patch is None or trajectory.reward is not None:
            return trajectory
        found = await self._call("grade", task, trajectory)
        if isinstance(found, SandboxError):
            return grading_lost(trajectory, found)
        return found

    async def _call(self, name: str, task: Task, *arguments: Any, session: str = "") -> Trajectory | SandboxError:
        from ray.exceptions import RayError

        why = ""
        for attempt in range(LOST_NODES + 1):
            self.retried += attempt > 0
            try:
                node = await self._cluster.place(environment_of(task))
            except TimeoutError:
                return SandboxError(f"no node of the Ray cluster answers{why}")
            reference = getattr(node.actor, name).remote(self._setup, self._channel, self._reference(task), *arguments)
            try:
                return self._taken(await reference)
            except asyncio.CancelledError:
                _cancel(reference)
                raise
            except RayError as err:
                if not _is_loss(err):
                    raise
                why = f", the last one lost by {type(err).__name__}"
                self._cluster.lost(node)
                if session:
                    await self._cluster.server.forget(self._channel, session)
            finally:
                node.load.in_flight -= 1
        return SandboxError(f"{LOST_NODES + 1} nodes in a row were lost{why}")

    def _taken(self, reply: Reply) -> Trajectory:
        self._cluster.counts.update(reply.counts)
        self.retried += reply.retried
        if isinstance(reply.trajectory, Failure):
            raise reply.trajectory.exception()
        return reply.trajectory

    def _reference(self, task: Task) -> Any:
        """The task in the object store: a tree travels once per node, not once per rollout."""
        import ray

        if task.task_id not in self._tasks:
            self._tasks[task.task_id] = ray.put(task)
        self._tasks.move_to_end(task.task_id)
        while len(self._tasks) > TASKS_KEPT:
            self._tasks.popitem(last=False)
        return self._tasks[task.task_id]


def _is_loss(err: Exception) -> bool:
    """Whether a node, its actor or an object went away, as opposed to an exception in the actor's code."""
    from ray.exceptions import NodeDiedError, ObjectLostError, RayActorError, WorkerCrashedError

    return isinstance(err, RayActorError | NodeDiedError | ObjectLostError | WorkerCrashedError)


def _cancel(reference: Any) -> None:
    import ray

    with suppress(ray.exceptions.RayError):
        ray.cancel(reference)


@asynccontextmanager
async def open_cluster(cfg: TrainConfig, *, run_id: str) -> AsyncIterator[RayCluster]:
    """The rollouts on the cluster of `rollout.ray_address`, see ray_connection for who else it may be. Raises
    ConfigError when Ray is not installed or the address does not answer."""
    async with ray_connection(cfg.rollout.ray_address):
        cluster = RayCluster(cfg, run_id)
        try:
            await cluster.start()
            yield cluster
        finally:
            await cluster.close()
