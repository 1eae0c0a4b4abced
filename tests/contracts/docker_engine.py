"""A Docker Engine of a test's own, to be stopped and started."""

from __future__ import annotations

import asyncio
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

UP_S = 60.0


def is_installed() -> bool:
    return shutil.which("dockerd") is not None


class PrivateEngine:
    """dockerd with everything of it in one directory; no firewall rule, no bridge."""

    def __init__(self, directory: Path, *, live_restore: bool) -> None:
        self._directory = directory
        self._live_restore = live_restore
        self._process: subprocess.Popen[bytes] | None = None
        self.host = f"unix://{directory}/d.sock"

    async def start(self) -> None:
        path = self._directory
        options = ["--data-root", path / "data", "--exec-root", path / "exec", "--pidfile", path / "pid"]
        options += ["--host", self.host, "--iptables=false", "--ip6tables=false", "--bridge=none"]
        options += ["--live-restore"] if self._live_restore else []
        with open(path / "log", "ab") as log:
            command = ["dockerd", *map(str, options)]
            self._process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        for _ in range(int(UP_S / 0.2)):
            if await asyncio.to_thread(self._answers):
                return
            await asyncio.sleep(0.2)
        raise AssertionError((path / "log").read_text()[-2000:])

    def _answers(self) -> bool:
        import docker

        try:
            client = docker.APIClient(base_url=self.host, timeout=5)
            client.ping()
            client.close()
        except docker.errors.DockerException:
            return False
        except OSError:
            return False
        return True

    async def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGTERM)
            await asyncio.to_thread(process.wait)


@asynccontextmanager
async def running(directory: Path, *, live_restore: bool) -> AsyncIterator[PrivateEngine]:
    engine = PrivateEngine(directory, live_restore=live_restore)
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()
        _unmount(directory)


def _unmount(directory: Path) -> None:
    """dockerd binds its data root to itself, and leaves that when it keeps containers alive."""
    mounts = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((place for place in mounts if Path(place).is_relative_to(directory)), reverse=True):
        subprocess.run(["umount", "-l", place], check=True)
