"""What one device of a cluster offers, and the shares of it that real kernels reach."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from swe_rl.errors import ConfigError

GIB = 1 << 30


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """Peak figures of the data sheet; bytes and seconds. `link` and `network` are of one direction."""

    name: str
    memory: int  # bytes that torch sees
    flops: float  # bf16 multiply-adds counted twice, dense, fp32 sums
    bandwidth: float  # of its memory
    link: float  # to the other devices of its node together
    network: float  # to other nodes
    host_link: float  # to host memory
    host_memory: int  # of its share of the node, for states that are offloaded


# NVIDIA's data sheets (SXM boards); network: one 400 Gb/s adapter per GPU (A100: 200), as in DGX and HGX systems; host
# memory: 2 TB per DGX H100 and H200, 1 TB per DGX A100.
DEVICES: Mapping[str, Device] = {
    "a100": Device(
        name="A100 80GB",
        memory=int(79.1 * GIB),
        flops=312e12,
        bandwidth=2.04e12,
        link=300e9,
        network=25e9,
        host_link=25e9,
        host_memory=125 * 10**9,
    ),
    "h100": Device(
        name="H100 80GB",
        memory=int(79.1 * GIB),
        flops=989e12,
        bandwidth=3.35e12,
        link=450e9,
        network=50e9,
        host_link=50e9,
        host_memory=250 * 10**9,
    ),
    "h200": Device(
        name="H200 141GB",
        memory=int(139.8 * GIB),
        flops=989e12,
        bandwidth=4.8e12,
        link=450e9,
        network=50e9,
        host_link=50e9,
        host_memory=250 * 10**9,
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Efficiency:
    """Shares of the peaks that are reached; assumptions, which options of `swe-rl plan` replace.

    matmul: large bf16 products, with all that happens between them, in steps of Megatron-core on Hopper (its README
    reports up to 0.47 of the peak for whole steps, recomputation and communication inside). attention_*: the paper of
    FlashAttention-3, 648 and 561 of 989 TFLOP/s. memory: large copies. network: NCCL's bus bandwidth, large messages.
    """

    matmul: float = 0.60
    attention_forward: float = 0.60
    attention_backward: float = 0.50
    memory: float = 0.80
    network: float = 0.75


def this_machine() -> Device:
    """The CPU that this runs on, for runs on a laptop: memory as installed, other figures of one modest core."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    speed = 5e10
    return Device(
        name="this machine's CPU",
        memory=memory,
        flops=speed,
        bandwidth=1e10,
        link=1e10,
        network=1e9,
        host_link=1e10,
        host_memory=memory,
    )


def device(name: str) -> Device:
    """By its key in cluster.gpu; "" and "cpu" are this machine. ConfigError for an unknown one."""
    if name in ("", "cpu"):
        return this_machine()
    if name not in DEVICES:
        raise ConfigError(f"cluster.gpu={name!r} is unknown: use one of {', '.join(DEVICES)}, or leave it empty")
    return DEVICES[name]
