"""The command that installs an extra is one that works where this installation came from."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path

import pytest

from pilotfish.base import extras


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (None, "pip install '.[cpu]' in a checkout of Pilotfish"),
        ("damaged", "pip install '.[cpu]' in a checkout of Pilotfish"),
        (
            {"url": "file:///src/my%20fish", "dir_info": {"editable": True}},
            "pip install -e '/src/my fish[cpu]'",
        ),
        ({"url": "file:///src/fish", "dir_info": {}}, "pip install '/src/fish[cpu]'"),
        (
            {"url": "file:///a/pilotfish-1-py3-none-any.whl", "archive_info": {}},
            "pip install 'pilotfish[cpu] @ file:///a/pilotfish-1-py3-none-any.whl'",
        ),
        (
            {
                "url": "https://example.org/fish",
                "vcs_info": {"vcs": "git", "requested_revision": "main", "commit_id": "5ea"},
            },
            "pip install 'pilotfish[cpu] @ git+https://example.org/fish@5ea'",
        ),
        (
            {
                "url": "https://example.org/fish.zip",
                "archive_info": {},
                "subdirectory": "python",
            },
            "pip install 'pilotfish[cpu] @ https://example.org/fish.zip#subdirectory=python'",
        ),
    ],
)
def test_how_to_install_an_extra(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, record: object, command: str
) -> None:
    folder = tmp_path / "pilotfish-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: pilotfish\nVersion: 1\n")
    if record is not None:
        text = record if isinstance(record, str) else json.dumps(record)
        (folder / "direct_url.json").write_text(text)
    found = metadata.PathDistribution(folder)
    monkeypatch.setattr(metadata, "distributions", lambda **_: [found])
    extras._origin.cache_clear()
    assert extras.install_command("cpu") == command
    extras._origin.cache_clear()
