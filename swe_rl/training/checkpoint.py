"""Checkpoints that are whole or absent: written aside, fsynced, renamed; only then are old ones removed.

<run_dir>/checkpoints/step-00000012/
    config.json, model.safetensors, tokenizer files   loads with transformers' from_pretrained
    optimizer.pt                                      optimiser state by parameter name (torch.save); of a state that
                                                      ranks share, optimizer-00002-of-00008.pt has what rank 1 held
    state.json                                        counters, and the size of every other file
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor

from swe_rl.errors import CheckpointError
from swe_rl.training import mesh

X = TypeVar("X")
FOLDER = "checkpoints"
FORMAT = 1
WHOLE = "optimizer.pt"
SHARED = "put run_dir on a file system that all nodes share"
_OPTIMIZER = re.compile(r"optimizer(-\d+-of-\d+)?\.pt")
_NAME = re.compile(r"(?:\.replaced-)?step-(\d{8,})")


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    path: Path
    backend: dict[str, Any]  # for TrainerBackend.load_state_dict
    counters: dict[str, Any]  # what the caller gave to save


def save(
    run_dir: str | Path,
    backend_state: Mapping[str, Any],
    *,
    step: int,
    counters: Mapping[str, Any] | None = None,
    model_config: Any = None,
    tokenizer: Any = None,
    keep: int = 2,
    group: dist.ProcessGroup | None = None,
) -> Path:
    """Writes checkpoint `step` (a number of the whole run, not of a phase) and deletes all but the newest `keep`.

    backend_state: checkpoint_state() of the backend. counters: anything JSON. model_config and tokenizer: objects of
    transformers with save_pretrained. Under torchrun every rank calls, all return when it is done: rank 0 writes, and
    every other rank that holds state of the optimiser writes that beside it. `group`: another one of all ranks, to
    agree by. Raises CheckpointError, on every rank, when a disk refuses.
    """
    folder = Path(run_dir) / FOLDER
    final = folder / f"step-{step:08d}"
    # Of the group itself: a thread may still be here when the process has left the others, and is rank 0 of one then.
    rank = mesh.rank() if group is None else group.rank()
    holds = mesh.gather_objects([rank == 0 or any(backend_state["optimizer"].values())], group=group)
    files = {each: part_name(each, of=len(holds)) for each, something in enumerate(holds) if something}
    if len(files) == 1:
        files = {0: WHOLE}

    def write() -> dict[str, int]:
        written: dict[str, int] = {}
        if rank == 0:
            written = _write_model(_writing(final), backend_state["model"], model_config, tokenizer)
        if name := files.get(rank):
            if not _writing(final).is_dir():
                raise OSError(f"rank {rank} does not see what rank 0 has begun: {SHARED}")
            torch.save(backend_state["optimizer"], _writing(final) / name)
            _fsync(_writing(final) / name)
            written[name] = (_writing(final) / name).stat().st_size
        return written

    def finish() -> None:
        _finish(final, backend_state, counters or {}, {name: size for own in written for name, size in own.items()})
        _prune(folder, keep=keep, just_written=final)

    _all_or_error(final, lambda: _fresh(final) if rank == 0 else None, group)
    written = _all_or_error(final, write, group)
    _all_or_error(final, lambda: finish() if rank == 0 else None, group)
    return final


def part_name(rank: int, *, of: int) -> str:
    """The file with the optimiser state that `rank` of so many held."""
    return f"optimizer-{rank + 1:05d}-of-{of:05d}.pt"


def _all_or_error(final: Path, work: Callable[[], X], group: dist.ProcessGroup | None) -> list[X]:
    """Does this rank's work; what all ranks' returned. CheckpointError on every rank if the disk refused on one.
    Collective."""
    problem: Exception | None = None
    results: list[X] = []
    try:
        results = [work()]
    except Exception as err:  # torch and safetensors each raise their own kinds for a full disk
        problem = err
    words = None if problem is None else " ".join(str(problem).split())[:200]
    said = mesh.gather_objects([(results, words)], group=group)
    if wrong := [words for _, words in said if words is not None]:
        raise CheckpointError(f"cannot write checkpoint {final}: {wrong[0]}") from problem
    return [result for results, _ in said for result in results]


def latest(run_dir: str | Path) -> Path | None:
    """The complete checkpoint with the highest step, or None. What a killed writer left behind is not seen."""
    found = _complete(Path(run_dir) / FOLDER)
    return found[-1] if found else None


def load(path: str | Path) -> Checkpoint:
    """One checkpoint, its tensors mapped from the files: memory is taken by what is copied out of them, and what ranks
    of a node read they share in the page cache. Raises CheckpointError, one line, if it is missing, partial or damaged.
    """
    path = Path(path)
    try:
        state = json.loads((path / "state.json").read_text(encoding="utf-8"))
        if state["format"] != FORMAT:
            raise CheckpointError(f"checkpoint {path} has format {state['format']}, this version reads {FORMAT}")
        for name, size in state["files"].items():
            actual = (path / name).stat().st_size
            if actual != size:
                raise CheckpointError(f"checkpoint {path} is damaged: {name} has {actual} bytes instead of {size}")
        model = load_file(path / "model.safetensors")  # which maps it
        optimizer: dict[str, Any] = {}
        for name in sorted(state["files"]):
            if _OPTIMIZER.fullmatch(name):
                optimizer |= torch.load(path / name, map_location="cpu", weights_only=True, mmap=True)
        backend = {"model": model, "optimizer": optimizer, **state["backend"]}
        return Checkpoint(path=path, backend=backend, counters=state["counters"])
    except CheckpointError:
        raise
    except Exception as err:  # json, safetensors and torch each raise their own kinds for a damaged file
        raise CheckpointError(f"checkpoint {path} cannot be read: {' '.join(str(err).split())[:200]}") from err


def load_weights(path: str | Path) -> dict[str, Tensor]:
    """Weights of a checkpoint or of an exported model. Raises CheckpointError, one line, if they cannot be read."""
    try:
        return load_file(Path(path) / "model.safetensors")
    except Exception as err:  # safetensors raises its own kinds for a damaged file
        raise CheckpointError(
            f"{path} holds no readable model.safetensors: {' '.join(str(err).split())[:200]}"
        ) from err


def export(
    directory: str | Path, weights: Mapping[str, Tensor], *, model_config: Any = None, tokenizer: Any = None
) -> Path:
    """Writes a directory that transformers' from_pretrained loads, as atomically as a checkpoint.

    Replaces the directory if it exists. Raises CheckpointError when the disk refuses. Call on rank 0 only.
    """
    final = Path(directory)
    try:
        temporary = _fresh(final)
        _write_model(temporary, weights, model_config, tokenizer)
        _commit(temporary, final)
    except OSError as err:
        raise CheckpointError(f"cannot write model {final}: {err}") from err
    return final


def _finish(
    final: Path, backend_state: Mapping[str, Any], counters: Mapping[str, Any], files: Mapping[str, int]
) -> None:
    """Names and sizes of what ranks say they wrote, and the checkpoint is there. Each file is looked up by its name: a
    network file system may list a directory as it was seconds ago."""
    temporary = _writing(final)
    small = {key: value for key, value in backend_state.items() if key not in ("model", "optimizer")}
    for name, size in files.items():
        try:
            found = (temporary / name).stat().st_size
        except FileNotFoundError as err:
            raise OSError(f"{name} of another rank is not there: {SHARED}") from err
        if found != size:
            raise OSError(f"{name} has {found} bytes, {size} were written: {SHARED}")
    state = {"format": FORMAT, "backend": small, "counters": dict(counters), "files": dict(files)}
    (temporary / "state.json").write_text(json.dumps(state, indent=1), encoding="utf-8")
    _commit(temporary, final)


def _write_model(directory: Path, weights: Mapping[str, Tensor], model_config: Any, tokenizer: Any) -> dict[str, int]:
    """Sizes of what it wrote, by name."""
    plain = {name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    save_file(plain, directory / "model.safetensors", metadata={"format": "pt"})
    if model_config is not None:
        model_config.save_pretrained(directory)
    if tokenizer is not None:
        tokenizer.save_pretrained(directory)
    own = (path for path in sorted(directory.rglob("*")) if path.is_file() and not _OPTIMIZER.fullmatch(path.name))
    return {str(path.relative_to(directory)): path.stat().st_size for path in own}


def _writing(final: Path) -> Path:
    """The directory beside `final` that becomes it; no reader takes its name for that of a checkpoint."""
    return final.parent / f".writing-{final.name}"


def _fresh(final: Path) -> Path:
    """`_writing`, new and empty."""
    temporary = _writing(final)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    return temporary


def _commit(temporary: Path, final: Path) -> None:
    """Everything on disk, then one rename. An older directory of the same name steps aside and is then removed.

    Between the two renames only the one that stepped aside is there: `latest` takes it then, and until the new one is
    in place nothing removes it.
    """
    for path in [*temporary.rglob("*"), temporary]:
        _fsync(path)
    replaced = final.parent / f".replaced-{final.name}"
    if final.exists():
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
    temporary.rename(final)
    _fsync(final.parent)
    shutil.rmtree(replaced, ignore_errors=True)


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _complete(folder: Path) -> list[Path]:
    """Finished checkpoints, oldest first. state.json is the last file written, the rename comes after it.

    Of a step that is there twice, one about to be removed, the proper name wins: it sorts behind the other.
    """
    if not folder.is_dir():
        return []
    found = [(int(m.group(1)), p) for p in folder.iterdir() if (m := _NAME.fullmatch(p.name))]
    return list({step: path for step, path in sorted(found) if (path / "state.json").is_file()}.values())


def _prune(folder: Path, *, keep: int, just_written: Path) -> None:
    """Removes all but the newest `keep` (at least one) checkpoints and what killed writers left."""
    for path in _complete(folder)[: -max(1, keep)]:
        if path != just_written:
            shutil.rmtree(path, ignore_errors=True)
    for pattern in (".writing-*", ".replaced-*"):
        for path in folder.glob(pattern):
            shutil.rmtree(path, ignore_errors=True)
