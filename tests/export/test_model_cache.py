"""Models by name: exported once, found again, exported anew when the source has changed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gguf
import pytest

from pilotfish import fetch_model
from pilotfish.engines import gpus
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cache import use_until_exit
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.engines.manifest import MANIFEST_NAME
from pilotfish.export.cached_models import folder_key
from pilotfish.export.export_errors import CacheFullError, ExportError
from pilotfish.export.model_cache import Role, default_precision, request_default
from tests.support.hub import serving_hub
from tests.support.other_machine import NODES, make_nodes
from tests.support.small_checkpoints import LLAMA, write_directory, write_gguf

LARGER = LLAMA | {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 8}
# Finds a model without the tools of an export.
WARM = """
import sys
sys.modules.update(dict.fromkeys(("onnx", "gguf", "huggingface_hub")))
from pilotfish import fetch_model
print(fetch_model(sys.argv[1], sys.argv[2]))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "artifacts"


def made(folder: Path) -> list[str]:
    """List the artifacts in a cache, without locks."""
    return sorted(each.name for each in folder.glob("[!.]*"))


def fetch_command(source: object, role: str = "target") -> list[str]:
    words = ["-m", "pilotfish", "models", "fetch", str(source), "--role", role]
    return [sys.executable, *words]


@pytest.mark.parametrize(
    ("kind", "role", "precision"),
    [
        ("directory", "target", "fp32"),
        ("directory", "drafter", "int8"),
        ("Q8_0", "target", "fp32"),
        ("Q8_0", "drafter", "stored"),
        ("F32", "drafter", "int8"),
    ],
)
def test_the_role_and_the_source_choose_the_precision(
    tmp_path: Path, cache: Path, kind: str, role: Role, precision: str
) -> None:
    if kind == "directory":
        source = write_directory(tmp_path / "model")
    else:
        source = write_gguf(tmp_path / "model.gguf", kind=gguf.GGMLQuantizationType[kind])
    lines: list[str] = []
    folder = fetch_model(source, role, provider="cpu", notify=lines.append)
    assert folder.parent == cache
    assert Artifact.open(folder).manifest.precision == precision
    assert f"in {precision}, once" in lines[0]
    assert f"{source} (0 MB)" in lines[0]
    warm = subprocess.run(
        [sys.executable, "-c", WARM, source, role], capture_output=True, text=True, check=False
    )
    assert warm.stdout.strip() == str(folder), warm.stderr


