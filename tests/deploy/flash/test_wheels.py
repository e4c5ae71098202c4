"""Wheels that are damaged, or want to be where no wheel may be."""

from __future__ import annotations

import random
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from pilotfish.deploy.errors import BundleError
from pilotfish.deploy.wheels import Wheel, placed
from tests.support.bundles import write_wheel


def compressed(path: Path) -> bytes:
    """The bytes of a wheel, its members deflated."""
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path.read_bytes()


def test_a_wheel_with_flipped_bits_is_whole_or_a_bundle_error(tmp_path: Path) -> None:
    modules = {"odd.py": random.Random(0).randbytes(100) + b"x = 1\n" * 500}
    wheel = Wheel.from_path(write_wheel(tmp_path, "odd", modules))
    whole = compressed(wheel.path)
    luck = random.Random(1)
    refused = 0
    for _ in range(1000):
        data = bytearray(whole)
        for _ in range(luck.choice((1, 1, 3))):
            data[luck.randrange(len(data))] ^= 1 << luck.randrange(8)
        wheel.path.write_bytes(data)
        with suppress(BundleError):
            wheel.metadata()
        try:
            wheel.verify()
        except BundleError:
            refused += 1
    assert refused > 800  # dates, modes and the like are covered by no hash


@pytest.mark.parametrize(
    "record",
    [b"x" * 200_000 + b",sha256=AA,1\n", b"odd.py,md5=AA,1\n", b"\xff,\xff,1\n", b'"\n'],
    ids=["long field", "another hash", "no text", "open quote"],
)
def test_a_record_that_cannot_be_read_is_a_bundle_error(tmp_path: Path, record: bytes) -> None:
    wheel = write_wheel(tmp_path, "odd", {"odd.py": b""}, record=record)
    with pytest.raises(BundleError, match="RECORD"):
        Wheel.from_path(wheel).verify()


def test_a_wheel_that_is_compressed_in_another_way_is_refused(tmp_path: Path) -> None:
    wheel = write_wheel(tmp_path, "odd", {"odd.py": b"x = 1\n"})
    with zipfile.ZipFile(wheel) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_LZMA) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    with pytest.raises(BundleError, match="uses a compression"):
        Wheel.from_path(wheel).verify()


def test_data_of_a_wheel_reach_no_other_room_of_a_version() -> None:
    """Units and the like are done as root; a wheel runs as the service."""
    for name in ("systemd/evil.tmpfiles", "manifest.json", "draft", "bin/pilotfish"):
        assert placed(f"odd-1.0.data/data/{name}") == f"data/{name}"
