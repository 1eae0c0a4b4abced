"""Fetches an image from a running Docker Engine."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from swe_rl.errors import ConfigError, ImageError


def save_image(name: str, target: Path) -> None:
    """Writes the image as `docker save` does to `target`, by the Docker SDK or else the docker command.

    Raises ImageError when the daemon does not have it, ConfigError when there is no daemon or no way to ask one.
    """
    try:
        import docker
    except ImportError:
        _save_by_command(name, target)
        return
    try:
        client = docker.from_env()
        try:
            with open(target, "wb") as file:
                for chunk in client.images.get(name).save(named=True):
                    file.write(chunk)
        finally:
            client.close()
    except docker.errors.ImageNotFound as err:
        raise ImageError(f"the Docker daemon has no image {name!r}: docker pull {name}") from err
    except docker.errors.DockerException as err:
        raise ConfigError(f"the Docker daemon does not answer: {' '.join(str(err).split())}") from err


def _save_by_command(name: str, target: Path) -> None:
    tool = shutil.which("docker")
    if not tool:
        raise ConfigError("neither the Docker SDK (pip install 'swe-rl[docker]') nor the docker command is installed")
    with open(target, "wb") as file:
        done = subprocess.run([tool, "save", name], stdout=file, stderr=subprocess.PIPE, text=True)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise ImageError(f"docker save {name}: {lines[-1]}")
