"""What runs on a device needs no training or export framework, nor OpenTelemetry to be imported."""

from __future__ import annotations

import subprocess
import sys

import pytest

IMPORT_ALL = """
import importlib, pkgutil, sys
name = sys.argv[1]
root = importlib.import_module(name)
for module in pkgutil.walk_packages(root.__path__, name + "."):
    if not module.name.endswith("__main__"):
        importlib.import_module(module.name)
own = sum(loaded.startswith(name + ".") for loaded in sys.modules)
heavy = {"torch", "transformers", "onnx", "gguf", "safetensors", "ml_dtypes", "huggingface_hub"}
heavy |= {"opentelemetry"}  # an extra, which is imported when it is switched on
print(own, *sorted(heavy & {loaded.split(".")[0] for loaded in sys.modules}))
"""
PACKAGES = (
    *("pilotfish.speculation", "pilotfish.wire", "pilotfish.engines", "pilotfish.device_runtime"),
    *("pilotfish.edge_runtime", "pilotfish.lab.field", "pilotfish.lab.judge"),
    *("pilotfish.lab.selftest", "pilotfish.lab.doctor", "pilotfish.cli"),
)


@pytest.mark.parametrize("package", PACKAGES)
def test_import_is_light(package: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, package], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    ours, *heavy = done.stdout.split()
    assert int(ours) > 0
    assert heavy == []


def test_the_check_would_notice() -> None:
    """`export` may import onnx, and does."""
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_ALL, "pilotfish.export"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "onnx" in done.stdout.split()
