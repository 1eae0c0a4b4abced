"""`swe-rl sandbox bench` with containers: alone, and beside what others use."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
import sandbox_backends
from sandbox_backends import IMAGE

from swe_rl.cli import dispatch


def rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_bench_of_one_backend(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sandbox_backends.require_mode("docker")
    table = tmp_path / "alone.csv"
    words = ["--backend", "docker", "--image", IMAGE, "--num", "2", "--concurrency", "2", "--csv", str(table)]
    assert dispatch.main(["sandbox", "bench", *words]) == 0
    assert dispatch.main(["sandbox", "bench", *words]) == 0
    assert "command_ms_p50" in capsys.readouterr().out
    assert [row["backend"] for row in rows(table)] == ["docker", "docker"]
    assert all(0 < float(row["command_ms_p50"]) < float(row["ready_ms_p50"]) for row in rows(table))


@pytest.mark.slow
def test_bench_beside_others(tmp_path: Path) -> None:
    sandbox_backends.require_mode("docker")
    table = tmp_path / "compare.csv"
    words = ["--compare", "--image", IMAGE, "--num", "1", "--commands", "3", "--csv", str(table)]
    assert dispatch.main(["sandbox", "bench", *words]) == 0
    found = {(row["system"], row["step"]): float(row["times_ours"]) for row in rows(table)}
    assert {"swe_rl docker", "swe_rl local", "docker SDK"} <= {system for system, _ in found}
    assert {step for _, step in found} == {"start", "command", "close"}
    assert found["swe_rl docker", "command"] == 1.0
    assert found["docker SDK", "command"] > 1.0  # by a factor of 40, but a busy machine may say anything


def test_bench_without_an_image_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert dispatch.main(["sandbox", "bench", "--compare"]) == 2
    assert "--image is empty" in capsys.readouterr().err
