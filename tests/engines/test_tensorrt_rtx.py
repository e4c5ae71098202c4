"""The provider tensorrt-rtx: engines that NVIDIA's builder builds here, and every refusal.

No GPU runs them. Where a test needs CUDA, it is a double without devices, so the tests say the same
on a machine with a GPU.
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from pilotfish.cli import main
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine_errors import BuildError, ProviderError
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.stage import Head, Stage
from pilotfish.engines.tensorrt.cache import EngineCache
from pilotfish.engines.tensorrt.edition import RTX
from pilotfish.engines.tensorrt.engine_file import (
    check_engine,
    read_header,
    shipped_engines,
    write_engine,
)
from pilotfish.engines.tensorrt.execution import Kernels
from pilotfish.engines.tensorrt.gates import GATES
from pilotfish.engines.tensorrt.targets import check_targets, known_targets
from pilotfish.export.catalog import list_artifacts
from pilotfish.export.split import split_artifact
from tests.support import cudart_double, tensorrt_double
from tests.support.nvidia_builder import needs_builder
from tests.support.tiny import tiny_artifact

NAMES = json.loads((Path(__file__).parent / "tensorrt_names.json").read_text())
SIZES = ["--slots", "2", "--context", "64"]
COMMAND = ["export", "engine", "--provider", "tensorrt-rtx", *SIZES]
Patch = pytest.MonkeyPatch
Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An artifact with an engine, which the command has built."""
    made = tiny_artifact(tmp_path_factory.mktemp("rtx") / "a", dialect="opset24", precision="fp16")
    assert main([*COMMAND, str(made.path)]) == 0
    return made.path


@pytest.fixture
def artifact(built: Path, tmp_path: Path, monkeypatch: Patch) -> Artifact:
    """A copy of it, on a machine without a GPU."""
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    cudart_double.install(monkeypatch, cudart_double.Gpu(devices=0))
    shutil.copytree(built, tmp_path / "copy")
    return Artifact.open(tmp_path / "copy")


def engine_of(artifact: Artifact) -> Path:
    (path,) = shipped_engines(artifact, RTX.provider)
    return path


@needs_builder
def test_the_command_builds_into_the_artifact_once(artifact: Artifact, capsys: Capture) -> None:
    path = engine_of(artifact)
    header = check_engine(path, artifact, tensorrt=RTX.version(), slots=2, context=64)
    assert header.key.compute == "8.0,8.6,8.9,12.0+"
    assert main([*COMMAND, str(artifact.path), "--json", "-"]) == 0
    (line,) = msgspec.json.decode(capsys.readouterr().out)
    assert line == {
        "artifact": artifact.manifest.digest,
        "engine": str(path),
        "built": False,
        "bytes": path.stat().st_size,
        **msgspec.to_builtins(header.key),
    }
    assert main([*COMMAND, str(artifact.path), "--compute", "8.9,8.6"]) == 0
    other = Path(capsys.readouterr().out.strip())
    assert read_header(other).key.compute == "8.6,8.9"
    assert shipped_engines(artifact, RTX.provider) == sorted([path, other])
    artifact.verify()
    (entry,) = list_artifacts(artifact.path.parent)
    assert entry.path == str(artifact.path)
    assert sorted(entry.engines) == [
        "tensorrt-rtx for 8.0,8.6,8.9,12.0+, 2 × 64 tokens",
        "tensorrt-rtx for 8.6,8.9, 2 × 64 tokens",
    ]
    other.write_bytes(b"")
    assert main(["export", "list", str(artifact.path.parent)]) == 0
    assert f"copy: engine {other.name} (damaged)" in capsys.readouterr().out
    other.unlink()
    assert [each.name for each in path.parent.iterdir() if each.suffix != ".engine"] == []


