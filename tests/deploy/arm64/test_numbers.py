"""ONNX Runtime's code for arm64 computes what its code for this machine computes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import get_args

import numpy as np
import pytest

from pilotfish.engines.manifest import Precision
from pilotfish.export.dialects import DIALECTS
from tests.deploy.arm64.board import Board
from tests.deploy.arm64.test_device import CURRENT
from tests.support.tiny import FAMILIES, tiny_artifact

pytestmark = pytest.mark.slow
# Logits of a prompt in two passes, for each artifact in a folder, into another folder.
COMPUTE = """
import sys
from pathlib import Path
import numpy as np
from pilotfish.engines.language_model import open_model
from pilotfish.engines.passes import Pass
tokens = np.random.default_rng(0).integers(0, 100, 24)
for folder in Path(sys.argv[1]).iterdir():
    model = open_model(folder, threads=1, provider="cpu")
    parts = (tokens[:20], tokens[20:])
    rows = [model.forward([Pass(slot=0, tokens=part)])[0].logits.copy() for part in parts]
    np.save(Path(sys.argv[2]) / folder.name, np.concatenate(rows))
"""
# The logits' standard deviation is 2. Both differ by what is rounded: sums of fp32; activations,
# to fp16 or to 8 bits.
FAR = {"fp32": 1e-4, "fp16": 0.2, "int8": 0.2, "int4": 0.2, "stored": 0.2}


def _make_models(folder: Path) -> None:
    """Every dialect that CPUs run in all of its precisions, and every architecture in one."""
    for dialect, kind in DIALECTS.items():
        for precision in get_args(Precision):
            if precision in kind.precisions and dialect != "tensorrt":
                name = f"llama {dialect} {precision}"
                tiny_artifact(folder / name, dialect=dialect, precision=precision)
    for architecture in FAMILIES:
        tiny_artifact(folder / f"{architecture} auto fp32", architecture=architecture)


def test_logits_are_those_of_this_machine_but_for_rounding(
    device_board: Board, tmp_path: Path
) -> None:
    there = device_board.root / "root/numbers"
    (there / "logits").mkdir(parents=True)
    _make_models(there / "models")
    command = (sys.executable, "-c", COMPUTE, there / "models", tmp_path)
    subprocess.run([*map(str, command)], check=True)
    device_board.execute(COMPUTE, f"{CURRENT}/site", "/root/numbers/models", "/root/numbers/logits")
    paths = sorted(tmp_path.iterdir())
    assert len(paths) > len(FAMILIES) + len(FAR)
    for path in paths:
        wanted, got = np.load(path), np.load(there / "logits" / path.name)
        far = FAR[path.stem.split()[-1]]
        np.testing.assert_allclose(got, wanted, atol=far, rtol=0, err_msg=path.stem)
        assert (got.argmax(-1) == wanted.argmax(-1)).mean() > 0.9, path.stem
