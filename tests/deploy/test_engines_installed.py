"""What an edge that was installed from a bundle or a package says of its engine, without a GPU.

NVIDIA's own builder builds the engines, and its own wheels are installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pilotfish.cli import main
from pilotfish.deploy import deb, wheelhouse
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.tensorrt.edition import RTX
from tests.deploy.conftest import only
from tests.deploy.test_engines_shipped import VERSION, add_engine, silent, unpack
from tests.support.bundles import (
    MACHINE,
    PYTHON,
    can_install,
    installation,
    needed,
    release,
    repack,
    tiny_rootfs,
)
from tests.support.nvidia_builder import needs_builder
from tests.support.tiny import tiny_artifact

pytestmark = [needs_builder, can_install, pytest.mark.slow, pytest.mark.timeout(900)]
NVIDIA = ("tensorrt-rtx-cu12-libs", "tensorrt-rtx-cu12-bindings")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> tuple[Artifact, Path]:
    """A target with an engine that NVIDIA built, and an engine of another artifact."""
    folder = tmp_path_factory.mktemp("built")
    engines = []
    for seed, name in enumerate(("target", "other")):
        made = tiny_artifact(folder / name, dialect="opset17", precision="fp16", seed=seed)
        command = ["export", "engine", str(made.path), "--provider", RTX.provider]
        assert main([*command, "--slots", "4", "--context", "128"]) == 0
        engines += (made.path / "engines").iterdir()
    return Artifact.open(folder / "target"), engines[1]


@pytest.fixture(scope="module")
def real_wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Wheels of what is installed here, and of what runs the engine."""
    folder = tmp_path_factory.mktemp("house")
    ours = metadata.requires("pilotfish") or []
    texts = [text for text in ours if "extra ==" not in text or "serve" in text or "cpu" in text]
    for distribution in needed([*texts, *NVIDIA]):
        repack(distribution, folder)
    return folder


def test_what_an_edge_from_a_bundle_says_of_its_engine(
    built: tuple[Artifact, Path],
    real_wheels: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only(real_wheels, monkeypatch)
    wheels = [path for name in NVIDIA for path in real_wheels.glob(f"{name.replace('-', '_')}-*")]
    out, root = tmp_path / "bundle", tiny_rootfs(tmp_path / "root")
    command = ["bundle", "--role", "edge", "--artifact", built[0].path, "--python", PYTHON,
               "--machine", MACHINE, "--sign", release() / "signer.key", "--out", out,
               *(word for wheel in wheels for word in ("--wheel", wheel))]  # fmt: skip
    assert main([*map(str, command)]) == 0
    signers = release() / "signers"
    command = ["flash", "--signers", signers, "--rootfs", root, out]
    assert main([*map(str, command)]) == 0
    here, _ = installation(root)
    assert here.check() == []
    current = root / "opt/pilotfish/current"
    compare_sentences(current / "bin/pilotfish", current / "target", built[1])


def test_what_an_edge_from_a_package_says_of_its_engine(
    built: tuple[Artifact, Path], real_wheels: Path, tmp_path: Path
) -> None:
    wheelhouse.pack(real_wheels)
    package = deb.build(tmp_path, PYTHON, MACHINE, "1", silent, real_wheels, built[0].path)
    root = tmp_path / "root"
    unpack(package, root)
    home = root / "usr/lib/pilotfish-edge"
    compare_sentences(home / "bin/pilotfish", home / "target", built[1])


def compare_sentences(program: Path, target: Path, other: Path) -> None:
    """Run an installed edge on its engine, and on files that take the engine's place."""
    (engine,) = (target / "engines").iterdir()
    messages = {"whole": serve(program, target)}
    os.truncate(engine, engine.stat().st_size - 1000)
    messages["truncated"] = serve(program, target)
    engine.unlink()
    shutil.copy(other, engine.parent)
    messages["of another artifact"] = serve(program, target)
    (engine.parent / other.name).unlink()
    add_engine(Artifact.open(target), tensorrt="1.6.0.1")
    messages["of another version"] = serve(program, target)
    sentences = {
        "whole": "this machine has no NVIDIA GPU",
        "truncated": "bytes of its engine: copy the file again, or build it again",
        "of another artifact": "was built from another artifact",
        "of another version": f"1.6.0.1, which is not the installed version {VERSION}",
    }
    for case, sentence in sentences.items():
        assert sentence in messages[case], messages[case]
        assert messages[case].count("\n") == 1, messages[case]


def serve(program: Path, target: Path) -> str:
    """What an installed edge writes, with this machine's Python, which has no packages."""
    python = os.path.realpath(sys.executable)
    done = subprocess.run(
        [python, "-s", program, "edge", "serve", "--target", target, "--provider", RTX.provider,
         "--listen", "tcp://127.0.0.1:0", "--sessions", "4", "--context", "128"],
        env={"PATH": os.environ["PATH"], "PILOTFISH_CACHE": str(target.parent / "cache")},
        capture_output=True, text=True, check=False, timeout=120,
    )  # fmt: skip
    assert done.returncode == 69, done.stderr
    return done.stderr
