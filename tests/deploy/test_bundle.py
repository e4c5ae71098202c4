"""Making bundles: their content and roles, and that one really installs and runs."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

from pilotfish.base.errors import KeysError, UnsupportedError
from pilotfish.cli import main
from pilotfish.deploy import admission, bundle, manifest, wheelhouse
from pilotfish.deploy.errors import BundleError, FetchError
from pilotfish.deploy.wheels import Wheel
from pilotfish.engines.artifact import Artifact
from pilotfish.wire import keys
from tests.deploy.conftest import DIRECT, only
from tests.support.bundles import (
    MACHINE,
    PYTHON,
    can_install,
    demands,
    installation,
    needed,
    release,
    repack,
    tiny_bundle,
    tiny_rootfs,
    write_wheel,
)
from tests.support.tiny import tiny_artifact

EDGE = "tcp://edge.example:7077"


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return tiny_artifact(tmp_path_factory.mktemp("model") / "small", dialect="opset17")


def silent(_what: str, _done: int, _total: int) -> None:
    pass


def wanted(artifact: Artifact, own_keys: Path | None, **changes: object) -> bundle.BundleContents:
    fields = {
        "role": "device",
        "artifacts": [artifact.path],
        "address": EDGE,
        "keys": own_keys,
        "python": "3.10",
        "machine": "aarch64",
        **changes,
    }
    return bundle.BundleContents(**fields)


def test_a_bundle_holds_what_the_board_needs(
    index: Path, tmp_path: Path, artifact: Artifact, own_keys: Path
) -> None:
    out = tmp_path / "out" / "bundle"
    signer, named = release() / "signers/signer.pub", tmp_path / "next.pub"
    shutil.copy(signer, named)
    plan = wanted(artifact, own_keys, secret=release() / "signer.key", signers=[named])
    made, advice = bundle.make(plan, out, silent)
    admitted = admission.admit(out, demands(), [].append)
    assert (admitted.manifest, admitted.signer) == (made, "signer")
    assert (out / "signers/next.pub").read_bytes() == signer.read_bytes()
    assert manifest.read(out) == made
    made.verify(out, silent)
    wheels = {wheel.name: wheel for wheel in map(Wheel.from_path, (out / "wheels").iterdir())}
    assert set(wheels) == {*DIRECT, "pilotfish"}  # tomli: its marker is that of the board's Python
    assert wheels["onnxruntime"].path.name.endswith("cp310-cp310-manylinux_2_17_aarch64.whl")
    assert all(wheel.fits("3.10", "aarch64") for wheel in wheels.values())
    assert (out / "keys/device.key").stat().st_mode & 0o777 == 0o600
    assert made.files["keys/device.key"].mode == 0o600
    assert made.files["wheels/" + wheels["numpy"].path.name].mode == 0o644
    assert keys.DeviceKeys.load(out / "keys").edge == keys.read_public(own_keys / "edge.pub")
    assert any("allow" in line for line in advice)
    Artifact.open(out / "artifacts/draft").verify()
    settings = (out / "config/device.toml").read_text()
    assert f'\nedge = "{EDGE}"\n' in settings
    assert '\nkeys = "/etc/pilotfish/keys"' in settings
    assert (out / "systemd/pilotfish-device.service").is_file()
    assert not [path for path in made.files if path.endswith(".toml") and "config" not in path]


def test_a_vendors_runtime_takes_the_place_of_the_resolved_one(
    index: Path, tmp_path: Path, artifact: Artifact, own_keys: Path
) -> None:
    gpu = write_wheel(
        tmp_path,
        "onnxruntime_gpu",
        {"onnxruntime/__init__.py": b""},
        version="1.23.0",
        tag="cp310-cp310-linux_aarch64",
        requires=["numpy>=1.21"],
    )
    made, _ = bundle.make(wanted(artifact, own_keys, wheels=[gpu]), tmp_path / "out", silent)
    runtimes = [path for path in made.files if "onnxruntime" in path]
    assert runtimes == [f"wheels/{gpu.name}"]


@pytest.mark.parametrize("tag", ["cp312-cp312-linux_aarch64", "cp310-cp310-manylinux_2_28_x86_64"])
def test_a_wheel_for_another_board_is_refused(
    tmp_path: Path, artifact: Artifact, own_keys: Path, tag: str
) -> None:
    wheel = write_wheel(tmp_path, "onnxruntime_gpu", {}, tag=tag)
    with pytest.raises(BundleError, match=r"not for Python 3\.10 on aarch64"):
        bundle.make(wanted(artifact, own_keys, wheels=[wheel]), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


def test_what_no_wheel_is_for_is_named(
    index: Path, tmp_path: Path, artifact: Artifact, own_keys: Path
) -> None:
    for path in index.glob("msgspec-*_aarch64.whl"):
        path.unlink()
    with pytest.raises(FetchError, match="msgspec") as caught:
        bundle.make(wanted(artifact, own_keys), tmp_path / "out", silent)
    assert "\n" not in str(caught.value)


def test_without_a_network_it_says_so(
    index: Path,
    tmp_path: Path,
    artifact: Artifact,
    own_keys: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("UV_CONFIG_FILE")
    monkeypatch.setenv("UV_NO_CONFIG", "1")
    monkeypatch.setenv("UV_DEFAULT_INDEX", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_HTTP_RETRIES", "0")
    with pytest.raises(FetchError, match="index cannot be reached"):
        bundle.make(wanted(artifact, own_keys), tmp_path / "out", silent)
    assert not [path for path in tmp_path.iterdir() if "out" in path.name]


def test_a_file_that_is_not_the_resolved_one_is_refused(
    index: Path, tmp_path: Path, artifact: Artifact
) -> None:
    (tmp_path / "out").mkdir()
    (path,) = index.glob("tomli-*.whl")
    version = Wheel.from_path(path).version
    line = f"tomli=={version} --hash=sha256:{'0' * 64}"
    with pytest.raises(FetchError, match=r"(?i)hash"):
        wheelhouse.fetch(tmp_path, [line], tmp_path / "out", "3.10", "aarch64", silent)
    good = f"tomli=={version} --hash=sha256:{manifest.hash_file(path)}"
    wheelhouse.fetch(tmp_path, [good], tmp_path / "out", "3.10", "aarch64", silent)
    assert os.listdir(tmp_path / "out") == [path.name]


def test_the_key_pair_of_a_bundle_outlives_it(
    tmp_path: Path, artifact: Artifact, own_keys: Path
) -> None:
    first, second, third, fourth = (tmp_path / name for name in ("1", "2", "3", "4"))
    plan = wanted(artifact, own_keys)
    advice = bundle.bring_keys(plan, first, tmp_path / "none")
    assert any("allow" in line for line in advice)
    assert (first / "device.key").stat().st_mode & 0o777 == 0o600
    assert bundle.bring_keys(plan, second, first) == []  # made again in the same place
    bundle.bring_keys(plan, third, tmp_path / "none")
    bundle.bring_keys(wanted(artifact, first), fourth, third)  # a pair that is given is taken
    pairs = [keys.DeviceKeys.load(folder) for folder in (first, second, third, fourth)]
    assert pairs[0] == pairs[1] == pairs[3]
    assert pairs[2].secret != pairs[0].secret
    assert pairs[2].edge == keys.read_public(own_keys / "edge.pub")


def test_the_keys_of_an_edge(tmp_path: Path, artifact: Artifact) -> None:
    source, out = tmp_path / "keys", tmp_path / "out"
    keys.create(source, keys.EDGE)
    keys.allow(source, keys.create(source, "alice"))
    plan = wanted(artifact, source, role="edge")
    advice = bundle.bring_keys(plan, out, tmp_path / "none")
    assert keys.EdgeKeys.load(out) == keys.EdgeKeys.load(source)
    assert sorted(os.listdir(out)) == ["allowed", "edge.key", "edge.pub"]
    assert any("edge.pub" in line for line in advice)
    again = bundle.bring_keys(wanted(artifact, None, role="edge"), tmp_path / "new", out)
    assert not any("edge.pub" in line for line in again)
    assert keys.EdgeKeys.load(tmp_path / "new").secret == keys.EdgeKeys.load(source).secret


def test_beyond_loopback_there_must_be_keys(
    tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_KEYS", str(tmp_path / "none"))
    with pytest.raises(KeysError, match=r"copy edge\.pub"):
        bundle.make(wanted(artifact, None), tmp_path / "out", silent)
    with pytest.raises(KeysError, match="not a folder of keys"):
        bundle.make(wanted(artifact, tmp_path / "nowhere"), tmp_path / "out", silent)


def test_an_edge_on_loopback_and_a_board_like_this_one(
    index: Path, tmp_path: Path, artifact: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PILOTFISH_KEYS", str(tmp_path / "none"))
    out = tmp_path / "out"
    local = {"address": "tcp://127.0.0.1:7077", "python": "3.12", "machine": "x86_64"}
    made, advice = bundle.make(wanted(artifact, None, **local), out, silent)
    names = [path for path in made.files if path.startswith("wheels/")]
    assert not any("tomli" in name for name in names)
    assert any(name.endswith("cp312-cp312-manylinux_2_17_x86_64.whl") for name in names)
    assert not [path for path in made.files if path.startswith("keys/")]
    assert "\n#keys = " in (out / "config/device.toml").read_text()
    assert advice == []
    # made again as an edge: the place is taken by a bundle, so it may be replaced
    edge = wanted(artifact, None, role="edge", **local | {"address": "tcp://*:7000"})
    made, _ = bundle.make(edge, out, silent)
    assert {"artifacts/target/model.onnx", "config/edge.toml", "keys/edge.key"} <= made.files.keys()
    assert not [path for path in made.files if "draft" in path or "device.toml" in path]
    assert '\nlisten = "tcp://*:7000"\n' in (out / "config/edge.toml").read_text()
    assert '\nkeys = "' in (out / "config/edge.toml").read_text()


def test_what_the_board_cannot_load_is_refused(
    tmp_path: Path, artifact: Artifact, own_keys: Path
) -> None:
    new = tiny_artifact(tmp_path / "new", dialect="opset24")
    with pytest.raises(BundleError, match="opset17"):
        bundle.make(wanted(new, own_keys), tmp_path / "out", silent)
    with pytest.raises(UnsupportedError, match="tcp://HOST:PORT"):
        bundle.make(wanted(artifact, own_keys, address='x"\nkeys = "'), tmp_path / "out", silent)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").touch()
    with pytest.raises(BundleError, match="other than a bundle"):
        bundle.make(wanted(artifact, own_keys), tmp_path / "mine", silent)
    twice = [artifact.path, artifact.path, artifact.path]
    with pytest.raises(BundleError, match="rename"):
        bundle.make(wanted(artifact, own_keys, artifacts=twice), tmp_path / "out", silent)


@pytest.mark.parametrize(
    "address",
    ["edge:7077", "tcp://edge", "tcp://:7077", "tcp://edge:0", "tcp://edge:65536", "tcp://[::1:7",
     "tcp://a\x1bb:7077", "tcp://a'b:7077", "tcp://a b:7077", "tcp://edge:7077\n", "tcp://e#:7",
     "tcp://*:7077"],
)  # fmt: skip
def test_an_address_that_no_configuration_can_hold_is_refused(
    tmp_path: Path, artifact: Artifact, own_keys: Path, address: str
) -> None:
    with pytest.raises(
        UnsupportedError, match=r"(no|not an) address.*: write tcp://(HOST:PORT|edge:7077)\."
    ):
        bundle.make(wanted(artifact, own_keys, address=address), tmp_path / "out", silent)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("step", range(1, 6))
def test_an_interrupted_bundle_leaves_the_one_that_was_there(tmp_path: Path, step: int) -> None:
    """Its key pair is nowhere else. Ctrl-C before each change of a name."""
    out = tiny_bundle(tmp_path / "bundle")
    child = os.fork()
    if child == 0:
        count = 0

        def watch(event: str, _: object) -> None:
            nonlocal count
            count += event in ("os.rename", "os.chmod", "os.mkdir")
            if event in ("os.rename", "os.chmod", "os.mkdir") and count == step:
                raise KeyboardInterrupt

        sys.addaudithook(watch)
        try:
            with bundle._replacing(out) as folder:
                (folder / "manifest.json").write_text('{"role": "device"}')
        except KeyboardInterrupt:
            os._exit(1)
        os._exit(0)
    os.waitpid(child, 0)
    assert os.listdir(tmp_path) == ["bundle"]
    assert (out / "keys/device.key").is_file() or step > 4


def test_the_same_files_make_the_same_wheel(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    first, second = (wheelhouse.pack(tmp_path / name) for name in ("a", "b"))
    assert first.path.read_bytes() == second.path.read_bytes()
    first.verify()
    assert first.metadata()["Name"] == ["pilotfish"]
    assert "serve" in first.metadata()["Provides-Extra"]


def test_the_pins_are_those_of_the_repository() -> None:
    shipped = Path(wheelhouse.__file__).with_name("constraints.txt")
    root = Path(__file__).parents[2] / "constraints.txt"
    assert shipped.read_bytes() == root.read_bytes()


@pytest.mark.slow
@can_install
def test_a_bundle_of_this_machine_installs_and_runs(
    tmp_path: Path, artifact: Artifact, own_keys: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole way with real wheels: what is installed here, packed again, without a network."""
    house = tmp_path / "house"
    house.mkdir()
    ours = metadata.requires("pilotfish") or []
    extras = [text for text in ours if "extra ==" not in text or "serve" in text or "cpu" in text]
    for distribution in needed(extras):
        repack(distribution, house)
    only(house, monkeypatch)
    out, root = tmp_path / "bundle", tiny_rootfs(tmp_path / "root")
    arguments = [
        *("bundle", "--artifact", str(artifact.path), "--edge", EDGE, "--keys", str(own_keys)),
        *("--python", PYTHON, "--machine", MACHINE, "--out", str(out), "--json", str(root / "j")),
        *("--sign", str(release() / "signer.key")),
    ]
    assert main(arguments) == 0
    assert json.loads((root / "j").read_text())["digest"] == manifest.read(out).digest
    here, _ = installation(root)
    here.install(out, demands())
    assert here.check() == []
    current = root / "opt/pilotfish/current"
    python = os.path.realpath(sys.executable)  # not the virtual environment's: no packages there

    def run(*words: object) -> str:
        command = [python, "-s", str(current / "bin/pilotfish"), *map(str, words)]
        environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path)}
        done = subprocess.run(
            command, env=environment, cwd=root, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert run("--version") == f"pilotfish {metadata.version('pilotfish')}\n"
    assert run(
        *("device", "run", "abc", "--draft", current / "draft"),
        *("--protocol", "local", "--max-tokens", 3),
    )


@pytest.mark.slow
@pytest.mark.parametrize(("python", "runtime"), [("3.10", "1.23.2"), ("3.12", "1.31.1")])
def test_real_wheels_for_aarch64_are_found(tmp_path: Path, python: str, runtime: str) -> None:
    """Needs a network; of what was resolved two small wheels are fetched."""
    (tmp_path / "own").mkdir()
    (tmp_path / "out").mkdir()
    ours = wheelhouse.pack(tmp_path / "own")
    try:
        result = wheelhouse.resolve(tmp_path, ours, [], python, "aarch64", silent)
    except FetchError as error:
        if "cannot be reached" in str(error):
            pytest.skip("resolving real wheels needs a network")
        raise
    names = {line.split()[0] for line in result}
    assert f"onnxruntime=={runtime}" in names
    assert any(name.startswith("tomli==") for name in names) == (python == "3.10")
    small = [line for line in result if line.startswith(("msgspec==", "markupsafe=="))]
    wheelhouse.fetch(tmp_path, small, tmp_path / "out", python, "aarch64", silent)
    wheels = [Wheel.from_path(path) for path in (tmp_path / "out").iterdir()]
    assert {wheel.name for wheel in wheels} == {"msgspec", "markupsafe"}
    for wheel in wheels:
        wheel.verify()
        assert wheel.fits(python, "aarch64")
        assert not wheel.fits(python, "x86_64")
        assert "aarch64" in wheel.platform


def test_tags_of_wheels_against_pythons_and_machines() -> None:
    def fits(tag: str, python: str, machine: str = "aarch64") -> bool:
        return Wheel.from_path(Path(f"x-1-{tag}.whl")).fits(python, machine)

    assert fits("py3-none-any", "3.10")
    assert fits("py2.py3-none-any", "3.13")
    assert fits("cp38-abi3-manylinux2014_aarch64.manylinux_2_17_aarch64", "3.12")
    assert fits("cp310-cp310-linux_aarch64", "3.10")
    assert not fits("cp312-abi3-manylinux_2_28_aarch64", "3.10")
    assert not fits("cp310-cp310-linux_aarch64", "3.12")
    assert not fits("cp310-cp310-win_amd64", "3.10")
    assert not fits("cp310-cp310-macosx_11_0_arm64", "3.10")
    assert not fits("py2-none-any", "3.10")
    assert not fits("cp313-cp313t-manylinux_2_28_aarch64", "3.13")
    assert not fits("pp310-pypy310_pp73-manylinux_2_28_aarch64", "3.10")
    for name in ("x.whl", "x-1.tar.gz", "x-1-../py3-none-any.whl"):
        with pytest.raises(BundleError, match="not named like a wheel"):
            Wheel.from_path(Path(name))


def test_every_tag_of_the_c_librarys_versions_is_asked_for() -> None:
    tags = list(wheelhouse.platforms("aarch64"))
    for name in ("manylinux_2_17", "manylinux2014", "manylinux_2_28", "manylinux_2_31"):
        assert f"{name}_aarch64" in tags
    assert platform.machine() in manifest.MACHINES
