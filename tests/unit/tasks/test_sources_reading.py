"""Reading of files: Parquet with its types, folders, the hub, and a large file in little memory."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import source_rows as rows

from swe_rl.errors import ConfigError
from swe_rl.tasks.sources import import_tasks
from swe_rl.tasks.sources.kept import source_row
from swe_rl.tasks.sources.reading import read_rows

PEAK_MIB = 300  # of the process that imports 50,000 rows; it begins with some 60
IMPORT = """
import re, sys
from swe_rl.cli.dispatch import main
code = main(["tasks", "import", "--source", "swe_gym", "--path", sys.argv[1], "--out", sys.argv[2]])
# of this process alone: ru_maxrss begins with what the parent had before it started this one
print("peak MiB", int(re.search(r"VmHWM:\\s*(\\d+)", open("/proc/self/status").read())[1]) >> 10, file=sys.stderr)
raise SystemExit(code)
"""


def test_parquet_with_lists_structs_nulls_and_dates(tmp_path):
    when = datetime.datetime(2021, 3, 4, 5, 6, 7, tzinfo=datetime.UTC)
    table = [rows.swe_rebench(created_at=when, instance_id=f"o__r-{n}", hints_text=None) for n in range(200)]
    pq.write_table(pa.Table.from_pylist(table), tmp_path / "rows.parquet", row_group_size=70)
    tasks = list(import_tasks("swe_rebench", str(tmp_path / "rows.parquet")))
    assert [task.task_id for task in tasks] == [f"o__r-{n}" for n in range(200)]
    assert tasks[0].created_at == "2021-03-04T05:06:07+00:00"
    assert tasks[0].fail_to_pass == tuple(rows.F2P)
    assert source_row(tasks[199])["hints_text"] is None
    places = [place for place, _row in read_rows(str(tmp_path / "rows.parquet"))]
    assert (places[0], places[-1]) == ("rows.parquet row 1", "rows.parquet row 200")


def test_a_folder_is_read_file_by_file(tmp_path):
    (tmp_path / "b").mkdir()
    rows.write_jsonl(tmp_path / "b" / "second.jsonl", [rows.swebench(instance_id="o__r-2")])
    rows.write_jsonl(tmp_path / "a_first.jsonl", [rows.swebench(instance_id="o__r-1")])
    (tmp_path / "third.json").write_text(json.dumps([rows.swebench(instance_id="o__r-3")]))
    (tmp_path / "README.md").write_text("not data")
    assert [task.task_id for task in import_tasks("swebench", str(tmp_path))] == ["o__r-1", "o__r-2", "o__r-3"]


@pytest.mark.slow
def test_fifty_thousand_rows_stream(tmp_path):
    """One row group of 110 MB: neither the file nor the tasks are ever in memory."""
    schema = None
    writer = None
    for begin in range(0, 50_000, 2_500):
        part = [
            rows.swe_gym(instance_id=f"o__r-{n}", hints_text=f"{n * 7919:x} " * 250)
            for n in range(begin, begin + 2_500)
        ]
        table = pa.Table.from_pylist(part, schema=schema)
        if writer is None:
            schema = table.schema
            writer = pq.ParquetWriter(tmp_path / "big.parquet", schema, compression="snappy")
        writer.write_table(table)
    writer.close()
    command = [sys.executable, "-c", IMPORT, str(tmp_path / "big.parquet"), str(tmp_path / "set")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert "50000 tasks from 50000 rows" in done.stdout
    assert int(done.stderr.rpartition("peak MiB")[2]) <= PEAK_MIB
    assert (tmp_path / "set/tasks.jsonl").stat().st_size > 100 << 20


class FakeHub(BaseHTTPRequestHandler):
    """The two answers of the hub that the client needs: the list of files, and a file."""

    files: dict[str, bytes] = {}  # noqa: RUF012
    revision = "0" * 39 + "1"

    def do_HEAD(self) -> None:
        self._answer(body=False)

    def do_GET(self) -> None:
        self._answer(body=True)

    def _answer(self, *, body: bool) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/api/datasets/lumen/tasks/tree/"):
            listed = [
                {"type": "file", "path": name, "size": len(data), "oid": "1"} for name, data in self.files.items()
            ]
            data, headers = json.dumps(listed).encode(), {}
        elif (name := path.partition("/resolve/")[2].partition("/")[2]) in self.files:
            data, headers = self.files[name], {"ETag": f'"{name}"', "X-Repo-Commit": self.revision}
        else:
            data, headers = b"{}", {"X-Error-Code": "RepoNotFound"}
        self.send_response(404 if "X-Error-Code" in headers else 200)
        for key, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)

    def log_message(self, *arguments: object) -> None:
        """Quiet."""


@pytest.fixture
def hub(tmp_path) -> Iterator[tuple[str, Path]]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), FakeHub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}", tmp_path / "cache"
    server.shutdown()
    server.server_close()


def from_hub(hub: tuple[str, Path], name: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A process of its own: the client reads its address when it is imported."""
    address, cache = hub
    code = (
        "import sys\nfrom swe_rl.tasks.sources import import_tasks\nfrom swe_rl.errors import ConfigError\n"
        "try:\n    print([t.task_id for t in import_tasks('swebench', sys.argv[1], hub_split=sys.argv[2])])\n"
        "except ConfigError as error:\n    print('refused:', error)\n"
    )
    environment = {"PATH": "/usr/bin:/bin", "HF_ENDPOINT": address, "HF_HOME": str(cache), "HF_HUB_DISABLE_XET": "1",
                   "HF_HUB_DISABLE_TELEMETRY": "1", "no_proxy": "127.0.0.1"}  # fmt: skip
    return subprocess.run(
        [sys.executable, "-c", code, name, *(options or ("",))], env=environment, capture_output=True, text=True,
        timeout=120,
    )  # fmt: skip


def test_a_data_set_of_the_hub(hub, tmp_path):
    pq.write_table(pa.Table.from_pylist([rows.verified()]), tmp_path / "test.parquet")
    pq.write_table(pa.Table.from_pylist([rows.verified(instance_id="o__r-dev")]), tmp_path / "dev.parquet")
    FakeHub.files = {
        "README.md": b"# a data set",
        "data/dev-00000-of-00001.parquet": (tmp_path / "dev.parquet").read_bytes(),
        "data/test-00000-of-00001.parquet": (tmp_path / "test.parquet").read_bytes(),
    }
    assert from_hub(hub, "lumen/tasks", "test").stdout.strip() == "['lumen-labs__lumen-17']", from_hub(
        hub, "x/y"
    ).stderr
    assert from_hub(hub, "lumen/tasks").stdout.strip() == "['o__r-dev', 'lumen-labs__lumen-17']"
    assert "has no Parquet or JSON lines file of split train" in from_hub(hub, "lumen/tasks", "train").stdout


def test_no_network_is_one_line(monkeypatch):
    def offline(*arguments: object, **options: object) -> list[str]:
        raise OSError("no route")

    monkeypatch.setattr("huggingface_hub.HfApi.list_repo_files", offline)
    with pytest.raises(ConfigError, match=r"the hub does not give it \(OSError\): check the name and the network"):
        list(import_tasks("swebench", "lumen/tasks"))
    with pytest.raises(ConfigError, match="neither a file, a folder nor"):
        list(import_tasks("swebench", "lumen"))
