"""Weights from the trainer's GPU into those of its engines, without a way over the host; the trainer's side.

    sender = open_sender(cfg, shapes, fleet)    # engine.weight_transfer: nccl or ipc
    await sender.start()                        # its replicas stand still, and wait for weights
    await sender.send(bucket)                   # every tensor that is complete, one after another
    ...                                         # replica.close_update(version): they go on with the new ones

nccl: every training process is rank 0 of a group with the workers of its own engines, which it broadcasts to. NCCL
takes a GPU once in a group, so the engines need others than the trainer. ipc: trainer and engine share a GPU
(layout=colocated); what travels is where in its memory a tensor lies. Of a whole model a rank has one bucket and the
tensor that is being put together. The workers' side is device_worker.py.

Checked without a GPU: who is told what in which order, with vLLM's own records, and what happens when a replica is lost
meanwhile. Not yet run on a GPU: NCCL's and CUDA's own part.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from swe_rl.config import EngineConfig
from swe_rl.errors import EngineError
from swe_rl.inference.daemon_threads import in_daemon_thread
from swe_rl.inference.vllm import health
from swe_rl.inference.vllm.fleet import Fleet, Place, run_all
from swe_rl.inference.vllm.ray_replica import node_address
from swe_rl.inference.vllm.replica import ReplicaLost
from swe_rl.inference.weight_update import WeightBucket
from swe_rl.ops.weight_delta import Delta, checksum

log = logging.getLogger(__name__)

SEND_S = 600.0  # for one bucket: after it the receivers are taken for lost
ABANDON_S = 60.0  # for a receiver to end its part of an update: one that waits for the others' weights never does
Named = Sequence[tuple[str, Tensor]]


def nccl_group(address: str, port: int, *, replicas: int, tensor_parallel: int) -> tuple[dict[str, Any], list[Any]]:
    """(what the trainer opens as rank 0, init info of each replica): vLLM numbers a replica's workers from its offset.

    The trainer counts as one, so that two replicas of two GPUs make a group of 5, with offsets 1 and 3.
    """
    world = {"master_address": address, "master_port": port, "world_size": 1 + replicas * tensor_parallel}
    return world, [{**world, "rank_offset": 1 + index * tensor_parallel, "packed": False} for index in range(replicas)]


def described(named: Named) -> dict[str, Any]:
    """What a worker needs to know of the tensors that it is about to get; checksums as text, as JSON has no integers
    of 64 bits."""
    return {
        "names": [name for name, _ in named],
        "dtype_names": [str(tensor.dtype)[6:] for _, tensor in named],
        "shapes": [list(tensor.shape) for _, tensor in named],
        "checksums": [str(checksum(tensor)) for _, tensor in named],
    }


class WholeTensors:
    """Puts buckets together: vLLM loads whole tensors only. A piece that is a whole tensor is not copied."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self._shapes = {name: torch.Size(shape) for name, shape in shapes.items()}
        self._parts: dict[str, tuple[Tensor, int]] = {}  # what there is, and how many elements are still missing

    def add(self, bucket: WeightBucket) -> list[tuple[str, Tensor]]:
        """The tensors that are complete now. Raises EngineError for a delta, which has no whole to be applied to."""
        complete = []
        for piece in bucket.pieces:
            if isinstance(piece.values, Delta):
                raise EngineError("a delta cannot be sent from GPU to GPU: set engine.weight_transfer=host")
            shape = self._shapes[piece.name]
            if piece.size == shape.numel():
                complete.append((piece.name, piece.values.contiguous().view(shape)))
                continue
            whole, missing = self._parts.pop(piece.name, (piece.values.new_empty(shape.numel()), shape.numel()))
            whole[piece.first : piece.first + piece.size].copy_(piece.values)
            if missing > piece.size:
                self._parts[piece.name] = whole, missing - piece.size
            else:
                complete.append((piece.name, whole.view(shape)))
        return complete

    def clear(self) -> None:
        """Forgets what an earlier update began."""
        self._parts.clear()


