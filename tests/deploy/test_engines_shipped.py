"""Engines in bundles and packages: what goes along, and what is refused.

Plans here are a few bytes, because nothing on this side of a GPU reads a plan. What an installed
edge says of an engine that NVIDIA's builder built is in test_engines_installed.py.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import msgspec
import pytest

from pilotfish.boards.board import BOARDS
from pilotfish.boards.misfit import MisfitError
from pilotfish.deploy import bundle, deb, manifest, models, wheelhouse
from pilotfish.deploy.board_check import check_board
from pilotfish.deploy.errors import BundleError
from pilotfish.deploy.wheels import Wheel
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cudart import Gpu
from pilotfish.engines.tensorrt.build import EngineRequest
from pilotfish.engines.tensorrt.edition import RTX
from pilotfish.engines.tensorrt.engine_file import shipped_path, write_engine
from pilotfish.engines.tensorrt.targets import USUAL
from tests.support.bundles import (
    release,
    write_wheel,
)
from tests.support.tiny import tiny_artifact

VERSION = "1.7.1.116"
PLAN = bytes(range(256)) * 40
BOARD = ("3.12", "x86_64")
EPOCH_S = 1_700_000_000


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny_artifact(tmp_path_factory.mktemp("model") / "small", dialect="opset17")


@pytest.fixture
def artifact(plain: Artifact, tmp_path: Path) -> Artifact:
    """An artifact with one engine."""
    shutil.copytree(plain.path, tmp_path / "target")
    made = Artifact.open(tmp_path / "target")
    add_engine(made)
    return made


def add_engine(
    artifact: Artifact,
    *,
    tensorrt: str = VERSION,
    slots: int = 4,
    context: int = 128,
    digest: str | None = None,
) -> Path:
    """Put an engine of TensorRT for RTX into the artifact's folder."""
    request = EngineRequest(tensorrt, Gpu("", USUAL), artifact, slots, context, edition=RTX)
    key = msgspec.structs.replace(request.key, artifact=digest or request.key.artifact)
    path = shipped_path(artifact, key)
    write_engine(path, key, PLAN)
    return path


def rtx_wheels(folder: Path, version: str = VERSION, python: str = BOARD[0]) -> list[Path]:
    """Small wheels with the names of NVIDIA's."""
    short = f"cp{python.replace('.', '')}"
    tags = {"libs": "py3-none", "bindings": f"{short}-none"}
    return [
        write_wheel(
            folder,
            f"tensorrt_rtx_cu12_{part}",
            {f"tensorrt_rtx_{part}/__init__.py": b""},
            version=version,
            tag=f"{tag}-manylinux_2_28_x86_64",
        )
        for part, tag in tags.items()
    ]


def wanted(artifact: Artifact, **changes: object) -> bundle.BundleContents:
    fields = {
        "role": "edge",
        "artifacts": [artifact.path],
        "address": "tcp://*:7077",
        "keys": None,
        "python": BOARD[0],
        "machine": BOARD[1],
        "secret": release() / "signer.key",
        **changes,
    }
    return bundle.BundleContents(**fields)


def silent(_what: str, _done: int, _total: int) -> None:
    pass


def test_a_bundle_takes_the_engine_along(index: Path, tmp_path: Path, artifact: Artifact) -> None:
    wheels = rtx_wheels(tmp_path / "nvidia")
    out = tmp_path / "bundle"
    made, advice = bundle.make(wanted(artifact, wheels=wheels), out, silent)
    assert any("if 4 sessions of 128 tokens are too few" in line for line in advice)
    (engine,) = (artifact.path / "engines").iterdir()
    place = f"artifacts/target/engines/{engine.name}"
    assert made.files[place].sha256 == manifest.hash_file(engine)
    assert {f"wheels/{wheel.name}" for wheel in wheels} <= made.files.keys()
    settings = msgspec.toml.decode((out / "config/edge.toml").read_text())
    assert (settings["sessions"], settings["context"]) == (4, 128)
    (out / place).write_bytes(engine.read_bytes()[:-1] + b"x")
    with pytest.raises(BundleError, match=f"{engine.name} differs from the bundle's manifest"):
        made.verify(out, silent)


