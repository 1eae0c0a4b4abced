"""What hostile or clumsy commands must end in, as a table. Shared by the contract tests of every way to start one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from swe_rl.protocols import Sandbox
from swe_rl.types import ExecResult, Limits, Outcome, SandboxSpec

LIMITS = Limits(
    command_s=20.0,
    memory_bytes=96 << 20,
    pids=48,
    disk_bytes=8 << 20,
    output_bytes=4096,
    output_kill_bytes=8 << 20,
    lease_s=300.0,
)
SPEC = SandboxSpec(limits=LIMITS)
_HOG = 'python3 -c "\nx = []\nwhile True:\n    x.append(bytearray(1 << 20))"'


@dataclass(frozen=True, slots=True)
class Fault:
    name: str
    command: str
    outcomes: Sequence[Outcome]
    exit_code: int | None = None  # None: any
    stdout: bytes | None = None  # exact; None: any
    timeout_s: float = 20.0
    max_s: float = 15.0  # a loaded machine is slow; the point is that it ends
    stdout_bytes: int | None = None
    alive_after: int = 0  # background processes that may go on


FAULTS = (
    Fault("sleep", "echo first; sleep 1000", ["timeout"], 137, b"first\n", timeout_s=0.5),
    Fault("background", "sleep 1000 & echo started", ["ok"], 0, b"started\n", alive_after=1),
    Fault("setsid and disown", "setsid sleep 1000 & disown; echo up", ["ok"], 0, b"up\n", alive_after=1),
    Fault(
        "daemon of a killed command",
        "(setsid bash -c 'setsid sleep 1001 & sleep 1002' &); (sleep 1003 &) ; sleep 1004",
        ["timeout"],
        137,
        b"",
        timeout_s=0.7,
    ),
    Fault("closed descriptors", "exec >&- 2>&-; (sleep 1000 &); sleep 1000", ["timeout"], 137, b"", timeout_s=0.5),
    Fault("cat", "cat; echo end of input", ["ok"], 0, b"end of input\n"),
    Fault("interpreter", "python3; echo $?", ["ok"], 0, b"0\n"),
    Fault("read", "read -p 'name? ' x; echo $?", ["ok"], 0, b"1\n"),
    Fault("terminal", "tty; test -t 0 || echo none; : < /dev/tty", ["nonzero"], 1, b"not a tty\nnone\n"),
    Fault("yes", "yes", ["output_limit"], 137),
    Fault("zeros", "head -c 2000000000 /dev/zero", ["output_limit"], 137),
    Fault("noise on stderr", "yes >&2", ["output_limit"], 137, b""),
    Fault("binary output", "printf 'a\\000\\377\\376\\303(\\r\\n'", ["ok"], 0, b"a\x00\xff\xfe\xc3(\r\n"),
    Fault("surrogate in the command", "printf '%s' '\udcff'", ["ok"], 0, b"\xff"),
    Fault("one long line", "head -c 1000000 /dev/zero | tr '\\0' x", ["ok"], 0, stdout_bytes=1_000_000),
    Fault("unclosed heredoc", "cat <<EOF\nhi", ["ok"], 0, b"hi\n"),
    Fault("unclosed quote", "echo 'abc", ["nonzero"], 2, b""),
    Fault("exit 3", "exit 3", ["nonzero"], 3, b""),
    Fault("set -e", "set -e; false; echo not reached", ["nonzero"], 1, b""),
    Fault("exec", "exec sleep 1000", ["timeout"], 137, timeout_s=0.5),
    Fault("suicide", "kill -9 $$", ["nonzero"], 137, b""),
    Fault("kill 1", "kill -9 1; kill -TERM 1; kill -STOP 1; echo still here", ["ok"], 0, b"still here\n"),
    Fault("kill everything", "(sleep 1000 &); kill -9 -1; echo after", ["nonzero", "ok"]),
    Fault("ignored TERM", "trap '' TERM INT HUP; while :; do sleep 100; done", ["timeout"], 137, timeout_s=0.5),
    Fault("stopped", "kill -STOP $$; echo not reached", ["timeout"], 137, b"", timeout_s=0.5),
    Fault("fork bomb", "bomb() { bomb | bomb & }; bomb", ["pids_limit"]),
    Fault("fork bomb in the foreground", ":(){ :|:; }; :", ["pids_limit", "oom"]),
    Fault(
        "thread bomb",
        "python3 -c 'import threading, time\nfor i in range(200): threading.Thread("
        "target=time.sleep, args=(100,)).start()'",
        ["pids_limit"],
    ),
    Fault("memory", _HOG, ["oom"], 137),
    Fault("memory of a child", f"({_HOG}) ; wait", ["oom"], 137),
    Fault("disk", "dd if=/dev/zero of=/tmp/big bs=1M; ! test -w /tmp/big", ["disk_full"], 1),
    Fault("disk is free again", "rm /tmp/big && echo ok > /tmp/x && cat /tmp/x", ["ok"], 0, b"ok\n"),
    Fault("inodes", "mkdir /tmp/i; for i in $(seq 9000); do : > /tmp/i/$i; done 2>/dev/null; false", ["disk_full"], 1),
    Fault("inodes are free again", "rm -r /tmp/i && echo ok", ["ok"], 0, b"ok\n"),
    Fault("huge command", ": '" + "x" * 300_000 + "'; echo done", ["ok"], 0, b"done\n"),
    Fault("NUL in the command", "echo a\0b", ["nonzero"], 126, b""),
    Fault("CRLF script", "echo a\r\necho b\r\n", ["ok"], 0, b"a\r\nb\r\n"),
    Fault("no PATH", "unset PATH; ls", ["nonzero"], 127, b""),
    Fault("LD_PRELOAD", "export LD_PRELOAD=/nowhere.so; /bin/echo on", ["ok"], 0, b"on\n"),
    Fault("editor", "git init -q .; git config user.name a; git commit --allow-empty", ["nonzero"], 1, b""),
    Fault("no repository any more", "rm -rf .git; git status", ["nonzero"], 128, b""),
    Fault("pager", "yes | head -n 300 | ${PAGER:-less} | wc -l", ["ok"], 0, b"300\n"),
    Fault("closed work directory", "chmod 000 .; ls; chmod 755 /testbed; ls; echo $?", ["ok"], 0, b"0\n"),
    Fault("read-only work directory", "cd /usr && echo x > x", ["nonzero"], 1, b""),
    Fault("kill by name", "(sleep 1000 &); pkill -9 .; echo not reached", ["nonzero"], 137, b""),
    Fault("symlink loop", "ln -s loop loop; cat loop", ["nonzero"], 1, b""),
    Fault("locked directory", "mkdir d; chmod 000 d; ls d; chmod 700 d; rmdir d", ["ok"], 0, b""),
    Fault(
        "deep path",
        "for i in $(seq 60); do mkdir deep && cd deep; done; pwd | wc -c; cd /testbed; rm -r deep",
        ["ok"],
        0,
        b"309\n",
    ),
    Fault("deleted directory", "mkdir gone; cd gone; rmdir ../gone; ls; echo $?", ["ok"], 0, b"0\n"),
    Fault("network", "exec 3<>/dev/tcp/1.1.1.1/53", ["nonzero"], 1, b""),
    Fault("interfaces", "tail -n +3 /proc/net/dev | cut -d: -f1 | tr -d ' '", ["ok"], 0, b"lo\n"),
    Fault(
        "loopback",
        "python3 -c \"import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen();"
        " c = socket.create_connection(s.getsockname()); print('connected')\"",
        ["ok"],
        0,
        b"connected\n",
    ),
    Fault("new user namespace", "unshare -U true", ["nonzero"], 1, b""),
    Fault("mount", "mount -t tmpfs none /tmp", ["nonzero"]),
    Fault(
        "rights",
        "grep -E '^(Cap(Prm|Eff|Bnd|Amb)|NoNewPrivs|Uid)' /proc/self/status | tr -d '\\t'",
        ["ok"],
        0,
        b"Uid:1000100010001000\nCapPrm:0000000000000000\nCapEff:0000000000000000\nCapBnd:0000000000000000\n"
        b"CapAmb:0000000000000000\nNoNewPrivs:1\n",
    ),
    Fault(
        "supervisor is closed",
        "cat /proc/1/mem; readlink /proc/1/fd/3; ls /proc/1/root/; cat /proc/1/environ",
        ["nonzero"],
        1,
        b"",
    ),
    Fault(
        "system is read-only",
        "touch /usr/x || touch /etc/x || touch /x || echo 1 > /proc/sys/vm/drop_caches",
        ["nonzero"],
        1,
        b"",
    ),
    Fault("only own processes", "set -- /proc/[0-9]*; echo $#", ["ok"], 0, b"2\n"),
    Fault(
        "rm -rf /",
        "rm -rf --no-preserve-root /dev /etc /home /proc /tmp /testbed /bin /usr/bin 2>/dev/null; echo $?",
        ["ok", "timeout"],
        timeout_s=10.0,
    ),
    Fault("works after all that", "echo a > b && cat b && ls /bin/ls", ["ok"], 0, b"a\n/bin/ls\n"),
)


async def check(sandbox: Sandbox, fault: Fault) -> str:
    """Empty when the command ended as it must; else what was wrong."""
    start = time.monotonic()
    result = await sandbox.exec(fault.command, timeout_s=fault.timeout_s)
    spent_s = time.monotonic() - start
    wrong = list(_wrong(result, fault, spent_s))
    for _ in range(100):  # a killed process needs a moment to vanish
        left = await sandbox.ping()  # type: ignore[attr-defined]
        if left <= fault.alive_after:
            break
        await asyncio.sleep(0.01)
    else:
        wrong.append(f"{left} processes left")
    await sandbox.exec("kill -9 -1")
    return f"{fault.name}: {', '.join(wrong)} ({result})" if wrong else ""


def _wrong(result: ExecResult, fault: Fault, spent_s: float) -> list[str]:
    wrong = []
    if result.outcome not in fault.outcomes:
        wrong.append(f"outcome {result.outcome}")
    if fault.exit_code is not None and result.exit_code != fault.exit_code:
        wrong.append(f"exit code {result.exit_code}")
    if fault.stdout is not None and result.stdout != fault.stdout:
        wrong.append(f"stdout {result.stdout!r}")
    if fault.stdout_bytes is not None and result.stdout_bytes != fault.stdout_bytes:
        wrong.append(f"{result.stdout_bytes} bytes of output")
    if len(result.stdout) > LIMITS.output_bytes + 64 or len(result.stderr) > LIMITS.output_bytes + 64:
        wrong.append(f"kept {len(result.stdout)} and {len(result.stderr)} bytes")
    if spent_s > fault.max_s:
        wrong.append(f"took {spent_s:.1f} s")
    return wrong
