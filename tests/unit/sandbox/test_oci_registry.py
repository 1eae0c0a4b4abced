"""Images of a registry, by the real skopeo, from a registry of a few lines that serves an OCI layout."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import oci_images as build
import pytest
from oci_images import Built
from real_parts import require

from swe_rl.cli.dispatch import main
from swe_rl.errors import ImageError
from swe_rl.sandbox import open_sandbox
from swe_rl.sandbox.oci import default_store
from swe_rl.sandbox.oci.sources import open_source
from swe_rl.types import SandboxSpec


@pytest.fixture
def registry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Name of an image in a registry on this machine."""
    require(shutil.which("skopeo") is not None, "skopeo")
    monkeypatch.setenv("SWE_RL_CACHE", str(tmp_path / "cache"))
    layers = [build.base_layer(), build.layer(build.folder("srv"), build.entry("srv/f", b"1\n"))]
    built = Built(layers, {"WorkingDir": "/srv"})
    layout = built.layout(tmp_path / "layout")
    manifest = json.loads((layout / "index.json").read_text())["manifests"][0]

    class Registry(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            kind = "application/octet-stream"
            path = layout / "blobs" / "sha256" / self.path.rpartition(":")[2]
            if self.path.startswith("/v2/tools/app/manifests/"):
                kind = manifest["mediaType"]
                path = layout / "blobs" / "sha256" / manifest["digest"][7:] if "nope" not in self.path else path / "x"
            data = b"{}" if self.path == "/v2/" else path.read_bytes() if path.is_file() else None
            self.send_response(200 if data is not None else 404)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(data or b"")))
            self.end_headers()
            self.wfile.write(data or b"")

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        host = f"127.0.0.1:{server.server_port}"
        settings = tmp_path / "home" / ".config" / "containers"
        settings.mkdir(parents=True)
        (settings / "registries.conf").write_text(f'[[registry]]\nlocation = "{host}"\ninsecure = true\n')
        (settings / "policy.json").write_text('{"default": [{"type": "insecureAcceptAnything"}]}')
        monkeypatch.delenv("CONTAINERS_REGISTRIES_CONF", raising=False)
        monkeypatch.setenv("HOME", str(tmp_path / "home"))
        for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"):
            monkeypatch.delenv(name, raising=False)
        yield f"{host}/tools/app:1"
        server.shutdown()


async def test_image_of_a_registry(registry: str) -> None:
    assert main(["sandbox", "import", f"docker://{registry}"]) == 0
    assert list(default_store().names()) == [registry]
    async with open_sandbox(SandboxSpec(image=registry)) as sandbox:
        assert (await sandbox.exec("pwd; cat f")).stdout == b"/srv\n1\n"


def test_image_that_the_registry_does_not_have(registry: str) -> None:
    name = registry.replace(":1", ":nope")
    with (
        pytest.raises(ImageError, match="skopeo could not fetch docker://127") as caught,
        open_source(f"docker://{name}"),
    ):
        pass
    assert "\n" not in str(caught.value)