@needs_builder
def test_an_engine_may_go_into_the_cache(artifact: Artifact, capsys: Capture) -> None:
    shutil.rmtree(artifact.path / "engines")
    assert main([*COMMAND, str(artifact.path), "--into", "cache"]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert EngineCache().paths(artifact.manifest.digest, RTX.provider) == [path]
    assert not (artifact.path / "engines").exists()


@needs_builder
def test_a_folder_that_takes_no_engine_is_named(artifact: Artifact, capsys: Capture) -> None:
    shutil.rmtree(artifact.path / "engines")
    (artifact.path / "engines").write_text("a file")
    assert main([*COMMAND, str(artifact.path)]) == 73
    error = capsys.readouterr().err
    assert f"{artifact.path}/engines (File exists): use a copy of the artifact" in error
    assert "or --into cache" in error


@needs_builder
def test_a_service_with_this_provider_gets_its_engines_by_its_configuration(
    artifact: Artifact, tmp_path: Path, capsys: Capture
) -> None:
    config = tmp_path / "device.toml"
    config.write_text(
        f'draft = "{artifact.path}"\nedge = "tcp://127.0.0.1:7077"\nlanes = 3\ncontext = 64\n'
        'provider = "tensorrt-rtx"\n'
    )
    assert main(["export", "engine", "--config", str(config)]) == 0
    path = Path(capsys.readouterr().out.strip())
    assert EngineCache().paths(artifact.manifest.digest, RTX.provider) == [path]
    assert read_header(path).key.slots == 3


@needs_builder
@pytest.mark.parametrize(
    ("compute", "advice"),
    [
        ("8.7", "8.7: build on the Jetson Orin itself, with JetPack's TensorRT"),
        ("11.0", "11.0: build on the Jetson Thor itself, with JetPack's TensorRT"),
        ("8.6,9.0", "9.0: on an H100 or H200, use --provider cuda"),
        ("6.1", r"6.1: choose from 7\.5, 8\.0, 8\.6, 8\.9, 12\.0"),
        ("12.0+", r"12\.0\+: leave --compute out, for an engine that runs on 12\.0 and later"),
        (" ", r"'': choose from 7\.5"),
    ],
)
def test_a_compute_capability_without_a_target_is_refused_before_the_build(
    compute: str, advice: str
) -> None:
    with pytest.raises(BuildError, match=f"builds no engines for compute capability {advice}"):
        check_targets(RTX.load(), compute.split(","))


@needs_builder
@pytest.mark.parametrize(
    ("typed", "compute"),
    [
        ("8.9,8.6", "8.6,8.9"),
        ("8.6, 8.9", "8.6,8.9"),
        ("8.6,8.6", "8.6"),
        ("8.0,8.6,8.9,12.0+", "8.0,8.6,8.9,12.0+"),  # as --json has it
    ],
)
def test_compute_capabilities_as_people_type_them(typed: str, compute: str) -> None:
    assert check_targets(RTX.load(), typed.split(",")) == compute


@needs_builder
def test_refusals_of_the_command(artifact: Artifact, tmp_path: Path, capsys: Capture) -> None:
    before = sorted(artifact.path.rglob("*"))
    assert main([*COMMAND, str(artifact.path), "--compute", "8.7"]) == 65
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.raises(SystemExit, match="2"):
        main(["export", "engine", str(artifact.path), "--compute", "8.9"])
    assert "tensorrt builds for this machine's GPU" in capsys.readouterr().err
    contrib = tiny_artifact(tmp_path / "contrib", dialect="contrib")
    assert main([*COMMAND, str(contrib.path)]) == 65
    assert "--dialect opset17" in capsys.readouterr().err
    assert main([*COMMAND, str(artifact.path), "--slots", "1000000000"]) == 65
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("pilotfish: TensorRT refuses the profile decode (Shape provided for")
    assert error.endswith("): choose fewer --slots or a shorter --context")
    assert sorted(artifact.path.rglob("*")) == before


def test_a_missing_library_says_what_to_install(tmp_path: Path, monkeypatch: Patch) -> None:
    for name in RTX.modules:
        monkeypatch.setitem(sys.modules, name, None)
    artifact = tiny_artifact(tmp_path / "a", dialect="opset24")
    with pytest.raises(ProviderError, match=r"TensorRT for RTX cannot.*pip install.*tensorrt-rtx"):
        Decoder(artifact, provider="tensorrt-rtx")
    assert main([*COMMAND, str(artifact.path)]) == 69


@needs_builder
def test_without_a_gpu_an_intact_engine_leads_to_one_sentence(artifact: Artifact) -> None:
    with pytest.raises(ProviderError, match=r"tensorrt-rtx: .*no CUDA-capable device"):
        Decoder(artifact, slots=2, context=64, provider="tensorrt-rtx")
    assert Decoder(artifact).provider == "cpu"


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-10] ^= 1
    path.write_bytes(data)


def _replace_plan(path: Path) -> None:
    """Write an intact file whose plan TensorRT does not know."""
    write_engine(path, read_header(path).key, b"a plan of yesterday")


