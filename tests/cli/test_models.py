"""`pilotfish models`, and models by name in the commands that take one."""

from __future__ import annotations

import json
import shutil
import signal
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotfish import fetch_model
from pilotfish.cli import main
from pilotfish.cli.edge import _first_stage
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.cache import replace_file
from pilotfish.engines.engine_errors import ArtifactError
from pilotfish.export.cache_contents import entries_named, list_contents
from pilotfish.export.cached_models import EXPORTER, RECORD_NAME, MadeOf, ModelRequest
from pilotfish.export.source_names import DEFAULT, DEFAULTS, MODEL_FILE
from tests.support.commands import refusal
from tests.support.daemons import Systemd, running
from tests.support.serving import serving
from tests.support.small_checkpoints import LLAMA, write_directory, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "cache"


def listed(capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert main(["models", "list", "--json"]) == 0
    entries: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["entries"]
    return entries


def record(folder: Path, request: ModelRequest) -> None:
    """Write the record of an artifact anew, as if it had been made for this request."""
    made_of = MadeOf(request=request, identity="0" * 16, exporter=EXPORTER, made_s=0.0)
    replace_file(folder / RECORD_NAME, msgspec.json.encode(made_of))


def test_fetch_list_show_and_remove(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["models", "list"]) == 0
    assert "has no models" in capsys.readouterr().out
    source = write_gguf(tmp_path / "small.gguf")
    with running("--target", source) as edge:  # another process exports and uses it
        (entry,) = listed(capsys)
        assert entry["made_of"] == str(source)
        assert (entry["precision"], entry["in_use"]) == ("fp32", True)
        assert entry["size"] > 100_000
        refused = main(["models", "remove", str(source)])
        assert refused == 75
        assert "a running process uses small-fp32-" in capsys.readouterr().err
        edge.signal(signal.SIGTERM)
        assert edge.ends() == 0
    (cache / MODEL_FILE).write_bytes(b"GGUF")
    engine = cache / "engines" / "0123456789abcdef" / "a.engine"
    engine.parent.mkdir(parents=True)
    engine.write_bytes(bytes(1000))
    assert [each["kind"] for each in listed(capsys)] == ["artifact", "engines", "download"]
    assert main(["models", "list"]) == 0
    assert "fp32" in capsys.readouterr().out
    for name in (entry["name"], source, entry["path"]):
        assert main(["models", "show", str(name)]) == 0
        assert "128 positions" in capsys.readouterr().out
    assert main(["models", "show", entry["name"], "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["manifest"]["architecture"] == "llama"
    assert facts["made_of"]["request"]["source"] == str(source)
    assert main(["models", "remove", entry["name"]]) == 0
    assert f"removed {entry['path']}" in capsys.readouterr().out
    assert [each["kind"] for each in listed(capsys)] == ["engines", "download"]
    assert main(["models", "remove", "--all"]) == 0
    hint = capsys.readouterr().err
    assert str(cache / MODEL_FILE) in hint
    assert "--downloads" in hint
    assert [each["kind"] for each in listed(capsys)] == ["download"]
    assert main(["models", "remove", "--all", "--downloads"]) == 0
    assert listed(capsys) == []


def test_a_damaged_artifact_is_listed_and_removed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch_model(write_directory(tmp_path / "model"), "drafter")
    (folder / "model.onnx").unlink()
    (entry,) = listed(capsys)
    assert entry["precision"] is None
    with pytest.raises(SystemExit):
        main(["models", "remove"])
    assert "name models" in capsys.readouterr().err
    line = refusal(capsys, 66, "models", "remove", "other")
    assert "has no model 'other'" in line


def test_engines_and_stages_go_with_their_artifact(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_directory(tmp_path / "model")
    with running("--target", source):
        pass
    (entry,) = listed(capsys)
    main(["models", "show", entry["name"], "--json"])
    (facts,) = json.loads(capsys.readouterr().out)
    for kind in ("stages", "engines"):
        folder = cache / kind / (facts["digest"] + ("-2" if kind == "stages" else ""))
        folder.mkdir(parents=True)
        (folder / "part").write_bytes(bytes(10))
    assert {each["made_of"] for each in listed(capsys)} == {str(source), entry["name"]}
    assert main(["models", "remove", str(source)]) == 0
    assert listed(capsys) == []


def test_stages_and_engines_of_an_artifact_in_use_stay(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch_model(write_directory(tmp_path / "model"), "target")  # this process uses it
    engines = cache / "engines" / Artifact.open(folder).manifest.digest
    engines.mkdir(parents=True)
    for words in ((folder.name,), (engines.name, folder.name), ("--all",)):
        assert main(["models", "remove", *words]) == 75
        assert engines.name in capsys.readouterr().err
        assert [each["kind"] for each in listed(capsys)] == ["artifact", "engines"]


def test_stages_that_an_edge_serves_are_in_use(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = fetch_model(write_directory(tmp_path / "model"), "target")
    stages = _first_stage(folder, 2).parent
    assert stages.parent == cache / "stages"
    assert main(["models", "remove", stages.name]) == 75
    shutil.rmtree(folder)
    moved = stages.rename(stages.with_name("moved-2"))
    assert _first_stage(moved, 2) == moved / "stage-1"
    assert main(["models", "remove", moved.name]) == 75


def test_a_download_is_removed_by_each_name_of_its_artifact(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, hub = write_directory(tmp_path / "model"), tmp_path / "hub" / "models--Org--Name"
    with running("--target", source):
        pass
    (entry,) = listed(capsys)
    folder = Path(entry["path"])
    original = folder.rename(tmp_path / "original")
    sources = (
        ModelRequest(source="Org/Name@v1", form="fp32"),
        ModelRequest(source=DEFAULT, form="fp32", skipped_layers=DEFAULTS["default-28"]),
    )
    for request, download in zip(sources, (hub, cache / MODEL_FILE), strict=True):
        for name in (folder.name, request.name):
            shutil.copytree(original, folder)
            record(folder, request)
            if download is hub:
                hub.mkdir(parents=True, exist_ok=True)
            else:
                download.write_bytes(b"GGUF")
            assert main(["models", "remove", name]) == 0
            assert str(download) in capsys.readouterr().err
            assert download.exists()
            shutil.copytree(original, folder)
            record(folder, request)
            assert main(["models", "remove", name, "--downloads"]) == 0
            assert not download.exists()
            assert not folder.exists()


def test_default_28_is_a_name_of_its_own(
    tmp_path: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with running("--target", write_directory(tmp_path / "model")):
        pass
    (folder,) = (cache / "artifacts").glob("[!.]*")
    for name, skipped in DEFAULTS.items():
        copy = shutil.copytree(folder, folder.with_name(name + "-fp32"))
        record(copy, ModelRequest(source=DEFAULT, form="fp32", skipped_layers=skipped))
    shutil.rmtree(folder)
    assert {each["made_of"] for each in listed(capsys)} == {*DEFAULTS}
    for name in DEFAULTS:
        assert main(["models", "show", name]) == 0
        lines = [line.split() for line in capsys.readouterr().out.splitlines()]
        assert ["│", "made", "of", "│", name, "│"] in lines
    with pytest.raises(ArtifactError, match="Did you mean default-28"):
        fetch_model("default-2", "drafter")
    assert main(["models", "remove", DEFAULT]) == 0
    assert [each["made_of"] for each in listed(capsys)] == ["default-28"]


def test_a_cache_is_named_by_any_of_its_paths(
    tmp_path: Path, cache: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    with running("--target", write_directory(tmp_path / "model")):
        pass
    (folder,) = (cache / "artifacts").glob("[!.]*")
    (tmp_path / "link").symlink_to(cache)
    monkeypatch.chdir(tmp_path)
    others = [cache, tmp_path / "link", Path("cache"), Path("link")]
    for named in others:
        monkeypatch.setenv("PILOTFISH_CACHE", str(named))
        for other in others:
            path = str(other / "artifacts" / folder.name)
            assert main(["models", "show", path, "--json"]) == 0
            assert json.loads(capsys.readouterr().out)[0]["made_of"]
            assert len(entries_named(path, list_contents())) == 1
    assert not any(each["in_use"] for each in listed(capsys))
    assert fetch_model(folder, "target") == folder
    assert all(each["in_use"] for each in listed(capsys))


@pytest.mark.parametrize(
    "words",
    [
        ("device", "run", "hello", "--draft", "no-such"),
        ("device", "serve", "--draft", "no-such"),
        ("edge", "serve", "--target", "no-such"),
        ("edge", "worker", "--target", "no-such"),
        ("field", "compare", "no-such", "--target", "no-such"),
        ("field", "measure", "--draft", "no-such", "--out", "run", "--edge", "tcp://127.0.0.1:1"),
        ("export", "bridge", "no-such", "no-such"),
        ("models", "fetch", "no-such"),
    ],
)
def test_commands_say_what_a_model_may_be(
    tmp_path: Path,
    monkeypatch: Any,
    capsys: pytest.CaptureFixture[str],
    words: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refusal(capsys, 66, *words)
    assert "'no-such' does not exist as a file or folder" in line
    assert "default-28, nor a hub id" in line
    assert "pilotfish export model" in line


def test_an_export_asks_systemd_for_more_time_to_start(tmp_path: Path) -> None:
    source, systemd = write_directory(tmp_path / "model"), Systemd(tmp_path)
    extensions = []
    for _ in range(2):
        systemd.received.clear()
        with running("--target", source, systemd=systemd):
            messages = [message for _, message in systemd.received]
        extensions.append(sum("EXTEND_TIMEOUT_USEC" in message for message in messages))
    cold, warm = extensions
    assert cold > warm


def test_a_reload_of_the_edge_exports_nothing(tmp_path: Path, cache: Path) -> None:
    first = write_directory(tmp_path / "first")
    second = write_directory(tmp_path / "second", LLAMA | {"rope_theta": 20000.0})
    config = tmp_path / "edge.toml"
    config.write_text(f'target = "{first}"\n')
    with running("--config", config) as edge:
        config.write_text(f'target = "{first}"\nsessions = 3\n')
        edge.signal(signal.SIGHUP)
        edge.await_line("sessions has changed; restart")
        assert not [line for line in edge.lines if "target has changed" in line]
        config.write_text(f'target = "{second}"\n')
        edge.signal(signal.SIGHUP)
        edge.await_line("target has changed; restart the edge")
    assert [each.name.split("-")[0] for each in (cache / "artifacts").glob("[!.]*")] == ["first"]


def test_a_service_drafts_with_a_checkpoint(tmp_path: Path, cache: Path) -> None:
    drafter = write_directory(tmp_path / "drafter")
    target = write_directory(tmp_path / "target", LLAMA | {"rope_theta": 20000.0})
    with running("--target", target) as edge, serving(drafter, edge.endpoint) as service:
        answer = service.client().completions.create(
            model="pilotfish", prompt="the", max_tokens=4, temperature=0
        )
        assert answer.usage is not None
        assert answer.usage.completion_tokens > 0
        service.process.send_signal(signal.SIGHUP)  # the name of the drafter stays
        service.until("reloaded")
        assert not [line for line in service.lines if "restart the service" in line]
    names = sorted(each.name.rpartition("-")[0] for each in (cache / "artifacts").glob("[!.]*"))
    assert names == ["drafter-drafter", "target-fp32"]