def test_the_default_drafter_of_a_machine_with_a_gpu_is_one_that_the_gpu_runs(
    tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(gpus, "_DEV", make_nodes(tmp_path, NODES["a card"]))
    assert default_precision("drafter", "cuda") == "fp16"
    assert default_precision("drafter", "cpu") == "int4"
    assert default_precision("target", "cuda") == "fp32"
    monkeypatch.setattr(gpus, "_DEV", tmp_path / "none")
    assert default_precision("drafter", "auto") == "int4"


def test_an_artifact_is_taken_as_it_is_and_a_folder_before_a_name(
    tmp_path: Path, cache: Path, monkeypatch: Any
) -> None:
    source = write_directory(tmp_path / "model")
    artifact = fetch_model(source, "target")
    assert fetch_model(artifact, "drafter") == artifact
    monkeypatch.chdir(tmp_path)
    for name in ("default", "owner/tiny"):
        Path(name).parent.mkdir(exist_ok=True)
        artifact.rename(name)
        assert fetch_model(name, "target") == Path(name)
        Path(name).rename(artifact)
    assert made(cache) == [artifact.name]


def test_a_changed_checkpoint_is_exported_anew_and_its_former_artifact_goes(
    tmp_path: Path, cache: Path
) -> None:
    source = write_directory(tmp_path / "model")
    first = fetch_model(source, "drafter")
    (source / "README.md").write_text("no part of the model")
    assert fetch_model(source, "drafter") == first
    write_directory(source, LLAMA | {"rope_theta": 20000.0})
    second = fetch_model(source, "drafter")
    # this process uses the first, so it stays
    assert made(cache) == sorted([first.name, second.name])
    write_directory(source, LLAMA | {"rope_theta": 30000.0})
    done = subprocess.run(
        fetch_command(source, "drafter"), capture_output=True, text=True, check=True
    )
    third = Path(done.stdout.strip())
    assert third.name not in (first.name, second.name)
    assert third.is_dir()


def test_a_former_artifact_that_nothing_uses_is_removed(tmp_path: Path, cache: Path) -> None:
    source = write_directory(tmp_path / "model")
    outputs = []
    for theta in (1e4, 2e4):
        write_directory(source, LLAMA | {"rope_theta": theta})
        done = subprocess.run(fetch_command(source), capture_output=True, text=True, check=True)
        outputs.append(Path(done.stdout.strip()).name)
    assert made(cache) == outputs[1:]
    assert f"removed {cache / outputs[0]}" in done.stderr


def test_what_determines_an_artifact_is_in_its_name() -> None:
    requests = [request_default("int8"), request_default("int4"), request_default("int8", 27)]
    requests.append(request_default("int8", skipped_layers=(20, 21)))
    keys = {folder_key(request, identity) for request in requests for identity in ("a", "b")}
    assert len(keys) == 8
    assert len({request.slug for request in requests}) == 4


def test_of_two_processes_one_exports_and_the_other_waits(tmp_path: Path, cache: Path) -> None:
    source = write_directory(tmp_path / "model", LARGER)
    both = [
        subprocess.Popen(
            fetch_command(source, "drafter"),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    outputs = [process.communicate(timeout=120) for process in both]
    assert [process.returncode for process in both] == [0, 0], outputs
    assert len({stdout for stdout, _ in outputs}) == 1
    assert sum("exported" in stderr for _, stderr in outputs) == 1
    assert len(made(cache)) == 1


def test_a_killed_export_leaves_nothing_half(tmp_path: Path, cache: Path) -> None:
    source = write_directory(tmp_path / "model", LARGER)
    process = subprocess.Popen(fetch_command(source, "drafter"), stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 60
    while not list(cache.glob(".*.partial-*/*.data")):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert made(cache) == []
    folder = fetch_model(source, "drafter")
    Artifact.open(folder).verify()
    assert not list(cache.glob(".*.partial-*"))


def test_a_full_disk_says_what_to_do(tmp_path: Path, cache: Path) -> None:
    cache.mkdir(parents=True)
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(cache)]
    if subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("no file system can be mounted here")
    try:
        source = write_directory(tmp_path / "model")
        with pytest.raises(CacheFullError, match=r"disk is full.*models remove.*PILOTFISH_CACHE"):
            fetch_model(source, "target")
        assert made(cache) == []
        assert not list(cache.glob(".*.partial-*"))
    finally:
        subprocess.run(["umount", cache], check=True)


@pytest.mark.parametrize("name", ["no-such", "defualt", "./Qwen/Qwen3", "a/b/c", "gone.gguf"])
def test_what_is_no_model_says_what_a_model_may_be(name: str) -> None:
    with pytest.raises(ArtifactError, match=r"a GGUF file, a checkpoint's folder") as caught:
        fetch_model(name, "target")
    assert ("Did you mean default" in str(caught.value)) == (name == "defualt")


def test_near_names_are_those_of_files_and_of_the_cache(tmp_path: Path) -> None:
    source = write_gguf(tmp_path / "model-Q8_0.gguf")
    fetch_model(source, "target")
    with pytest.raises(ArtifactError, match=r"Did you mean .*model-Q8_0\.gguf\?"):
        fetch_model(tmp_path / "model-Q8.gguf", "target")


def test_a_file_that_is_no_model_says_so(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("text")
    assert fetch_model(tmp_path / "text", "target") == tmp_path / "text"  # `Artifact.open` refuses
    with pytest.raises(ArtifactError, match="is not a folder"):
        Artifact.open(tmp_path / "text")
    source = write_directory(tmp_path / "odd", LLAMA | {"model_type": "bloom"})
    with pytest.raises(ExportError, match="bloom"):
        fetch_model(source, "target")


def test_a_hub_id_starts_without_the_hub_and_is_updated_when_asked(
    tmp_path: Path, cache: Path
) -> None:
    served = write_directory(tmp_path / "served")

    def fetch(hub: Any, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, *words]
        environment = hub.environment(tmp_path / "home")
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=False, cwd=tmp_path
        )

    update = ("-m", "pilotfish", "models", "fetch", "owner/tiny", "--role", "drafter")
    with serving_hub(served) as hub:
        first = fetch(hub, *update)
        assert first.returncode == 0, first.stderr
        assert "download, " in first.stderr
        again = fetch(hub, *update)
        assert again.stdout == first.stdout
        assert "up to date" in again.stderr
        hub.commit = "f" * 40
        write_directory(served, LLAMA | {"rope_theta": 20000.0})
        # without being asked, a command takes what it has
        assert fetch(hub, "-c", WARM, "owner/tiny", "drafter").stdout == first.stdout
        second = fetch(hub, *update)
        assert second.stdout != first.stdout
        assert made(cache) == [Path(second.stdout.strip()).name]
    offline = fetch(hub, "-c", WARM, "owner/tiny", "drafter")
    assert offline.stdout == second.stdout
    manifest = json.loads((Path(second.stdout.strip()) / MANIFEST_NAME).read_text())
    assert manifest["source"]["revision"] == "f" * 40
    absent = fetch(hub, "-m", "pilotfish", "models", "fetch", "owner/tinny")
    assert absent.returncode == 69
    assert "owner/tinny is not a file or folder here, and owner/tinny could not be" in absent.stderr
    assert "Did you mean owner/tiny?" in absent.stderr


def test_a_mark_of_use_survives_no_removal(tmp_path: Path) -> None:
    manifest = tmp_path / MANIFEST_NAME
    assert not use_until_exit(manifest)
    manifest.write_text("{}")
    before = os.stat(tmp_path).st_mtime_ns
    os.utime(tmp_path, ns=(0, 0))
    assert use_until_exit(manifest)
    assert os.stat(tmp_path).st_mtime_ns >= before
    manifest.unlink()
    assert not use_until_exit(manifest)