def _rewrite(**fields: str) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        line, _, plan = path.read_bytes().partition(b"\n")
        header = json.loads(line)
        header["key"] |= fields
        path.write_bytes(json.dumps(header).encode() + b"\n" + plan)

    return change


@needs_builder
@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        pytest.param(_cut, "bytes of its engine", id="truncated"),
        pytest.param(_flip, "is damaged", id="one bit"),
        pytest.param(lambda path: path.write_bytes(b""), "is empty", id="empty"),
        pytest.param(_rewrite(tensorrt="1.6.0"), "the installed version 1", id="another version"),
        pytest.param(_rewrite(artifact="0" * 16), "another artifact", id="another artifact"),
    ],
)  # fmt: skip
def test_a_faulty_engine_is_named_before_the_gpu_is_wanted(
    artifact: Artifact, spoil: Callable[[Path], None], sentence: str, capsys: Capture
) -> None:
    spoil(engine_of(artifact))
    with pytest.raises(ProviderError, match=f"tensorrt-rtx: .*{sentence}.*pilotfish export engine"):
        Decoder(artifact, slots=2, context=64, provider="tensorrt-rtx")
    assert Decoder(artifact).provider == "cpu"


@needs_builder
def test_an_engine_for_fewer_slots_or_a_shorter_context_is_named(artifact: Artifact) -> None:
    for slots, context in ((3, 64), (2, 65)):
        with pytest.raises(ProviderError, match=f"--slots {slots} --context {context}$"):
            Decoder(artifact, slots=slots, context=context, provider="tensorrt-rtx")


@needs_builder
def test_stages_and_their_head_have_engines_in_their_folders(
    tmp_path: Path, monkeypatch: Patch, capsys: Capture
) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    cudart_double.install(monkeypatch, cudart_double.Gpu(devices=0))
    whole = tiny_artifact(tmp_path / "whole", dialect="opset24", precision="fp16")
    first, second = split_artifact(whole.path, tmp_path / "cut", stages=2)
    assert main([*COMMAND, str(first.path), str(second.path)]) == 0
    assert len(capsys.readouterr().out.split()) == 3
    (head,) = shipped_engines(first, RTX.provider, head=True)
    assert main(["export", "list", str(first.path.parent)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sorted(line for line in lines if line.startswith("stage-1: ")) == [
        "stage-1: engine tensorrt-rtx for 8.0,8.6,8.9,12.0+, 2 × 64 tokens",
        "stage-1: engine tensorrt-rtx for 8.0,8.6,8.9,12.0+, the head",
    ]
    for opened in (first, second):
        with pytest.raises(ProviderError, match="no CUDA-capable device"):
            Stage(opened, slots=2, context=64, provider="tensorrt-rtx")
    with pytest.raises(ProviderError, match="no CUDA-capable device"):
        Head(first, provider="tensorrt-rtx")
    _flip(head)
    with pytest.raises(ProviderError, match="is damaged"):
        Head(first, provider="tensorrt-rtx")


# The double of the standard TensorRT stands in for this one. It shows which engine is chosen, and
# nothing of TensorRT for RTX: not its kernels, and not that an engine runs.


@pytest.fixture
def doubled(tmp_path: Path, monkeypatch: Patch) -> Any:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    gpu = cudart_double.Gpu("RTX 4090", "8.9")
    cudart_double.install(monkeypatch, gpu)
    module = tensorrt_double.tensorrt("10.16.2", gpu)
    monkeypatch.setitem(sys.modules, RTX.modules[0], module)
    monkeypatch.setitem(sys.modules, "tensorrt", None)
    return module.double


def test_an_engine_in_the_artifact_is_taken_before_one_in_the_cache(
    tmp_path: Path, doubled: Any
) -> None:
    artifact = tiny_artifact(tmp_path / "a", dialect="opset17")
    assert Decoder(artifact, slots=1, context=64, provider="tensorrt-rtx").provider
    assert doubled.builds == 1  # for this GPU's compute capability, into the cache
    (cached,) = EngineCache().paths(artifact.manifest.digest, RTX.provider)
    key = read_header(cached).key
    assert (key.gpu, key.compute) == ("", "8.9")
    assert Decoder(artifact).provider == "tensorrt-rtx"
    shipped = artifact.path / "engines" / cached.name
    shipped.parent.mkdir()
    cached.rename(shipped)
    assert Decoder(artifact).provider == "tensorrt-rtx"
    assert doubled.builds == 1


def test_an_engine_for_other_gpus_is_refused_and_none_is_built_in_its_place(
    tmp_path: Path, doubled: Any
) -> None:
    artifact = tiny_artifact(tmp_path / "a", dialect="opset17")
    Decoder(artifact, context=64, provider="tensorrt-rtx")
    (cached,) = EngineCache().paths(artifact.manifest.digest, RTX.provider)
    _rewrite(compute="8.6")(cached)
    shipped = artifact.path / "engines" / cached.name
    shipped.parent.mkdir()
    cached.rename(shipped)
    with pytest.raises(ProviderError, match=r"8\.6, and this machine's GPU, RTX 4090, has 8\.9"):
        Decoder(artifact, context=64, provider="tensorrt-rtx")
    assert Decoder(artifact).provider == "cpu"
    assert doubled.builds == 1


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (_flip, "is damaged, because its SHA-256 differs.*copy the file again"),
        (_replace_plan, r"TensorRT for RTX refuses .* \(the plan is not valid\): build it again"),
    ],
)
def test_a_plan_that_does_not_load_is_named_and_stays(
    tmp_path: Path, doubled: Any, spoil: Callable[[Path], None], sentence: str
) -> None:
    artifact = tiny_artifact(tmp_path / "a", dialect="opset17")
    Decoder(artifact, context=64, provider="tensorrt-rtx")
    (cached,) = EngineCache().paths(artifact.manifest.digest, RTX.provider)
    shipped = artifact.path / "engines" / cached.name
    shipped.parent.mkdir()
    cached.rename(shipped)
    spoil(shipped)
    command = f"pilotfish export engine {artifact.path} --provider tensorrt-rtx --context 64"
    with pytest.raises(ProviderError, match=f"{sentence}.*{command} --compute 8.9"):
        Decoder(artifact, context=64, provider="tensorrt-rtx")
    assert shipped.is_file()
    assert doubled.builds == 1


