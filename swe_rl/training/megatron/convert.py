"""Hugging Face directories to directories of Megatron ranks, back, and from layout to layout: exact, and streaming.

A directory of ranks holds `megatron.json` (the layout), the config and tokenizer files of the Hugging Face directory,
and one safetensors file per tensor parallel rank, pipeline rank, model chunk and expert rank:

    rank_tp00_pp00_vp00_ep00.safetensors   names and shapes as in GPTModel.state_dict of that rank and chunk

Tensors that all expert ranks share are in the files of each of them. Dtypes stay what they are. One unit (a tensor, or
the three of a qkv matrix) is in memory at a time. `rank_weights` gives the backend what one rank needs from either
kind of directory, and `convert_split.join` is how weights are exported without a full copy anywhere.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from swe_rl.errors import CheckpointError, ConfigError
from swe_rl.training.megatron.convert_files import (
    INDEX,
    SafetensorsWriter,
    TensorFiles,
    TensorMeta,
    hf_files,
    hf_shards,
    write_index,
)
from swe_rl.training.megatron.convert_split import hf_shapes, join, part_shape, split
from swe_rl.training.megatron.convert_units import MegatronLayout, Rank, Unit, places, units
from swe_rl.training.megatron.parameters import Parameters
from swe_rl.training.planning.shapes import ModelShape, shape_from_directory

K = TypeVar("K")
MANIFEST, FORMAT = "megatron.json", 1
SIDE_FILES = (".json", ".jinja", ".txt", ".model", ".py")  # config, tokenizer and chat template of a model
SHARD_BYTES = 5 << 30  # of Hugging Face files
BUFFERS = "rotary_emb.inv_freq"  # old Llama files hold it; it is computed


class Reader(Protocol):
    """Gives the Hugging Face tensors of units, whatever is on disk. A unit is known by its names in `hf`."""

    shape: ModelShape

    def dtype(self, unit: Unit) -> torch.dtype: ...
    def read(self, unit: Unit) -> list[Tensor]: ...


class HfReader:
    """A Hugging Face directory of safetensors. CheckpointError unless it holds exactly the tensors of its config; those
    of experts may be in parameters as transformers' model has them, which is how trained models are exported."""

    def __init__(self, directory: Path) -> None:
        self.shape = shape_from_directory(directory)
        self._files = TensorFiles(hf_files(directory))
        self._parameters = Parameters(self.shape)
        held, wanted = self._files.names, set(self._parameters.spans)
        self._inside = {n: at for n, at in self._parameters.spans.items() if n not in held and at.name in held}
        spare = {"lm_head.weight"} if self.shape.tied else set()  # some files hold it although it is the embedding
        spare |= {at.name for at in self._inside.values()}
        unknown = {n for n in held - wanted - spare if not n.endswith(BUFFERS)}
        missing = wanted - held - set(self._inside)
        if unknown or missing:
            self._files.__exit__()
            what = f"no {min(missing)}" if missing else f"{min(unknown)}, which a {self.shape.family} does not have"
            raise CheckpointError(f"{directory} holds {what}: it is not the checkpoint of its config.json")

    def __enter__(self) -> HfReader:
        return self

    def __exit__(self, *error: object) -> None:
        self._files.__exit__(*error)

    def dtype(self, unit: Unit) -> torch.dtype:
        metas = [self._meta(name) for name in unit.hf]
        for name, meta, expected in zip(unit.hf, metas, hf_shapes(unit, self.shape), strict=True):
            if meta.shape != expected:
                raise CheckpointError(f"{name} has shape {meta.shape}, by config.json it is {expected}")
            if meta.dtype != metas[0].dtype:
                raise CheckpointError(f"{name} is {meta.dtype}, {unit.hf[0]} is {metas[0].dtype}: they become one")
        return metas[0].dtype

    def read(self, unit: Unit) -> list[Tensor]:
        return [self._get(name) for name in unit.hf]

    def _meta(self, name: str) -> TensorMeta:
        if name not in self._inside:
            return self._files.meta(name)
        whole = self._inside[name].name
        meta = self._files.meta(whole)
        if meta.shape != self._parameters.shapes[whole]:
            raise CheckpointError(
                f"{whole} has shape {meta.shape}, by config.json it is {self._parameters.shapes[whole]}"
            )
        return TensorMeta(meta.dtype, self._parameters.sizes[name])

    def _get(self, name: str) -> Tensor:
        """Of a parameter of several experts, only the rows that are asked for."""
        if name not in self._inside:
            return self._files.get(name)
        whole, first = self._inside[name]
        _, rows, columns = self._parameters.shapes[whole]
        expert, row = divmod(first // columns, rows)
        return self._files.rows(whole, expert, row, row + self._parameters.sizes[name][0])


class MegatronReader:
    """A directory of ranks. ConfigError without its manifest, CheckpointError for files that do not fit it."""

    def __init__(self, directory: Path) -> None:
        self.layout = read_layout(directory)
        self.shape = shape_from_directory(directory)
        self.layout.check(self.shape)
        missing = [rank_file(rank) for rank in self.layout.ranks() if not (directory / rank_file(rank)).is_file()]
        if missing:
            raise CheckpointError(f"{directory} lacks {len(missing)} files of ranks: {missing[0]}, ...")
        self._stored = {unit.hf: unit for unit in units(self.shape, modules=self.layout.modules)}
        self._files = {rank: TensorFiles([directory / rank_file(rank)]) for rank in self.layout.ranks()}

    def __enter__(self) -> MegatronReader:
        return self

    def __exit__(self, *error: object) -> None:
        for files in self._files.values():
            files.__exit__(*error)

    def dtype(self, unit: Unit) -> torch.dtype:
        unit = self._stored[unit.hf]
        first, name = places(unit, self.shape, self.layout)[0]
        meta, expected = self._files[first].meta(name), part_shape(unit, self.shape, self.layout)
        if meta.shape != expected:
            raise CheckpointError(f"{name} of {rank_file(first)} has shape {meta.shape}, by config.json {expected}")
        return meta.dtype

    def read(self, unit: Unit) -> list[Tensor]:
        unit = self._stored[unit.hf]
        found = places(unit, self.shape, self.layout)
        parts = self._parts(*found[0])
        if len(found) > 1 and found[-1].name != found[0].name:  # a tied head beside its embedding
            for part, copy in zip(parts, self._parts(*found[-1]), strict=True):
                if not torch.equal(part, copy):
                    raise CheckpointError(
                        f"{found[-1].name} of the last stage is not the embedding, to which it is tied"
                    )
        return join(unit, parts, self.shape)

    def _parts(self, rank: Rank, name: str) -> list[Tensor]:
        return [self._files[rank._replace(tensor=tensor)].get(name) for tensor in range(self.layout.tensor_parallel)]


def open_reader(directory: Path) -> HfReader | MegatronReader:
    """The reader for what the directory holds."""
    return MegatronReader(directory) if (directory / MANIFEST).is_file() else HfReader(directory)


def read_layout(directory: Path) -> MegatronLayout:
    """The layout that the manifest names. ConfigError when there is none, or of another version."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise ConfigError(f"{directory / MANIFEST} is of format {manifest['format']}, this version reads {FORMAT}")
        return MegatronLayout(**manifest["layout"])
    except (OSError, ValueError, KeyError, TypeError) as err:
        if isinstance(err, ConfigError):
            raise
        raise ConfigError(f"{directory} is no directory of Megatron ranks: {MANIFEST}: {err}") from err


def rank_file(rank: Rank) -> str:
    return "rank_tp{:02d}_pp{:02d}_vp{:02d}_ep{:02d}.safetensors".format(*rank)


def rank_weights(reader: Reader, layout: MegatronLayout, rank: Rank) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of one rank and model chunk, as its GPTModel.load_state_dict takes them, one unit at a time."""
    layout.check(reader.shape)
    for unit in units(reader.shape, modules=layout.modules):
        names = [place.name for place in places(unit, reader.shape, layout) if place.rank == rank._replace(tensor=0)]
        if names:
            part = split(unit, reader.read(unit), reader.shape, layout)[rank.tensor]
            yield from ((name, part) for name in names)


def to_megatron(
    source: Path, target: Path, layout: MegatronLayout, *, progress: Callable[[float], None] = lambda _: None
) -> None:
    """Writes a directory of ranks from a Hugging Face directory, or from one of another layout.

    `target` must not exist; it appears when it is complete. progress is called with the share that is done.
    Raises ConfigError for a layout that the model does not allow, CheckpointError for files that do not fit.
    """
    with open_reader(source) as reader, _new_directory(target) as work:
        shape = reader.shape
        layout.check(shape)
        rows = list(units(shape, modules=layout.modules))
        metas: dict[Rank, dict[str, TensorMeta]] = {rank: {} for rank in layout.ranks()}
        for unit in rows:
            meta = TensorMeta(reader.dtype(unit), part_shape(unit, shape, layout))
            for rank, name in places(unit, shape, layout):
                for tensor in range(layout.tensor_parallel):
                    metas[rank._replace(tensor=tensor)][name] = meta
        with _writers({rank: (work / rank_file(rank), found) for rank, found in metas.items()}) as files:
            for number, unit in enumerate(rows):
                parts = split(unit, reader.read(unit), shape, layout)
                for rank, name in places(unit, shape, layout):
                    for tensor, part in enumerate(parts):
                        files[rank._replace(tensor=tensor)].write(name, part)
                progress((number + 1) / len(rows))
        _copy_side_files(source, work)
        text = json.dumps({"format": FORMAT, "layout": asdict(layout)}, indent=2)
        (work / MANIFEST).write_text(text + "\n")


def to_hf(source: Path, target: Path, *, progress: Callable[[float], None] = lambda _: None) -> None:
    """Writes a Hugging Face directory from a directory of ranks; as `to_megatron` otherwise."""
    with open_reader(source) as reader, _new_directory(target) as work:
        shape = reader.shape
        rows = list(units(shape))
        metas = {
            name: TensorMeta(dtype, size)
            for unit in rows
            for dtype in [reader.dtype(unit)]
            for name, size in zip(unit.hf, hf_shapes(unit, shape), strict=True)
        }
        shards = hf_shards(metas, max_bytes=SHARD_BYTES)
        file_of = {name: file for file, found in shards.items() for name in found}
        with _writers({file: (work / file, found) for file, found in shards.items()}) as files:
            for number, unit in enumerate(rows):
                for name, tensor in zip(unit.hf, reader.read(unit), strict=True):
                    files[file_of[name]].write(name, tensor)
                progress((number + 1) / len(rows))
        if len(shards) > 1:
            write_index(work, shards)
        _copy_side_files(source, work)


@contextmanager
def _writers(files: Mapping[K, tuple[Path, Mapping[str, TensorMeta]]]) -> Iterator[dict[K, SafetensorsWriter]]:
    """All files open together; complete, or CheckpointError, at the end."""
    with ExitStack() as stack:
        yield {key: stack.enter_context(SafetensorsWriter(path, metas)) for key, (path, metas) in files.items()}


@contextmanager
def _new_directory(target: Path) -> Iterator[Path]:
    """A directory that gets the name `target` when the block ends well, and is gone otherwise."""
    if target.exists():
        raise ConfigError(f"{target} exists already: choose another directory, or remove it")
    target.parent.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(dir=target.parent, prefix=f".{target.name}-"))
    try:
        work.chmod(0o755)
        yield work
        os.rename(work, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _copy_side_files(source: Path, target: Path) -> None:
    """Config, tokenizer and templates; neither weights nor what describes their files."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in SIDE_FILES and path.name not in (MANIFEST, INDEX):
            shutil.copyfile(path, target / path.name)