class IpcLink:
    """One engine on the trainer's own GPU, which reads the tensors where they lie."""

    async def join(self, places: Sequence[Place]) -> None:
        await run_all(health.watched(place.replica, place.replica.join({"packed": False})) for place in places)

    async def send(self, places: Sequence[Place], named: Named) -> None:
        """Returns when the engine has its own copy: until then the trainer's tensors stay as they are."""
        if torch.cuda.is_available():
            torch.cuda.current_stream().synchronize()
        told = await asyncio.to_thread(described, named)
        info = {**told, "handles": [ipc_handle(tensor) for _, tensor in named]}
        await run_all(health.watched(place.replica, place.replica.update(info)) for place in places)

    async def close(self) -> None:
        """Nothing is held."""


class NcclLink:
    """A group of this process and its engines' workers; made anew whenever one of them was started anew."""

    def __init__(self, address: str, *, tensor_parallel: int, open_group: Callable[[dict[str, Any]], Any]) -> None:
        self._address, self._tensor_parallel, self._open = address, tensor_parallel, open_group
        self._device = torch.cuda.current_device() if torch.cuda.is_available() else None  # a thread has its own
        self._group: Any = None

    async def join(self, places: Sequence[Place]) -> None:
        await self.close()
        world, infos = nccl_group(
            self._address, _free_port(), replicas=len(places), tensor_parallel=self._tensor_parallel
        )
        opening = in_daemon_thread(self._on_device, self._open, world)  # returns when all have come
        joins = [health.watched(p.replica, p.replica.join(info)) for p, info in zip(places, infos, strict=True)]
        (self._group,) = (await _all_or_first_error([opening, *joins]))[:1]

    async def send(self, places: Sequence[Place], named: Named) -> None:
        """Broadcasts in the order that the workers were told."""
        info = await in_daemon_thread(self._on_device, described, named)
        updates = [health.watched(place.replica, place.replica.update(info)) for place in places]
        broadcast = partial(self._broadcast, self._group)
        await _all_or_first_error([in_daemon_thread(self._on_device, broadcast, named), *updates])

    def _on_device(self, call: Callable[[Any], Any], argument: Any) -> Any:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        return call(argument)

    def _broadcast(self, group: Any, named: Named) -> None:
        stream = torch.cuda.current_stream() if torch.cuda.is_available() else None
        for _, tensor in named:
            if self._group is not group:  # closed meanwhile: nobody takes the rest
                return
            group.broadcast(tensor, src=0, stream=stream)
        if stream is not None:
            stream.synchronize()

    async def close(self) -> None:
        """Leaves the group; what hangs in it is aborted, which may take seconds."""
        group, self._group = self._group, None
        if group is not None:
            await in_daemon_thread(group.destroy)


class DeviceSender:
    """One update at a time, to the usable replicas of `fleet`. Those that are lost meanwhile are started anew, and get
    the version from the host's copy of it."""

    def __init__(self, link: IpcLink | NcclLink, shapes: Mapping[str, tuple[int, ...]], fleet: Fleet) -> None:
        self._link, self._tensors, self._fleet = link, WholeTensors(shapes), fleet
        self._members: list[tuple[int, int]] = []  # of the link: index and generation
        self._receiving: list[Place] = []  # of the update that is open

    def receives(self, place: Place) -> bool:
        """Whether it has got the weights of the update that is open."""
        return place in self._receiving

    async def start(self) -> None:
        """Tells the replicas that weights are coming. They must be awake. Raises EngineError."""
        await self.abandon()  # of an update that could not be started
        self._tensors.clear()
        places = self._fleet.usable()  # without those that were lost just now
        members = [(place.index, place.generation) for place in places]
        if members and members != self._members:
            self._members = []
            if not await self._together(places, lambda: self._link.join(places)):
                return
            self._members = members
        await self._together(places, lambda: run_all(self._open(place) for place in places))

    async def _open(self, place: Place) -> None:
        await health.watched(place.replica, place.replica.open_update())
        self._receiving.append(place)

    async def send(self, bucket: WeightBucket) -> None:
        """Sends what is complete; nothing when all receivers were lost. Raises EngineError, also for wrong bits."""
        named = self._tensors.add(bucket)
        if named and self._receiving:
            await self._together(self._receiving, lambda: self._link.send(self._receiving, named))

    async def abandon(self) -> None:
        """Ends an update that is not to be used: its receivers stay paused, with weights of no version. Can be called
        again when it was cancelled."""
        while self._receiving:
            place = self._receiving[0]
            try:
                if self._fleet.present(place):
                    async with asyncio.timeout(ABANDON_S):
                        await health.watched(place.replica, place.replica.abandon_update())
            except (EngineError, TimeoutError) as err:  # whatever it holds, it starts anew
                self._fleet.replace(place, _named(err, "an update could not be ended"))
            self._receiving = self._receiving[1:]

    def finished(self, place: Place) -> None:
        """It has been told to go on."""
        self._receiving = [each for each in self._receiving if each != place]

    async def close(self) -> None:
        """Idempotent."""
        await self._link.close()

    async def _together(self, places: Sequence[Place], step: Callable[[], Awaitable[Any]]) -> bool:
        """A step of `places`; whether all took it. When one is lost the others wait for it in vain, so all are started
        anew. A step that fails leaves the link with weights that nobody takes: it is not used again."""
        try:
            if gone := [place for place in places if not self._fleet.present(place)]:
                raise ReplicaLost(f"{gone[0].replica.name} is being replaced")
            async with asyncio.timeout(SEND_S) as limit:
                await step()
            return True
        except BaseException as err:
            self._members = []
            await self._link.close()
            late = isinstance(err, TimeoutError) and limit.expired()
            if not late and not isinstance(err, ReplicaLost):
                raise
            self._receiving = []
            log.warning("a replica was lost while it received weights: all get them from the host's memory (%s)", err)
            for place in places:
                self._fleet.replace(place, _named(err, "weights did not arrive in time"))
            return False


