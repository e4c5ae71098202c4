"""What these tests ask devices whose drafter has other tokens than the edge's target."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from pilotfish import Device

STRANGE = [*"uvw"]  # nothing in common with OWN
OTHERS = [*"abcdf", "Ġ", "cd", "fa", "Ġd"]
TEXT = "ab cd abcd a"
CONTEXT = 2048  # of targets; drafters may be given less
GREEDY: dict[str, Any] = {"protocol": "greedy", "window": 3, "max_tokens": 120}
COUPLED: dict[str, Any] = {**GREEDY, "protocol": "coupled", "temperature": 1.0, "seed": 4}


class Models(NamedTuple):
    """Artifact folders; but for ``draft`` they are of targets."""

    draft: Path
    target: Path
    other: Path
    strange: Path


def change(path: Path, **fields: Any) -> None:
    """In an artifact's manifest."""
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | fields))


def opened(models: Models, endpoint: str, policy: str = "fail", **options: Any) -> Device:
    return Device(models.draft, endpoint, threads=1, on_link_loss=policy, **options)


def wanted_of(device: Device, prompt: Any, wish: dict[str, Any]) -> list[int]:
    """What the target says by itself."""
    return device.generate(prompt, **{**wish, "protocol": "stream"}).tokens