def test_kernels_that_fit_no_longer_may_lie_where_nothing_can_be_deleted() -> None:
    refusing = SimpleNamespace(deserialize=lambda data: False, serialize=lambda: b"new")
    config = SimpleNamespace(create_runtime_cache=lambda: refusing)
    engine = SimpleNamespace(create_runtime_config=lambda: config)
    Kernels(engine, Path("/proc/version")).save()
    assert Path("/proc/version").is_file()


# Names and signatures of the real edition


@needs_builder
def test_the_library_has_every_name_that_we_use() -> None:
    trt = RTX.load()
    double = tensorrt_double.tensorrt("11.1.0", cudart_double.Gpu())
    for owner in NAMES["11.1"]:
        for name in vars(getattr(double, owner, object)):
            assert name.startswith("_") or hasattr(getattr(trt, owner), name), f"{owner}.{name}"
    names_of_rtx = {
        "ICudaEngine": ["create_runtime_config", "create_execution_context"],
        "IRuntimeConfig": ["create_runtime_cache", "set_runtime_cache"],
        "IRuntimeCache": ["serialize", "deserialize"],
        "IBuilderConfig": ["num_compute_capabilities", "set_compute_capability"],
    }
    for owner, names in names_of_rtx.items():
        for name in names:
            assert hasattr(getattr(trt, owner), name), f"{owner}.{name}"
    assert "runtime_config: " in trt.ICudaEngine.create_execution_context.__doc__
    assert "-> bool" in trt.IRuntimeCache.deserialize.__doc__
    assert set(known_targets(trt)) >= {"7.5", "8.0", "8.6", "8.9", "12.0"}


@needs_builder
@pytest.mark.parametrize("name", GATES)
def test_the_table_of_gates_says_what_this_library_has(name: str) -> None:
    assert GATES[name].is_open(RTX.load()) == GATES[name].rtx


@pytest.mark.parametrize("version", NAMES)
@pytest.mark.parametrize("name", GATES)
def test_the_table_of_gates_says_what_each_version_has(version: str, name: str) -> None:
    """By the names that NVIDIA publishes for the version."""
    gate, number = GATES[name], tuple(int(part) for part in version.split(".")[:2])
    owner, _, member = gate.sign.partition(".")
    published = NAMES[version].get(owner)
    present = published is not None and (not member or member in published)
    since, until = gate.since, gate.until
    assert present == (since is not None and since <= number and (not until or number < until))
