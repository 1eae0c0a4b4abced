"""Rows of a data set, one at a time: Parquet, JSON lines, a JSON array, a folder of these, or a data set of the hub.

A row comes with its place ("train.parquet row 17"), which every complaint about it names.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import date, datetime
from itertools import chain
from pathlib import Path
from typing import Any

from swe_rl.errors import ConfigError

SUFFIXES = (".parquet", ".jsonl", ".json")
_BATCH_ROWS = 64  # of a Parquet file decoded at a time: rows may hold megabytes
_BUFFER_BYTES = 1 << 20  # read ahead per column; without it a whole row group is fetched

Located = tuple[str, Mapping[str, Any]]


def read_rows(path: str, *, hub_split: str = "") -> Iterator[Located]:
    """(place, row) of everything that `path` names, in order.

    path: a file, a folder (its data files in alphabetical order) or the name of a data set on the hub, OWNER/NAME.
    hub_split: of a hub data set, the files of that split only. Raises ConfigError for anything else.
    """
    files = data_files(path, hub_split=hub_split)
    return chain.from_iterable(_rows_of(file) for file in files)


def data_files(path: str, *, hub_split: str = "") -> list[Path]:
    """The data files behind `path`, see `read_rows`. A hub data set is downloaded to the hub's cache."""
    local = Path(path)
    if local.is_file():
        return [_checked(local)]
    if local.is_dir():
        found = sorted(file for file in local.rglob("*") if file.suffix in SUFFIXES and file.is_file())
        if not found:
            raise ConfigError(f"{path} has no data file: expected one that ends in {', '.join(SUFFIXES)}")
        return found
    if path.count("/") == 1 and not path.startswith((".", "/")):
        return _from_hub(path, hub_split)
    raise ConfigError(f"{path} is neither a file, a folder nor a data set's name OWNER/NAME")


def _checked(file: Path) -> Path:
    if file.suffix not in SUFFIXES:
        raise ConfigError(f"{file} has an unknown ending: expected {', '.join(SUFFIXES)}")
    return file


def _from_hub(name: str, split: str) -> list[Path]:
    from huggingface_hub import HfApi, hf_hub_download

    try:
        listed = HfApi().list_repo_files(name, repo_type="dataset")
    except Exception as error:  # offline, no such data set, not allowed: the client has many types for it
        raise ConfigError(
            f"{name} is no local path, and the hub does not give it ({type(error).__name__}): "
            "check the name and the network, or download it and give the file"
        ) from error
    names = sorted(item for item in listed if item.endswith(SUFFIXES[:2]) and (split or "") in item)
    if not names:
        raise ConfigError(f"data set {name} has no Parquet or JSON lines file of split {split or 'any'}: {listed[:20]}")
    return [Path(hf_hub_download(name, item, repo_type="dataset")) for item in names]


def _rows_of(file: Path) -> Iterator[Located]:
    if file.suffix == ".parquet":
        rows = _parquet_rows(file)
    elif file.suffix == ".jsonl":
        rows = _json_lines(file)
    else:
        rows = _json_array(file)
    for number, row in rows:
        if not isinstance(row, Mapping):
            raise ConfigError(f"{file.name} row {number} is {type(row).__name__}, expected an object")
        yield f"{file.name} row {number}", row


def _parquet_rows(file: Path) -> Iterator[tuple[int, Any]]:
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        with pyarrow.parquet.ParquetFile(file, buffer_size=_BUFFER_BYTES, pre_buffer=False) as opened:
            for batch in opened.iter_batches(batch_size=_BATCH_ROWS):
                for row in batch.to_pylist():
                    number += 1
                    yield number, {key: _plain(value) for key, value in row.items()}
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{file} cannot be read as Parquet after row {number}: {_first_line(error)}") from error


def _json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    with file.open("rb") as opened:
        for line in opened:
            if not line.strip():
                continue
            number += 1
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8, or nested without end
                raise ConfigError(f"{file.name} row {number} is not JSON: {_first_line(error)}") from error
            yield number, row


def _json_array(file: Path) -> Iterator[tuple[int, Any]]:
    """A whole JSON file: an array of rows, or one row. It is read at once: large sets come as the other two kinds."""
    try:
        content = json.loads(file.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{file} is not JSON: {_first_line(error)}; JSON lines end in .jsonl") from error
    if isinstance(content, dict) and isinstance(content.get("instances"), list):
        content = content["instances"]  # rows below a heading of their own
    yield from enumerate(content if isinstance(content, list) else [content], start=1)


def _plain(value: Any) -> Any:
    """Dates as ISO 8601 text: a task set is JSON."""
    return value.isoformat() if isinstance(value, datetime | date) else value


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
