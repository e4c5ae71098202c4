"""An index of small wheels, and an edge's public key, for tests of making bundles."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from pilotfish.deploy import manifest, wheelhouse
from pilotfish.wire import keys
from tests.support.bundles import write_wheel

# What pilotfish needs itself, with extras; the wheels of the small index below need nothing.
DIRECT = ("jinja2", "llguidance", "msgspec", "numpy", "pyzmq", "rich", "safetensors", "tokenizers",
          "onnxruntime", "tomli", "prometheus-client", "starlette", "uvicorn")  # fmt: skip
COMPILED = ("llguidance", "msgspec", "numpy", "pyzmq", "safetensors", "tokenizers", "onnxruntime")


@pytest.fixture(scope="module")
def own_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the public key of an edge, for making bundles."""
    folder = tmp_path_factory.mktemp("keys")
    public = keys.create(folder / "edge", keys.EDGE)
    shutil.copy(public, folder / "edge.pub")
    return folder


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty wheels of the pinned versions for two boards, and no other index."""
    folder = tmp_path / "index"
    for python in ("3.10", "3.12"):
        short = f"cp{python.replace('.', '')}"
        for line in pins(python):
            name, _, version = line.partition("==")
            tags = ["py3-none-any"]
            if name in COMPILED:
                tags = [f"{short}-{short}-manylinux_2_17_{cpu}" for cpu in manifest.MACHINES]
            for tag in tags:
                file = name.replace("-", "_")
                if not (folder / f"{file}-{version}-{tag}.whl").exists():
                    write_wheel(folder, file, {f"{file}.py": b""}, version=version, tag=tag)
    only(folder, monkeypatch)
    return folder


def pins(python: str) -> list[str]:
    """``name==version`` of what pilotfish needs itself, as pinned for that Python."""
    results = []
    for line in wheelhouse._pins(leave_out=set()):
        pin, _, marker = line.partition(" ; ")
        old = "< '3.11'" in marker or not marker
        new = ">= '3.1" in marker or not marker
        if pin.partition("==")[0] in DIRECT and (old if python == "3.10" else new):
            results.append(pin)
    return results


def only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have uv and pip, by their own configuration, know no wheels but those of a folder."""
    for name in list(os.environ):
        if name.startswith(("UV_", "PIP_")):
            monkeypatch.delenv(name)
    configured = folder.with_name("uv.toml")
    configured.write_text(f"no-index = true\nfind-links = [{str(folder)!r}]\n")
    monkeypatch.setenv("UV_CONFIG_FILE", str(configured))
    monkeypatch.setenv("UV_CACHE_DIR", str(folder.parent / "uv-cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
