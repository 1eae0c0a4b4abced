"""In one process every collective is the identity; two torchrun processes exchange numbers, strings and lists."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swe_rl.errors import ConfigError
from swe_rl.training import mesh

PROGRAM = """
import json, sys
from swe_rl.training import mesh
device = mesh.init_distributed(device="cpu")
mesh.init_distributed(device="cpu")
rank = mesh.rank()
result = {
    "device": str(device), "rank": rank, "world": mesh.world_size(), "main": mesh.is_main(),
    "sum": mesh.all_reduce_sum([rank + 1, 0.5]), "max": mesh.all_reduce_max([rank, -rank]),
    "string": mesh.broadcast_string(f"from {rank}"), "object": mesh.broadcast_object({"rank": rank}),
    "gathered": mesh.gather_objects([f"{rank}.{i}" for i in range(rank + 1)]),
}
mesh.barrier()
mesh.shutdown()
mesh.shutdown()
with open(f"{sys.argv[1]}/{rank}.json", "w") as file:
    file.write(json.dumps(result))
mesh.exit_rank(0)
"""


def test_one_process_needs_no_group() -> None:
    assert mesh.init_distributed(device="cpu") == torch.device("cpu")
    assert (mesh.rank(), mesh.world_size(), mesh.is_main()) == (0, 1, True)
    assert mesh.all_reduce_sum([1, 2.5]) == [1.0, 2.5]
    assert mesh.all_reduce_max([3]) == [3.0]
    assert mesh.broadcast_string("runs/x") == "runs/x"
    assert mesh.gather_objects([1, 2]) == [1, 2]
    mesh.barrier()
    mesh.shutdown()


def test_bad_devices_are_configuration_errors() -> None:
    with pytest.raises(ConfigError, match="device='tpu'"):
        mesh.init_distributed(device="tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="sees no GPU"):
            mesh.init_distributed(device="cuda")


def test_two_processes(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d"]
    done = subprocess.run(
        [*command, "--rdzv-endpoint", "localhost:0", str(program), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        assert json.loads((tmp_path / f"{rank}.json").read_text()) == {
            "device": "cpu",
            "rank": rank,
            "world": 2,
            "main": rank == 0,
            "sum": [3.0, 1.0],
            "max": [1.0, 0.0],
            "string": "from 0",
            "object": {"rank": 0},
            "gathered": ["0.0", "1.0", "1.1"],
        }


def test_a_rank_ends_with_its_code_after_exit_handlers_and_unfinished_threads() -> None:
    program = (
        "import atexit, sys, threading, time\n"
        "from swe_rl.training import mesh\n"
        "threading.Thread(target=time.sleep, args=(600,)).start()\n"
        "atexit.register(print, 'handler')\n"
        "sys.stdout.write('unflushed, ')\n"
        "mesh.exit_rank(3)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout, done.stderr) == (3, "unflushed, handler\n", "")