def test_the_extra_brings_the_runtime_of_the_pinned_version(
    index: Path, tmp_path: Path, artifact: Artifact
) -> None:
    known = metadata.metadata("pilotfish").get_all("Provides-Extra") or []
    if "tensorrt-rtx" not in known:
        pytest.skip("pilotfish was installed before it had the extra: pip install -e .")
    rtx_wheels(index)
    write_wheel(index, "nvidia_cuda_runtime_cu12", {}, version=pin("nvidia-cuda-runtime-cu12"))
    made, _ = bundle.make(wanted(artifact), tmp_path / "bundle", silent)
    names = {Wheel.from_path(Path(path)).name for path in made.files if path.startswith("wheels/")}
    assert {"tensorrt-rtx-cu12-libs", "tensorrt-rtx-cu12-bindings"} <= names
    assert "nvidia-cuda-runtime-cu12" in names
    add_engine(artifact, tensorrt="1.6.0.1")
    with pytest.raises(BundleError, match=r"built by TensorRT for RTX 1\.6\.0\.1, .* 1\.7\.1\.116"):
        bundle.make(wanted(artifact), tmp_path / "bundle", silent)


def pin(name: str) -> str:
    """The pinned version of a distribution."""
    lines = wheelhouse._pins(leave_out=set())
    return next(line.partition(" ;")[0] for line in lines if line.startswith(f"{name}=="))[
        len(name) + 2 :
    ]


def truncate(path: Path, _: Artifact) -> None:
    os.truncate(path, path.stat().st_size - 100)


def empty(path: Path, _: Artifact) -> None:
    path.write_bytes(b"")


def flip(path: Path, _: Artifact) -> None:
    content = bytearray(path.read_bytes())
    content[-50] ^= 1
    path.write_bytes(content)


def of_another(path: Path, artifact: Artifact) -> None:
    path.unlink()
    add_engine(artifact, digest="f" * 64)