def open_sender(cfg: EngineConfig, shapes: Mapping[str, tuple[int, ...]], fleet: Fleet) -> DeviceSender:
    """The sender for engine.weight_transfer=nccl or ipc."""
    if cfg.weight_transfer == "ipc":
        return DeviceSender(IpcLink(), shapes, fleet)
    link = NcclLink(_address(cfg), tensor_parallel=cfg.tensor_parallel, open_group=_open_group)
    return DeviceSender(link, shapes, fleet)


def ipc_handle(tensor: Tensor) -> dict[str, Any]:
    """Where a CUDA tensor lies, as plain values: vLLM's own clients pickle this, and would need its workers to unpickle
    what they are sent. `ipc_arguments` reads it."""
    from torch.multiprocessing.reductions import reduce_tensor

    _, arguments = reduce_tensor(tensor.detach())
    (_, size, stride, offset, _, dtype, device, handle, *rest) = arguments
    storage_size, storage_offset, _, counter, counter_offset, event, event_needed = rest
    return {
        "gpu": str(torch.cuda.get_device_properties(device).uuid),
        "layout": [list(size), list(stride), offset, str(dtype)[6:]],
        "storage": [handle, storage_size, storage_offset],
        "counter": [counter, counter_offset],
        "event": [event, event_needed],
    }


def ipc_arguments(handle: Mapping[str, Any]) -> tuple[Any, ...]:
    """Arguments of torch's rebuild_cuda_tensor, from what `ipc_handle` says in another process. The device (the seventh
    one) is that process's own number for it: vLLM fills it in."""
    size, stride, offset, dtype = handle["layout"]
    place, storage_size, storage_offset = handle["storage"]
    counter, counter_offset = handle["counter"]
    event, event_needed = handle["event"]
    shape = (Tensor, torch.Size(size), tuple(stride), offset)
    storage = (torch.storage.TypedStorage, getattr(torch, dtype), 0, place, storage_size, storage_offset)
    return (*shape, *storage, False, counter, counter_offset, event, event_needed)


def _named(err: BaseException, late: str) -> EngineError:
    """An error of the engine as it is; a limit that was passed says nothing itself."""
    return err if isinstance(err, EngineError) else EngineError(late)


async def _all_or_first_error(calls: Sequence[Awaitable[Any]]) -> list[Any]:
    """The results. When one call fails the others, which wait for it, are cancelled."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _open_group(world: dict[str, Any]) -> Any:
    from vllm.distributed.weight_transfer.nccl_common import trainer_init

    return trainer_init(world)


def _address(cfg: EngineConfig) -> str:
    """Where the engines find this process."""
    return node_address() if cfg.layout == "ray" else "127.0.0.1"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])
