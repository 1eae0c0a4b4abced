"""Which GPUs of a node are whose.

Training process r of a node trains on GPU r. Its own engine samples
- colocated: on the same GPU, which it leaves while the trainer steps (engine.rest) and takes back with the new weights;
- separated (processes, servers): on the GPUs behind those of all training processes of the node, tensor_parallel for
  each replica, in the order of processes and replicas. With 8 GPUs, 4 training processes, one replica each of 1 GPU:

    GPU   0 1 2 3            4 5 6 7
          trainers 0 to 3    engines of trainers 0 to 3

- ray: wherever the cluster has tensor_parallel free GPUs; servers named by engine.urls: wherever they are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from swe_rl.config import EngineConfig
from swe_rl.errors import ConfigError

VISIBLE = "CUDA_VISIBLE_DEVICES"


def replica_gpus(cfg: EngineConfig, *, index: int, num_gpus: int, environment: Mapping[str, str]) -> list[int]:
    """The GPUs of this process's replica `index`, as numbers among the `num_gpus` visible ones; [] without GPUs.

    `environment` is torchrun's (LOCAL_RANK, LOCAL_WORLD_SIZE). Raises ConfigError when there are too few.
    """
    if not num_gpus:
        return []
    rank, trainers = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    if cfg.layout == "colocated":
        if cfg.tensor_parallel != 1:
            raise ConfigError(
                f"engine.tensor_parallel={cfg.tensor_parallel} cannot be colocated: every training process has one "
                "GPU; set it to 1, or choose engine.layout=processes with GPUs of its own"
            )
        return [rank]
    first = trainers + (rank * cfg.replicas + index) * cfg.tensor_parallel
    needed = trainers + trainers * cfg.replicas * cfg.tensor_parallel
    if needed > num_gpus:
        raise ConfigError(
            f"engine.layout={cfg.layout} needs {needed} GPUs on this node ({trainers} training processes, and "
            f"{trainers} x engine.replicas={cfg.replicas} x engine.tensor_parallel={cfg.tensor_parallel}), there are "
            f"{num_gpus}: start fewer training processes, or choose engine.layout=colocated"
        )
    return list(range(first, first + cfg.tensor_parallel))


def visible_devices(gpus: list[int], environment: Mapping[str, str] = os.environ) -> str:
    """Value of CUDA_VISIBLE_DEVICES for a child that is to see these of the devices visible here."""
    present = [name for name in environment.get(VISIBLE, "").split(",") if name]
    return ",".join(present[gpu] if present else str(gpu) for gpu in gpus)
