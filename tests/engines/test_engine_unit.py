"""What `pilotfish-engine-build.service` runs at each boot: a drafter without an engine is no fault.

TensorRT is a double: its parser and builder are not tested here, only what the command does with
an artifact that they do not take.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pilotfish.cli import main
from tests.support import tensorrt_double
from tests.support.tiny import tiny_artifact

# Form of the drafter, version of TensorRT, and what the warning advises.
REFUSED = {
    "contrib": ({"dialect": "contrib"}, "10.16.2", "--dialect opset17 --precision fp32"),
    "contrib int4": (
        {"dialect": "contrib", "precision": "int4"},
        "10.3.0",
        "--dialect opset17 --precision fp16",
    ),
    "opset 24 on JetPack 6": ({"dialect": "opset24"}, "10.3.0", "needs 10.15 or later"),
}


def unit(folder: Path, draft: Path | str, **settings: str) -> list[str]:
    """Write a device's configuration; returns the unit's command."""
    lines = {"draft": str(draft), "edge": "tcp://127.0.0.1:7077", **settings}
    config = folder / "device.toml"
    config.write_text("".join(f"{name} = {json.dumps(value)}\n" for name, value in lines.items()))
    return ["export", "engine", "--config", str(config)]


@pytest.mark.parametrize("form", REFUSED)
def test_a_drafter_in_a_form_that_tensorrt_does_not_take_is_a_warning(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
    form: str,
) -> None:
    options, version, advice = REFUSED[form]
    trt, _ = tensorrt_double.install(monkeypatch, version)
    draft = tiny_artifact(tmp_path / "draft", **options).path
    assert main([*unit(tmp_path, draft), "--json", "-"]) == 0
    [warning] = [each.message for each in caplog.records if each.levelname == "WARNING"]
    assert str(draft) in warning
    assert "export the model with" in warning
    assert advice in warning
    [entry] = json.loads(capsys.readouterr().out)
    assert entry["engine"] is None
    assert trt.double.builds == 0
    # the same artifact, given by hand, is an error
    assert main(["export", "engine", str(draft)]) == 65


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"provider": "cpu"}, "the provider cpu"), ({"draft": "text"}, "the drafter text")],
)
def test_a_configuration_that_needs_no_engine_builds_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    settings: dict[str, str],
    reason: str,
) -> None:
    trt, _ = tensorrt_double.install(monkeypatch)
    draft = tiny_artifact(tmp_path / "draft", dialect="opset17").path
    assert main(unit(tmp_path, **{"draft": draft, **settings})) == 0
    assert reason in capsys.readouterr().err
    assert trt.double.builds == 0
