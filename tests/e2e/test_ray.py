"""Rollouts on a real Ray cluster: spread, lost processes and nodes, a killed driver, and the whole run unchanged."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from real_parts import require

from swe_rl.agents import FORMATS, ChatRenderer
from swe_rl.config import TrainConfig
from swe_rl.errors import SandboxUnavailable
from swe_rl.rollout import Collector
from swe_rl.rollout.journal import read_journal, read_parquet
from swe_rl.rollout.ray_node import RunnerSetup
from swe_rl.rollout.ray_rollouts import RayCluster, RemoteRunner, open_cluster
from swe_rl.rollout.wiring import rollout_parts
from swe_rl.sandbox import SandboxPool, open_sandbox
from swe_rl.tasks import load_tasks
from swe_rl.tasks.oracle import oracle_replacements
from swe_rl.testing import ByteTokenizer, ScriptedPolicy
from swe_rl.types import SandboxSpec, Task, Trajectory, TrajectoryGroup

pytestmark = pytest.mark.slow

XML = FORMATS["xml"]
PROGRAM = b"swe-sandboxd\0owner="
DEMONSTRATIONS = "{name: warm_start, data: demonstrations, num_tasks: 8, samples_per_task: 1, batch_size: 4}"
TINY = ["experiment=smoke", "threads=1", "algo.entropy_coeff=0.01"]
TINY += ["eval={splits: {heldout: 2}, base_tasks: 2, greedy_tasks: 0}"]
TINY += [f"phases=[{DEMONSTRATIONS},{{name: rl, data: rollouts, steps: 2, tasks_per_step: 2}}]"]


@pytest.fixture(scope="module")
def tasks() -> list[Task]:
    require(importlib.util.find_spec("ray") is not None, "package ray")
    asyncio.run(_need_sandboxes())
    return load_tasks("minirepo", split="train", num_tasks=6, seed=0)


async def _need_sandboxes() -> None:
    try:
        async with open_sandbox(SandboxSpec()):
            pass
    except SandboxUnavailable as err:
        require(False, f"a machine that allows sandboxes ({err})")


@pytest.fixture
def two_nodes(tasks: list[Task]) -> Iterator[Any]:
    """A cluster of two nodes on this machine; its address is in `.address`."""
    from ray.cluster_utils import Cluster

    options = {"num_cpus": 1, "object_store_memory": 80 << 20}
    cluster = Cluster(initialize_head=True, head_node_args={**options, "include_dashboard": False})
    cluster.second = cluster.add_node(**options)
    yield cluster
    cluster.shutdown()


def script(tasks: list[Task], seconds: float) -> Callable[[str, int], str]:
    """Even rollouts repair the code; all of them take `seconds` in one command."""
    by_id = {task.task_id: task for task in tasks}

    def text(session: str, turn: int) -> str:
        task_id, index = session.removeprefix("rl/0/").rsplit("/", 1)
        calls = [XML.render("bash", {"command": f"echo {index} > n; sleep {seconds}; cat n; rm n"})]
        if int(index) % 2 == 0:
            edits = oracle_replacements(by_id[task_id])
            calls += [XML.render("replace", {"path": e.path, "old": e.old, "new": e.new}) for e in edits]
        return [*calls, XML.render("submit", {})][turn]

    return text


def settings(address: str, places: int) -> TrainConfig:
    cfg = TrainConfig()
    cfg.agent.max_context_tokens, cfg.agent.max_turn_tokens, cfg.agent.max_observation_tokens = 60_000, 8000, 400
    cfg.rollout.backend, cfg.rollout.ray_address = "ray", address
    cfg.sandbox.concurrency = places
    return cfg


def collector_on(cluster: RayCluster, policy: ScriptedPolicy, trees: Path) -> Collector:
    renderer = ChatRenderer(ByteTokenizer())
    setup = partial(RunnerSetup, cfg=cluster.cfg, renderer=renderer, trees=str(trees))
    parts = rollout_parts(cluster.cfg, pool=SandboxPool(1), renderer=renderer, trees=trees)
    runner = RemoteRunner(cluster, policy, lambda channel: setup(channel=channel))
    return Collector(policy, parts=parts, concurrency=cluster.places, seed=0, runner=runner)


async def groups_of(collector: Collector, tasks: list[Task]) -> AsyncIterator[TrajectoryGroup]:
    async for group in collector.groups(tasks, group_size=4, phase="rl", step=0, ordered=True):
        yield group


def owners() -> set[int]:
    """Process ids of the owners of the launchers and supervisors on this machine, dead ones included."""
    found = set()
    for path in Path("/proc").iterdir():
        try:
            words = (path / "cmdline").read_bytes() if path.name.isdigit() else b""
        except OSError:
            continue
        if words.startswith(PROGRAM):
            found.add(int(words.removeprefix(PROGRAM).split(b"-")[0]))
    return found


def below(pid: int) -> dict[tuple[int, str], bytes]:
    """Command lines by (process id, start time) of all processes below `pid`."""
    found: dict[tuple[int, str], bytes] = {}
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, path.read_text().split()):
            if start := start_time(child):
                found |= {(child, start): Path(f"/proc/{child}/cmdline").read_bytes(), **below(child)}
    return found


def start_time(pid: int) -> str:
    """Tells a recycled process id apart; empty when the process is gone or only waits to be reaped."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if fields[0] == "Z" else fields[19]


def is_gone(process: tuple[int, str]) -> bool:
    return start_time(process[0]) != process[1]


