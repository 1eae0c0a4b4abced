"""The frame format on both sides: the C parser under sanitizers, the Python reader against arbitrary cuts."""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from real_parts import require

from swe_rl.errors import SandboxLost
from swe_rl.sandbox import wire

SOURCES = Path(__file__).parents[3] / "csrc" / "sandboxd"
HARNESS = Path(__file__).with_name("fuzz_frames.c")


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = next((c for c in ("cc", "gcc", "clang") if shutil.which(c)), None)
    require(compiler is not None, "a C compiler")
    assert compiler is not None
    target = tmp_path_factory.mktemp("fuzz") / "fuzz"
    flags = ["-std=gnu11", "-g", "-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{SOURCES}"]
    done = subprocess.run(
        [compiler, *flags, str(HARNESS), str(SOURCES / "frame.c"), "-o", str(target)], capture_output=True, text=True
    )
    require(done.returncode == 0, f"a compiler with sanitizers ({done.stderr[-200:]})")
    return target


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_c_parser_survives_mutated_frames(fuzzer: Path, seed: int) -> None:
    done = subprocess.run([str(fuzzer), "60000", str(seed)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    words = done.stdout.replace(",", "").split()  # "N frames, M streams refused, ..."
    frames, refused = int(words[0]), int(words[2])
    assert frames > 60_000  # the mutations did not make everything invalid ...
    assert refused > 1_000  # ... nor leave everything valid


@settings(max_examples=100, deadline=None)
@given(
    frames=st.lists(st.tuples(st.integers(1, 60), st.integers(0, 2**32 - 1), st.binary(max_size=300)), max_size=8),
    cuts=st.lists(st.integers(1, 50), min_size=1, max_size=20),
)
def test_reader_gives_the_frames_however_the_stream_is_cut(
    frames: list[tuple[int, int, bytes]], cuts: list[int]
) -> None:
    stream = b"".join(wire.frame(kind, number, body) for kind, number, body in frames)
    reader, got, at, turn = wire.FrameReader(), [], 0, 0
    while at < len(stream):
        size = cuts[turn % len(cuts)]
        got += [(f.kind, f.request_id, f.body) for f in reader.feed(stream[at : at + size])]
        at, turn = at + size, turn + 1
    assert got == frames


def test_reader_refuses_an_absurd_length() -> None:
    with pytest.raises(SandboxLost, match="frame of 9999999 bytes"):
        list(wire.FrameReader().feed(struct.pack("<III", 9_999_999, 0, wire.RESULT)))


def _result(code: int, outcome: int, totals: tuple[int, int], out: bytes, err: bytes, head: int) -> bytes:
    return struct.pack("<IIQQQIII", code, outcome, 1500, *totals, len(out), len(err), head) + out + err


def test_result_of_short_output_is_verbatim() -> None:
    result = wire.parse_result(_result(3, 1, (4, 2), b"a\xffb\n", b"e\n", 8))
    assert (result.exit_code, result.outcome, result.stdout, result.stderr) == (3, "nonzero", b"a\xffb\n", b"e\n")
    assert (result.duration_s, result.stdout_bytes, result.stderr_bytes) == (0.0015, 4, 2)


def test_result_of_long_output_says_what_is_missing() -> None:
    result = wire.parse_result(_result(137, 6, (1000, 0), b"headtail", b"", 4))
    assert (result.stdout, result.outcome) == (b"head\n[... 992 bytes omitted ...]\ntail", "output_limit")
    assert result.stdout_bytes == 1000
