"""Two nodes, each a network namespace of its own with one rank, meet over a real rendezvous and train together."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_parts import require

FIRST, SECOND, PORT = "10.231.7.1", "10.231.7.2", 29517
DEMONSTRATIONS = "{name: warm_start, data: demonstrations, num_tasks: 8, samples_per_task: 1, batch_size: 4}"
WORDS = [
    *("experiment=smoke", "threads=1", "trainer=megatron", "trainer.pipeline_parallel=2"),
    "eval={splits: {heldout: 2}, base_tasks: 0, greedy_tasks: 0}",
    f"phases=[{DEMONSTRATIONS}]",
]


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


@pytest.fixture
def nodes() -> Iterator[list[str]]:
    """Names of two namespaces that are connected with each other and with nothing else."""
    require(importlib.util.find_spec("megatron") is not None, "package megatron-core (pip install 'swe-rl[megatron]')")
    require(shutil.which("ip") is not None and os.geteuid() == 0, "root and the command ip (iproute2)")
    names = [f"swerl-{os.getpid()}-{number}" for number in (1, 2)]
    try:
        for name in names:
            ip("netns", "add", name)
        ends = [f"swerl{number}" for number in (1, 2)]
        ip("link", "add", ends[0], "netns", names[0], "type", "veth", "peer", "name", ends[1], "netns", names[1])
        for name, end, address in zip(names, ends, (FIRST, SECOND), strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(node: str, number: int, run_dir: Path, *words: str, endpoint: str = FIRST) -> subprocess.Popen[str]:
    launcher = ["-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d"]
    launcher += ["--rdzv-endpoint", f"{endpoint}:{PORT}", "--rdzv-id", "test", "--local-addr", (FIRST, SECOND)[number]]
    launcher += ["--rdzv-conf", f"is_host={1 - number}"]  # names of hosts, by which torchrun tells, are the same here
    arguments = ["ip", "netns", "exec", node, sys.executable, *launcher, "-m", "swe_rl", "train", *WORDS]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": f"swerl{number + 1}"}
    with open(run_dir.with_name(f"node{number}.log"), "w") as out:
        return subprocess.Popen([*arguments, f"run_dir={run_dir}", *words], stdout=out, stderr=out, text=True, env=env)


def said(run_dir: Path) -> list[str]:
    return [run_dir.with_name(f"node{number}.log").read_text() for number in (0, 1)]


@pytest.mark.nightly
def test_two_nodes_train_one_model(nodes: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    processes = [start(node, number, run_dir) for number, node in enumerate(nodes)]
    codes = [process.wait(timeout=900) for process in processes]
    assert codes == [0, 0], said(run_dir)
    assert list((run_dir / "checkpoints").glob("step-*"))


@pytest.mark.nightly
def test_nodes_with_different_settings_say_which(nodes: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rates = ("trainer.learning_rate=0.001", "trainer.learning_rate=0.002")
    processes = [start(node, number, run_dir, rates[number]) for number, node in enumerate(nodes)]
    assert all(process.wait(timeout=600) != 0 for process in processes)
    message = "trainer.learning_rate is 0.001 on rank 0 and 0.002 on rank 1: start all nodes with the same words"
    assert any(message in text for text in said(run_dir)), said(run_dir)
    assert not run_dir.exists()


@pytest.mark.nightly
def test_a_wrong_master_address_is_an_error(nodes: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    process = start(nodes[1], 1, run_dir, endpoint="10.231.7.9")
    assert process.wait(timeout=600) != 0
    text = run_dir.with_name("node1.log").read_text()
    assert "RendezvousConnectionError" in text
    assert f"10.231.7.9, {PORT}" in text or f"10.231.7.9:{PORT}" in text, text[-3000:]
