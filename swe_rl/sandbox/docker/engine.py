"""The few things that the Docker Engine of this machine is asked for, through its SDK; blocking, from any thread.

Whatever goes wrong is typed: SandboxUnavailable for what no retry changes (no SDK, no engine, no such image),
SandboxError for the rest. An engine that has answered before is waited for while it restarts.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import io
import json
import os
import random
import tarfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from swe_rl.errors import ConfigError, SandboxError, SandboxUnavailable
from swe_rl.sandbox.docker.labels import labels

CALL_S = 60.0  # one call; a busy engine takes seconds
RESTART_S = 40.0  # how long a restarting engine is waited for
GONE_S = 20.0  # how long a removal may take
_PROBE_S = 600.0  # what looks into an image is left over after this
_MAX_FILE = 4 << 20  # bytes of a list of accounts
_GO_DIRECTORY = 1 << 31  # in the engine's mode of a file
_T = TypeVar("_T")
_CURE = "start a Docker Engine (apt-get install docker.io), or use sandbox=local"


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """What is known of an image before a container runs."""

    id: str
    env: Mapping[str, str]
    passwd: bytes  # /etc/passwd, empty when it has none
    group: bytes
    user: str  # whom it says commands run as, "" for root
    workdir: str  # what it says is its own, "/" by default
    directories: frozenset[str]  # of those that may become the work directory, the ones it has
    volumes: tuple[str, ...]  # where it asks for storage of its own


@dataclass(frozen=True, slots=True, kw_only=True)
class Abilities:
    """What not every engine, or its storage, or the machine it is on, can do."""

    spares_supervisor: bool  # has CAP_SYS_RESOURCE to give, which keeps the memory killer from PID 1
    has_quota: bool  # can cap what a container writes to the engine's storage


class Engine:
    """One client per process and address (`Engine.shared`). Thread-safe."""

    def __init__(self, host: str) -> None:
        self.host = host
        self._answered = False
        self._images: dict[tuple[str, str], Image] = {}
        self._abilities: Abilities | None = None
        self._lock = threading.Lock()
        if not host.startswith("unix://"):
            raise SandboxUnavailable(
                f"DOCKER_HOST={host} is not an engine of this machine: its containers cannot call back. {_CURE}"
            )
        try:
            import docker
        except ImportError as err:
            raise SandboxUnavailable("sandbox.backend=docker needs the SDK: pip install 'swe-rl[docker]'") from err
        with self._typed("be reached"):
            self._api = docker.APIClient(base_url=host, version="auto", timeout=int(CALL_S), max_pool_size=32)
            # Where containers live while the engine restarts, some versions remove those at its start that remove
            # themselves when they end: there the reaper removes what ended.
            self.removes_ended = not self._api.info()["LiveRestoreEnabled"]
        self._answered = True

    @staticmethod
    def shared() -> Engine:
        """The engine that DOCKER_HOST names, the usual one without it."""
        return _engine(os.environ.get("DOCKER_HOST") or "unix:///var/run/docker.sock")

    def info(self) -> dict[str, Any]:
        """What the engine says of itself and of the kernel."""
        return self._call("be asked", self._api.info)

    def image_ids(self) -> list[str]:
        """Images that the engine has."""
        return [image["Id"] for image in self._call("list images", self._api.images)]

    def image(self, name: str, *, workdir: str) -> Image:
        """Facts of an image; what needs a look inside is found out once. Raises SandboxUnavailable when the engine has
        no such image."""
        what = f"look at image {name}"
        found = self._call(what, lambda: self._inspect_image(name))
        key = (found["Id"], workdir)
        with self._lock:
            if key not in self._images:
                self._images[key] = self._call(what, lambda: self._look_inside(found, workdir))
            return self._images[key]

    def _inspect_image(self, name: str) -> dict[str, Any]:
        from docker.errors import APIError, ImageNotFound

        try:
            return self._api.inspect_image(name)
        except ImageNotFound:
            raise
        except APIError as err:
            if err.status_code not in (400, 404):
                raise
            raise SandboxUnavailable(f"{name[:100]!r} is no name of an image: {err.explanation}") from err

    def _look_inside(self, found: Mapping[str, Any], workdir: str) -> Image:
        pairs = (entry.partition("=") for entry in found["Config"].get("Env") or ())
        config = {"Image": found["Id"], "Cmd": ["none"], "Labels": labels(_PROBE_S)}
        probe = self._api.create_container_from_config(config)["Id"]
        try:
            own = os.path.normpath(found["Config"].get("WorkingDir") or "/")
            return Image(
                id=found["Id"],
                env={key: value for key, _, value in pairs},
                passwd=self._file(probe, "/etc/passwd"),
                group=self._file(probe, "/etc/group"),
                user=found["Config"].get("User") or "",
                workdir=own,
                directories=frozenset(path for path in {own, workdir} if self._is_directory(probe, path)),
                volumes=tuple(found["Config"].get("Volumes") or ()),
            )
        finally:
            self._api.remove_container(probe, v=True, force=True)

    def _stat(self, container: str, path: str) -> dict[str, Any] | None:
        """Name, size and mode of a file; None when there is none. Opens no stream: one that nobody reads to its end
        keeps the engine from removing the container."""
        from docker.errors import create_api_error_from_http_exception
        from requests.exceptions import HTTPError

        url = f"{self._api.base_url}/v{self._api.api_version}/containers/{container}/archive"
        answer = self._api.head(url, params={"path": path}, timeout=CALL_S)
        if answer.status_code == 404:
            return None
        try:
            answer.raise_for_status()
        except HTTPError as err:
            create_api_error_from_http_exception(err)
        found: dict[str, Any] = json.loads(base64.b64decode(answer.headers["X-Docker-Container-Path-Stat"]))
        return found

    def _file(self, container: str, path: str) -> bytes:
        found = self._stat(container, path)
        if found is None:
            return b""
        if found["size"] > _MAX_FILE:
            raise ConfigError(f"{path} of the image has {found['size']} bytes: it is no list of accounts")
        stream, _ = self._api.get_archive(container, path)
        with tarfile.open(fileobj=io.BytesIO(b"".join(stream))) as archive:
            member = archive.extractfile(archive.getmembers()[0]) if archive.getmembers()[0].isfile() else None
            return member.read() if member else b""

    def _is_directory(self, container: str, path: str) -> bool:
        found = self._stat(container, path)
        return found is not None and bool(found["mode"] & _GO_DIRECTORY)

    def abilities(self, image_id: str) -> Abilities:
        """What this engine can grant; tried out once, with that image."""
        with self._lock:
            if self._abilities is None:
                self._abilities = Abilities(
                    spares_supervisor=self._try({"CapDrop": ["ALL"], "CapAdd": ["SYS_RESOURCE"]}, image_id),
                    has_quota=self._try({"StorageOpt": {"size": "64M"}}, image_id),
                )
            return self._abilities

    def _try(self, host: Mapping[str, Any], image_id: str) -> bool:
        """Whether a container with these parts of HostConfig gets as far as its program, which does not exist."""
        from docker.errors import APIError

        config = {
            "Image": image_id,
            "Entrypoint": ["/.swe-rl-none"],
            "Labels": labels(_PROBE_S),
            "HostConfig": {"NetworkMode": "none", **host},
        }
        name = f"swe-rl-probe-{os.getpid()}-{time.monotonic_ns()}"

        def attempt() -> bool:
            try:
                self._api.create_container_from_config(config, name=name)
                self._api.start(name)
            except APIError as err:
                return "swe-rl-none" in str(err.explanation)
            return True

        try:
            return self._call("start a container", attempt)
        finally:
            self.remove(name)

    def start(self, name: str, config: Mapping[str, Any]) -> None:
        """Creates and starts a container of that name, which nobody else uses."""
        from docker.errors import APIError

        def create() -> None:
            try:
                self._api.create_container_from_config(config, name=name)
            except APIError as err:
                if err.status_code != 409:  # else an earlier try did it, whose answer was lost
                    raise

        self._call("create a container", create)
        self._call("start a container", lambda: self._api.start(name))

    def is_running(self, name: str) -> bool:
        """False for a container that has ended or is gone."""
        from docker.errors import NotFound

        def ask() -> bool:
            try:
                return bool(self._api.inspect_container(name)["State"]["Running"])
            except NotFound:
                return False

        return self._call("look at a container", ask)

    def remove(self, name: str) -> None:
        """Kills and removes a container; returns when it is gone. None of that name is well."""
        from docker.errors import APIError, NotFound

        def remove() -> None:
            deadline = time.monotonic() + GONE_S
            while True:
                try:
                    self._api.remove_container(name, v=True, force=True)
                except NotFound:
                    return
                except APIError as err:
                    if err.status_code != 409 or time.monotonic() > deadline:  # else: it removes itself just now
                        raise
                    time.sleep(0.02)

        self._call("remove a container", remove)

    def containers(self, label: str) -> list[dict[str, Any]]:
        """All containers with that label, ended ones too: "Id", "Labels", "Created"."""
        return self._call("list containers", lambda: self._api.containers(all=True, filters={"label": label}))

    def _call(self, what: str, call: Callable[[], _T]) -> _T:
        from requests.exceptions import ConnectionError as Unreachable

        deadline = time.monotonic() + RESTART_S
        while True:
            try:
                with self._typed(what):
                    return call()
            except SandboxError as err:
                unreachable = isinstance(err.__cause__, Unreachable)
                if not unreachable or not self._answered or time.monotonic() > deadline:
                    raise
                time.sleep(random.uniform(0.1, 0.5))

    @contextlib.contextmanager
    def _typed(self, what: str) -> Iterator[None]:
        from docker.errors import APIError, DockerException, ImageNotFound
        from requests.exceptions import RequestException

        try:
            yield
        except ImageNotFound as err:
            raise SandboxUnavailable(f"{err.explanation}: pull or build it first") from err
        except APIError as err:
            raise SandboxError(f"the Docker Engine could not {what}: {err.explanation or err}") from err
        except (DockerException, RequestException, OSError, tarfile.TarError) as err:
            if self._answered:
                raise SandboxError(f"the Docker Engine could not {what}: {err}") from err
            raise SandboxUnavailable(f"no Docker Engine answers at {self.host} ({_last(err)}): {_CURE}") from err


def _last(err: BaseException) -> str:
    """The innermost reason: the SDK wraps a refused connection in three layers of words."""
    while err.__context__ is not None:
        err = err.__context__
    return str(err)


@functools.cache
def _engine(host: str) -> Engine:
    return Engine(host)
