"""Safetensors files written one tensor at a time, and directories of them read the same way.

The library writes a file from a dictionary that holds all of it. Here sizes are known before the values, so the header
is written first and each tensor goes to its place: memory is that of one tensor, whatever the file.
Format: 8 bytes of header length (little-endian), a JSON header {name: {dtype, shape, data_offsets}}, the values.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from swe_rl.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


class TensorMeta(NamedTuple):
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        size = self.dtype.itemsize
        for length in self.shape:
            size *= length
        return size


class SafetensorsWriter:
    """Writes the tensors of `metas` to `path` in any order. A context manager: its end raises CheckpointError when one
    is missing."""

    def __init__(self, path: Path, metas: Mapping[str, TensorMeta]) -> None:
        self._path, self._metas, self._missing = path, dict(metas), set(metas)
        header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
        offset = 0
        for name, meta in sorted(metas.items(), key=lambda item: (-item[1].dtype.itemsize, item[0])):  # aligned
            stop = offset + meta.num_bytes
            header[name] = {
                "dtype": NAMES[meta.dtype],
                "shape": list(meta.shape),
                "data_offsets": [offset, stop],
            }
            offset = stop
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        self._start = {n: 8 + len(text) + entry["data_offsets"][0] for n, entry in header.items() if n in metas}
        self._file = path.open("wb")
        self._file.write(struct.pack("<Q", len(text)) + text)
        self._file.truncate(8 + len(text) + offset)

    def write(self, name: str, tensor: Tensor) -> None:
        """CheckpointError for a tensor that was not announced so."""
        if TensorMeta(tensor.dtype, tuple(tensor.shape)) != self._metas.get(name):
            raise CheckpointError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, not {self._metas.get(name)}")
        self._file.seek(self._start[name])
        self._file.write(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        self._missing.discard(name)

    def __enter__(self) -> SafetensorsWriter:
        return self

    def __exit__(self, error: object, *_: object) -> None:
        self._file.close()
        if self._missing and error is None:
            raise CheckpointError(f"{self._path.name} lacks {len(self._missing)} tensors: {min(self._missing)}, ...")


class TensorFiles:
    """Tensors by name from safetensors files, one at a time. Use as a context manager.

    Raises CheckpointError for a name that no file has, or a file that is damaged.
    """

    def __init__(self, files: list[Path]) -> None:
        self._stack = ExitStack()
        self._of: dict[str, Any] = {}
        for path in files:
            self._open(path)

    def _open(self, path: Path) -> None:
        from safetensors import SafetensorError, safe_open

        try:
            handle = self._stack.enter_context(safe_open(path, framework="pt"))
        except (SafetensorError, OSError) as err:
            self._stack.close()
            raise CheckpointError(f"{path} cannot be read: {err}") from err
        for name in handle.keys():  # a Rust object, no mapping
            self._of[name] = handle

    def __enter__(self) -> TensorFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    @property
    def names(self) -> set[str]:
        return set(self._of)

    def meta(self, name: str) -> TensorMeta:
        found = self._file(name).get_slice(name)
        if found.get_dtype() not in DTYPES:
            raise CheckpointError(f"{name} is of type {found.get_dtype()}: only {', '.join(DTYPES)} can be converted")
        return TensorMeta(DTYPES[found.get_dtype()], tuple(found.get_shape()))

    def get(self, name: str) -> Tensor:
        tensor: Tensor = self._file(name).get_tensor(name)
        return tensor

    def rows(self, name: str, index: int, start: int, stop: int) -> Tensor:
        """tensor[index, start:stop], which is all that is read."""
        found: Tensor = self._file(name).get_slice(name)[index, start:stop]
        return found

    def _file(self, name: str) -> Any:
        if name not in self._of:
            raise CheckpointError(f"there is no tensor {name} in the checkpoint")
        return self._of[name]


def hf_files(directory: Path) -> list[Path]:
    """The weight files of a Hugging Face directory. ConfigError when there are none or some are missing."""
    if (directory / INDEX).is_file():
        files = sorted(
            {directory / name for name in json.loads((directory / INDEX).read_text())["weight_map"].values()}
        )
    else:
        files = [directory / "model.safetensors"]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise ConfigError(f"{directory} lacks {missing[0]}: give a Hugging Face directory with safetensors")
    return files


def hf_shards(metas: Mapping[str, TensorMeta], *, max_bytes: int) -> dict[str, dict[str, TensorMeta]]:
    """Tensors by file name, in order, each file at most `max_bytes` (a larger tensor has one of its own)."""
    groups: list[dict[str, TensorMeta]] = [{}]
    room = max_bytes
    for name, meta in metas.items():
        if groups[-1] and meta.num_bytes > room:
            groups.append({})
            room = max_bytes
        groups[-1][name] = meta
        room -= meta.num_bytes
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    count = len(groups)
    return {f"model-{i + 1:05d}-of-{count:05d}.safetensors": group for i, group in enumerate(groups)}


def write_index(directory: Path, shards: Mapping[str, Mapping[str, TensorMeta]]) -> None:
    """The index that transformers expects beside several files."""
    weight_map = {name: file for file, metas in shards.items() for name in metas}
    total = sum(meta.num_bytes for metas in shards.values() for meta in metas.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n")
