"""What every sandbox promises, whichever backend makes it."""

from __future__ import annotations

import asyncio
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import pytest
import sandbox_backends
import sandbox_faults
from sandbox_backends import Opener

from swe_rl.errors import SandboxLost
from swe_rl.protocols import Sandbox
from swe_rl.sandbox.client import SandboxClient

SPEC = sandbox_faults.SPEC


async def out(sandbox: Sandbox, command: str) -> bytes:
    result = await sandbox.exec(command)
    assert result.outcome == "ok", result
    return result.stdout


# ---- faults ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["local", "no cgroup", "container root", "docker"])
async def test_every_fault_ends_as_promised(mode: str) -> None:
    sandbox_backends.require_mode(mode)
    wrong = []
    async with await sandbox_backends.start(mode, SPEC) as sandbox:
        for fault in sandbox_faults.FAULTS:
            wrong.append(await sandbox_faults.check(sandbox, fault))
    assert not any(wrong), "\n".join(filter(None, wrong))


@pytest.mark.parametrize("mode", ["no cgroup", "container root"])
async def test_bombs_in_a_row_where_only_the_supervisor_watches(mode: str) -> None:
    sandbox_backends.require_mode(mode)
    async with await sandbox_backends.start(mode, SPEC) as sandbox:
        for _ in range(20):
            assert (await sandbox.exec("bomb() { bomb | bomb & }; bomb")).outcome == "pids_limit"


# ---- isolation -------------------------------------------------------------------------------------------------