REFUSED: dict[str, tuple[Callable[[Path, Artifact], None], str]] = {
    "truncated": (truncate, r"holds 10,140 of the 10,240 bytes of its engine: copy the file again"),
    "empty": (empty, r"empty.*: copy the file again, or build it again: pilotfish export engine"),
    "damaged": (flip, r"is damaged, because its SHA-256 differs"),
    "of another artifact": (of_another, r"was built from another artifact \(digest ffff"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_an_unfit_engine_is_refused(artifact: Artifact, tmp_path: Path, case: str) -> None:
    spoil, sentence = REFUSED[case]
    (path,) = (artifact.path / "engines").iterdir()
    spoil(path, artifact)
    with pytest.raises(BundleError, match=sentence) as caught:
        bundle.make(wanted(artifact), tmp_path / "out", silent)
    assert "\n" not in str(caught.value)
    assert re.search(r"pilotfish export engine .*; delete the old file first$", str(caught.value))
    with pytest.raises(BundleError, match=sentence):
        deb.build(tmp_path / "out", *BOARD, "1", silent, tmp_path, artifact.path)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("versions", "there"),
    [
        ({}, "do not have it: give its wheels of version"),
        ({"libs": "1.6.0.1", "bindings": "1.6.0.1"}, r"are of version 1\.6\.0\.1"),
        ({"libs": VERSION}, r"are of version 1\.7\.1\.116"),
        ({"libs": VERSION, "bindings": "1.6.0.1"}, r"are of version 1\.6\.0\.1 and 1\.7\.1\.116"),
    ],
)
def test_an_engine_without_its_runtime_is_refused(
    artifact: Artifact, versions: dict[str, str], there: str
) -> None:
    engines = models.engines_of(artifact)
    wheels = {f"tensorrt-rtx-cu13-{part}": version for part, version in versions.items()}
    with pytest.raises(BundleError, match=f"wheels to install {there}"):
        models.require_runtime(engines, wheels)
    if versions:
        with pytest.raises(
            BundleError, match=r"target --provider tensorrt-rtx --slots 4 --con.*128"
        ):
            models.require_runtime(engines, wheels)
    right = {f"tensorrt-rtx-cu13-{part}": VERSION for part in ("libs", "bindings")}
    models.require_runtime(engines, right)


def test_a_jetson_gets_no_engine_for_rtx(artifact: Artifact, tmp_path: Path) -> None:
    jetson = check_board(BOARDS["orin-nano"], "7.2", [artifact.path])
    plan = wanted(artifact, python="3.12", machine="aarch64", board=jetson)
    with pytest.raises(BundleError, match=r"runs on no Jetson: move the folder .*/engines away"):
        bundle.make(plan, tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_a_card_without_an_engine_would_idle(artifact: Artifact) -> None:
    rtx = BOARDS["rtx"]
    assert check_board(rtx, None, [artifact.path]) is not None
    shutil.rmtree(artifact.path / "engines")
    with pytest.raises(MisfitError, match=r"has no engine: build one with .* tensorrt-rtx"):
        check_board(rtx, None, [artifact.path])
    record = check_board(rtx, None, [artifact.path], cpu=True)
    assert record is not None
    assert any("will run on the CPU" in line for line in record.lines)


@pytest.mark.parametrize(("name", "cpu"), [("cpu", False), ("rtx", True)])
def test_a_machine_that_computes_on_its_cpu_gets_no_engine(
    index: Path, tmp_path: Path, artifact: Artifact, name: str, cpu: bool
) -> None:
    board = check_board(BOARDS[name], None, [artifact.path], cpu=cpu)
    plan = wanted(artifact, board=board, cpu=cpu)
    made, advice = bundle.make(plan, tmp_path / "bundle", silent)
    assert not any("/engines/" in path or "tensorrt" in path for path in made.files)
    assert not any("engine" in line for line in advice)
    settings = msgspec.toml.decode((tmp_path / "bundle/config/edge.toml").read_text())
    assert "sessions" not in settings  # an engine's sizes would limit the CPU, too


def test_a_device_has_the_lanes_of_its_engine(
    index: Path, tmp_path: Path, artifact: Artifact
) -> None:
    wheels = rtx_wheels(tmp_path / "nvidia")
    plan = wanted(artifact, wheels=wheels, role="device", address="tcp://127.0.0.1:7077")
    _, advice = bundle.make(plan, tmp_path / "bundle", silent)
    assert any("if 4 lanes are too few" in line for line in advice)
    settings = msgspec.toml.decode((tmp_path / "bundle/config/device.toml").read_text())
    assert settings["lanes"] == 4  # with more, the device would not use the engine


def test_the_settings_are_those_of_the_largest_engine(artifact: Artifact) -> None:
    add_engine(artifact, slots=8, context=64)
    add_engine(artifact, slots=8, context=96)
    text = models.edge_settings("#sessions = 16\nx = 1\n", models.engines_of(artifact))
    settings = msgspec.toml.decode(text)
    assert settings == {"sessions": 8, "context": 96, "x": 1}


def test_wheels_on_aarch64_may_need_a_newer_glibc_with_the_runtime() -> None:
    assert "manylinux_2_35_aarch64" not in wheelhouse.platforms("aarch64")
    assert "manylinux_2_35_aarch64" in wheelhouse.platforms("aarch64", ["tensorrt-rtx"])
    assert wheelhouse.glibc_minor("x86_64", ["tensorrt-rtx"]) == wheelhouse.glibc_minor("x86_64")


def test_a_large_wheel_is_never_in_memory(tmp_path: Path) -> None:
    size = 64 << 20
    wheel = Wheel.from_path(write_wheel(tmp_path, "large", {"large/edition.so": bytes(size)}))
    tracemalloc.start()
    try:
        wheel.verify()
        wheel.unpack(tmp_path / "home", "/usr/bin/python3")
        wheel.unpack(tmp_path / "home", "/usr/bin/python3")  # compared with what is there
        deb._md5(tmp_path / "home/site/large/edition.so")
        assert tracemalloc.get_traced_memory()[1] < 8 << 20
    finally:
        tracemalloc.stop()
    assert (tmp_path / "home/site/large/edition.so").stat().st_size == size


# The package


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Pilotfish and its runtime for RTX, without what else it needs."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is missing")
    folder = tmp_path / "wheels"
    rtx_wheels(folder)
    wheelhouse.pack(folder)
    return folder


def test_a_package_holds_target_and_engine(
    artifact: Artifact, wheels: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", str(EPOCH_S))
    first, second = (
        deb.build(tmp_path / name, *BOARD, "1", silent, wheels, artifact.path)
        for name in ("one", "two")
    )
    assert first.read_bytes() == second.read_bytes()
    assert os.listdir(tmp_path / "one") == [first.name]
    root = tmp_path / "root"
    subprocess.run(["dpkg-deb", "--raw-extract", first, root], check=True)
    installed = Artifact.open(root / "usr/lib/pilotfish-edge/target")
    installed.verify()
    assert [engine.key.slots for engine in models.engines_of(installed)] == [4]
    assert not (root / "var").exists()
    sums = ["md5sum", "--check", "--strict", "--quiet", "DEBIAN/md5sums"]
    subprocess.run(sums, cwd=root, check=True)
    assert (
        f"target/engines/{next((artifact.path / 'engines').iterdir()).name}\n"
        in (root / "DEBIAN/md5sums").read_text()
    )
    settings = msgspec.toml.decode((root / "etc/pilotfish/edge.toml").read_text())
    assert settings["target"] == "/var/lib/pilotfish/target"
    assert (settings["sessions"], settings["context"]) == (4, 128)


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("systemd-tmpfiles") is None,
    reason="installing needs root and systemd's tools",
)
def test_the_target_is_linked_unless_there_is_another(
    artifact: Artifact, wheels: Path, tmp_path: Path
) -> None:
    package = deb.build(tmp_path / "out", *BOARD, "1", silent, wheels, artifact.path)
    for name in ("fresh", "own"):
        root = tmp_path / name
        state = root / "var/lib/pilotfish/target"
        if name == "own":
            state.mkdir(parents=True)
        unpack(package, root)
        make_links(root)
        assert state.is_symlink() == (name == "fresh")
    assert os.readlink(tmp_path / "fresh/var/lib/pilotfish/target") == (
        "/usr/lib/pilotfish-edge/target"
    )


def unpack(package: Path, root: Path) -> None:
    """Have dpkg unpack a package in a root; its scripts do not run."""
    for folder in ("info", "updates"):
        (root / "var/lib/dpkg" / folder).mkdir(parents=True)
    (root / "var/lib/dpkg/status").touch()
    command = ["dpkg", f"--root={root}", "--force-depends", "--unpack", str(package)]
    subprocess.run(command, check=True, capture_output=True)


def make_links(root: Path) -> None:
    """Do what `postinst` has systemd-tmpfiles do with the package's line about the target."""
    lines = (root / "usr/lib/tmpfiles.d/pilotfish-edge.conf").read_text().splitlines()
    (line,) = (line for line in lines if line.startswith("L "))
    command = ["systemd-tmpfiles", f"--root={root}", "--create", "-"]
    subprocess.run(command, input=line, text=True, check=True, capture_output=True)


def test_a_package_without_the_engines_runtime_is_refused(
    artifact: Artifact, tmp_path: Path
) -> None:
    (tmp_path / "wheels").mkdir()
    wheelhouse.pack(tmp_path / "wheels")
    command = [sys.executable, "-m", "pilotfish.deploy.deb", "--out", tmp_path / "out", "--wheels",
               tmp_path / "wheels", "--artifact", artifact.path]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == BundleError.exit_code
    (line,) = (line for line in done.stderr.splitlines() if line.startswith("pilotfish: "))
    assert line.endswith("give its wheels of version 1.7.1.116 (libs and bindings).")
    assert not list((tmp_path / "out").glob("*"))