async def until(condition: Callable[[], bool], *, seconds: float = 60) -> float:
    """Waits; returns how long it took."""
    start = time.monotonic()
    while not condition():
        assert time.monotonic() - start < seconds, "it did not happen"
        await asyncio.sleep(0.02)
    return time.monotonic() - start


async def node_pids(cluster: RayCluster) -> dict[str, int]:
    return {node_id: (await node.actor.ready.remote())[0] for node_id, node in cluster.nodes.items()}


def check(groups: list[TrajectoryGroup], tasks: list[Task]) -> None:
    assert [group.task_id for group in groups] == [task.task_id for task in tasks]
    for group in groups:
        rewards = [item.reward.value for item in group.trajectories if item.reward]
        assert [item.rollout_index for item in group.trajectories] == [0, 1, 2, 3]
        assert rewards == [1.0, 0.0, 1.0, 0.0]


async def test_work_spreads_and_lost_processes_and_nodes_lose_no_group(
    two_nodes: Any, tasks: list[Task], tmp_path: Path
) -> None:
    policy = ScriptedPolicy(script(tasks, 0.5))
    cfg = settings(two_nodes.address, 4)
    async with open_cluster(cfg, run_id="test") as cluster:
        await until(lambda: len(cluster.usable()) == 2)
        pids = await node_pids(cluster)
        collector = collector_on(cluster, policy, tmp_path)
        running = asyncio.create_task(_all(groups_of(collector, tasks)))
        await until(lambda: owners() >= set(pids.values()))
        used, killed = set(pids.values()), next(iter(pids.values()))
        os.kill(killed, signal.SIGKILL)  # the manager of one node, with its sandboxes under it
        gone_s = await until(lambda: killed not in owners(), seconds=5)
        check(await running, tasks)
        assert collector.retried >= 1
        assert collector.stats.lost == 0
        assert all(node.load.placed >= 4 for node in cluster.nodes.values())
        await until(lambda: len(cluster.usable()) == 2)  # Ray has started it again
        print(f"\nmanager killed: its sandboxes were gone after {gone_s:.2f} s, {collector.retried} rollouts repeated")

        second = two_nodes.second.node_id
        pids = await node_pids(cluster)
        policy = ScriptedPolicy(script(tasks, 0.5))
        collector = collector_on(cluster, policy, tmp_path)
        running = asyncio.create_task(_all(groups_of(collector, tasks)))
        await until(lambda: owners() >= set(pids.values()))
        used |= set(pids.values())
        await asyncio.to_thread(two_nodes.remove_node, two_nodes.second, False)
        gone_s = await until(lambda: pids[second] not in owners(), seconds=5)
        check(await running, tasks)
        assert collector.stats.lost == 0
        assert cluster.counts["nodes_lost"] >= 2
        assert cluster.counts["local_exec_ms/0"] + cluster.counts["outcome_ok"] > 0
        print(f"node removed: its sandboxes were gone after {gone_s:.2f} s, {collector.retried} rollouts repeated")
    await until(lambda: not owners() & used, seconds=5)


async def _all(groups: AsyncIterator[TrajectoryGroup]) -> list[TrajectoryGroup]:
    return [group async for group in groups]


def command(run_dir: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "swe_rl", "train", f"run_dir={run_dir}", *TINY, *overrides]


def all_rollouts(run_dir: Path) -> dict[str, Trajectory]:
    folder = run_dir / "rollouts"
    found = [item for path in folder.glob("*.parquet") for item in read_parquet(path)]
    found += [item for path in folder.glob("*.journal") for item in read_journal(path)]
    return {item.trajectory_id: item for item in found}


def test_the_run_is_the_same_on_ray_and_resumes_after_its_driver_was_killed(tmp_path: Path, tasks: list[Task]) -> None:
    local = subprocess.run(command(tmp_path / "local"), capture_output=True, text=True, timeout=500)
    assert local.returncode == 0, local.stderr
    run_dir = tmp_path / "ray"
    with open(tmp_path / "log", "w") as log:
        process = subprocess.Popen(command(run_dir, "rollout=ray"), stdout=log, stderr=log, start_new_session=True)
    journal = run_dir / "rollouts" / "rl-000000.journal"
    deadline = time.monotonic() + 200
    while not journal.exists():
        assert process.poll() is None, (tmp_path / "log").read_text()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    family = below(process.pid)
    managers = {process for process, words in family.items() if b"RolloutNode" in words}
    pids = {pid for pid, _ in managers}
    assert owners() & pids
    process.kill()
    process.wait()
    killed = time.monotonic()
    while owners() & pids or not all(map(is_gone, managers)):
        assert time.monotonic() - killed < 5, "sandboxes or their managers outlive the driver"
        time.sleep(0.02)
    print(f"\ndriver killed: its sandboxes and their managers were gone after {time.monotonic() - killed:.2f} s")
    rest = [process for process, words in family.items() if b"Agent" not in words]  # those look around once a minute
    while not all(map(is_gone, rest)):
        assert time.monotonic() - killed < 30, "a process of Ray outlives the driver"
        time.sleep(0.1)
    resumed = subprocess.run(
        command(run_dir, "rollout=ray", "resume=true"), capture_output=True, text=True, timeout=500
    )
    assert resumed.returncode == 0, resumed.stderr
    one, other = all_rollouts(tmp_path / "local"), all_rollouts(run_dir)
    assert one.keys() == other.keys()
    for name, trajectory in one.items():
        assert trajectory.token_ids == other[name].token_ids, name
        assert (trajectory.reward, trajectory.stop_reason) == (other[name].reward, other[name].stop_reason)
    assert "rollouts on Ray: 1 nodes" in resumed.stderr
