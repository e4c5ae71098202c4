"""`pilotfish models`, and models by name in the commands that take one."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from pilotfish import fetch_model
from pilotfish.cli import main
from pilotfish.export.source_names import MODEL_FILE
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
    assert "--downloads removes them" in capsys.readouterr().err
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