async def test_nothing_of_the_host_is_visible_and_secrets_stay_out(
    opener: Opener, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret = tmp_path / "hidden_test.py"
    secret.write_text("answer")
    monkeypatch.setenv("API_KEY", "hunter2")
    async with await opener(SPEC) as sandbox:
        for path in (secret, Path(__file__), Path.home() / ".ssh"):
            assert (await sandbox.exec(f"ls -d '{path}'")).exit_code == 2, path
        assert (await sandbox.exec("cat /etc/shadow")).exit_code == 1
        assert b"hunter2" not in await out(sandbox, "env; cat /proc/self/environ; set")
        assert await out(sandbox, "ls -A /tmp /dev/shm /testbed | grep -v :; true") == b"\n\n"
        with pytest.raises(FileNotFoundError):
            await sandbox.read_file(str(secret))


async def test_host_file_behind_a_planted_link_is_not_written(opener: Opener, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("untouched")
    async with await opener(SPEC) as sandbox:
        await out(sandbox, f"ln -s {target} link; ln -s /usr/bin/env env")
        with pytest.raises(FileNotFoundError):
            await sandbox.write_file("link", b"x")
        for path in ("env", "/etc/passwd"):
            with pytest.raises(OSError, match=r"Read-only|Permission denied"):
                await sandbox.write_file(path, b"x")
    assert target.read_text() == "untouched"


async def test_two_sandboxes_do_not_see_each_other(opener: Opener) -> None:
    async with await opener(SPEC) as one, await opener(SPEC) as two:
        await out(one, "echo secret > /tmp/x; echo secret > /dev/shm/x; (sleep 100 &)")
        assert (await two.exec("cat /tmp/x /dev/shm/x")).stdout == b""
        assert b"sleep" not in await out(two, "ps -e")


# ---- files, fork -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", sandbox_backends.MODES)
async def test_overlay_hides_changes_from_the_layer(layer: Path, mode: str) -> None:
    sandbox_backends.require_mode(mode)
    top = layer.parent / "top"
    top.mkdir(mode=0o700)  # what tempfile makes
    (top / "readme").write_text("upper\n")
    spec = replace(SPEC, layers=(str(top), str(layer)))
    async with await sandbox_backends.start(mode, spec) as sandbox:
        assert await out(sandbox, "cat readme pkg/a.py; echo more >> pkg/a.py; cat pkg/a.py") == (
            b"upper\nA = 1\nA = 1\nmore\n"
        )
        await out(sandbox, "rm -r pkg && mkdir pkg && touch pkg/new && chmod 600 readme")
        assert await out(sandbox, "ls pkg; stat -c '%u %g' readme pkg/new") == b"new\n1000 1000\n1000 1000\n"
    assert sorted(p.name for p in (layer / "pkg").iterdir()) == ["a.py", "b.py"]
    assert (layer / "pkg" / "a.py").read_text() == "A = 1\n"


async def test_readonly_mounts_are_readable_and_not_writable(opener: Opener, layer: Path) -> None:
    spec = replace(
        SPEC, layers=(str(layer),), readonly_mounts=((str(layer), "/opt/tools"), (str(layer), "/testbed/in"))
    )
    async with await opener(spec) as sandbox:
        assert await out(sandbox, "cat /opt/tools/readme in/readme") == b"hello\nhello\n"
        assert (await sandbox.exec("echo x > /opt/tools/readme || echo x > in/readme")).exit_code == 1


async def test_git_works_on_a_tree_of_another_owner(opener: Opener, layer: Path) -> None:
    subprocess.run(["git", "init", "-q", str(layer)], check=True)
    async with await opener(replace(SPEC, layers=(str(layer),))) as sandbox:
        await out(sandbox, "git add -A && git commit -qm base && echo x >> readme")
        assert await out(sandbox, "git status --short; git log --format=%an") == b" M readme\nagent\n"


async def test_files_round_trip_bytes_and_names(opener: Opener, sandbox: SandboxClient) -> None:
    big = bytes(range(256)) * (20 * 4096)  # 20 MiB
    roomy = replace(SPEC, limits=replace(SPEC.limits, disk_bytes=64 << 20))
    async with await opener(roomy) as other:
        await other.write_file("deep/er/big.bin", big)
        assert await other.read_file("/testbed/deep/er/big.bin") == big
        piped = await other.exec("sha256sum -", stdin=big)
        assert piped.stdout == await out(other, "sha256sum - < deep/er/big.bin")
    for name in ("-rf", "new\nline", "\udcff\udcfe", "blank quote' \" $x", "é"):
        await sandbox.write_file(name, name.encode("utf-8", "surrogateescape"))
        assert await sandbox.read_file(name) == name.encode("utf-8", "surrogateescape")
    listed = (await out(sandbox, "printf '%s\\0' *")).split(b"\0")
    assert {b"-rf", b"new\nline", b"\xff\xfe", b"pkg"} <= set(listed)
    await sandbox.write_file("empty", b"")
    assert await sandbox.read_file("empty") == b""


async def test_file_errors_are_those_of_open(sandbox: SandboxClient) -> None:
    await out(sandbox, "mkfifo fifo; echo x > locked; chmod 000 locked; ln -s /dev/zero zero")
    for path, error in [("nothing", FileNotFoundError), ("pkg", IsADirectoryError), ("locked", PermissionError)]:
        with pytest.raises(error):
            await sandbox.read_file(path)
    for path in ("fifo", "zero", "", "a\0b"):  # would block, would never end, are no names
        with pytest.raises(OSError, match=r"(Invalid argument|No such file)"):
            await sandbox.read_file(path)
    with pytest.raises(OSError, match="No space"):
        await sandbox.write_file("big", bytes(sandbox_faults.LIMITS.disk_bytes + 1))
    with pytest.raises(NotADirectoryError):
        await sandbox.write_file("readme/x", b"")


async def test_fork_copies_what_was_written_and_then_both_go_their_way(sandbox: SandboxClient) -> None:
    await out(sandbox, "rm -r pkg; mkdir pkg; echo c > pkg/c; rm readme; ln -s pkg/c link; mkfifo fifo; chmod 711 pkg")
    await out(sandbox, "touch -d @1000000000 pkg/c; (sleep 100 &)")
    other = await sandbox.fork()  # type: ignore[attr-defined]
    async with other:
        assert await out(other, "ls; ls pkg; cat link; stat -c '%Y %u' pkg/c; stat -c %a pkg; test -p fifo") == (
            b"fifo\nlink\npkg\nc\nc\n1000000000 1000\n711\n"
        )
        assert await other.ping() == 0  # processes are not copied
        await out(other, "echo changed > pkg/c; touch only_here")
        third = await other.fork()
        async with third:
            assert await out(third, "cat pkg/c; ls only_here") == b"changed\nonly_here\n"
    assert await out(sandbox, "cat pkg/c; ls") == b"c\nfifo\nlink\npkg\n"


# ---- commands --------------------------------------------------------------------------------------------------


async def test_concurrent_commands_do_not_wait_for_each_other(sandbox: SandboxClient) -> None:
    start = time.monotonic()
    results = await asyncio.gather(*(sandbox.exec(f"sleep 0.5; echo {i}") for i in range(8)))
    assert [r.stdout for r in results] == [b"%d\n" % i for i in range(8)]
    assert time.monotonic() - start < 3


async def test_timeout_of_one_command_spares_the_others_and_background_jobs(sandbox: SandboxClient) -> None:
    await out(sandbox, "(sleep 100 &)")
    long, short = await asyncio.gather(
        sandbox.exec("sleep 1.2; echo done"), sandbox.exec("(setsid sleep 99 &); sleep 98", timeout_s=0.4)
    )
    assert (long.outcome, long.stdout, short.outcome) == ("ok", b"done\n", "timeout")
    assert await out(sandbox, "pgrep -a sleep | cut -d' ' -f2-") == b"sleep 100\n"


async def test_cancelled_command_is_killed(sandbox: SandboxClient) -> None:
    task = asyncio.create_task(sandbox.exec("(setsid sleep 100 &); sleep 100"))
    await asyncio.sleep(0.3)
    assert await sandbox.ping() >= 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(100):
        if not await sandbox.ping():
            break
        await asyncio.sleep(0.02)
    assert await sandbox.ping() == 0
    assert await out(sandbox, "echo usable") == b"usable\n"


async def test_background_job_survives_without_losing_its_pipe(sandbox: SandboxClient) -> None:
    result = await sandbox.exec("(for i in 1 2 3 4 5 6; do sleep 0.1; echo tick; done; touch finished) & echo go")
    assert result.outcome == "ok"
    assert result.stdout.startswith(b"go\n")
    await asyncio.sleep(1.2)
    assert await out(sandbox, "ls finished") == b"finished\n"


async def test_head_tail_and_totals_of_long_output(sandbox: SandboxClient) -> None:
    result = await sandbox.exec("seq 100000; seq 5 >&2")
    whole = b"".join(b"%d\n" % i for i in range(1, 100001))
    keep = sandbox_faults.LIMITS.output_bytes
    marker = b"\n[... %d bytes omitted ...]\n" % (len(whole) - keep)
    assert result.stdout == whole[: keep // 2] + marker + whole[-keep // 2 :]
    assert (result.stdout_bytes, result.stderr, result.stderr_bytes) == (len(whole), b"1\n2\n3\n4\n5\n", 10)


@pytest.mark.parametrize("size", [0, 1, 2047, 2048, 2049, 4095, 4096, 4097, 6143, 6144, 6145, 10000])
async def test_output_around_the_bound(sandbox: SandboxClient, size: int) -> None:
    text = (b"%07d\n" * (size // 8 + 1) % tuple(range(size // 8 + 1)))[:size]
    result = await sandbox.exec("cat", stdin=text)
    kept = text if size <= 4096 else text[:2048] + b"\n[... %d bytes omitted ...]\n" % (size - 4096) + text[-2048:]
    assert (result.stdout, result.stdout_bytes) == (kept, size)


async def test_stdin_cwd_and_environment(opener: Opener, layer: Path) -> None:
    spec = replace(SPEC, layers=(str(layer),), env={"GREETING": "hi there", "PATH": "/usr/bin:/bin"})
    async with await opener(spec) as sandbox:
        assert (await sandbox.exec("cat; pwd", stdin=b"in\0put\n", cwd="pkg")).stdout == b"in\0put\n/testbed/pkg\n"
        assert (await sandbox.exec("pwd", cwd="/usr")).stdout == b"/usr\n"
        missing = await sandbox.exec("pwd", cwd="nowhere")
        assert (missing.exit_code, missing.outcome) == (126, "nonzero")
        assert b"nowhere" in missing.stderr
        assert await out(sandbox, 'echo "$GREETING $HOME $PATH"') == b"hi there /home/agent /usr/bin:/bin\n"


async def test_too_many_commands_are_refused_not_lost(opener: Opener) -> None:
    roomy = replace(SPEC, limits=replace(SPEC.limits, pids=400))
    async with await opener(roomy) as other:
        results = await asyncio.gather(*(other.exec("sleep 1", stdin=b"") for _ in range(70)))
    assert {r.outcome for r in results} == {"ok", "nonzero"}
    assert sum(r.outcome == "ok" for r in results) == 64


# ---- life and death --------------------------------------------------------------------------------------------


async def test_lease_ends_the_sandbox(opener: Opener) -> None:
    spec = replace(SPEC, limits=replace(SPEC.limits, lease_s=1.0))
    async with await opener(spec) as sandbox:
        with pytest.raises(SandboxLost, match="lease"):
            await sandbox.exec("sleep 100")
        with pytest.raises(SandboxLost, match="lease"):
            await sandbox.exec("true")


async def test_close_while_a_command_runs_and_twice(sandbox: SandboxClient) -> None:
    task = asyncio.create_task(sandbox.exec("sleep 100"))
    await asyncio.sleep(0.2)
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await task
    await sandbox.close()
    with pytest.raises(SandboxLost):
        await sandbox.exec("true")
