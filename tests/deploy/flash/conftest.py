"""What is flashed in these tests: a root file system like a board's, and two bundles for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.bundles import in_memory, tiny_bundle, tiny_rootfs


@pytest.fixture
def root() -> Iterator[Path]:
    with in_memory() as folder:
        yield tiny_rootfs(folder / "rootfs")


@pytest.fixture
def version_1(tmp_path: Path) -> Path:
    return tiny_bundle(tmp_path / "one", version="1.0")


@pytest.fixture
def version_2(tmp_path: Path) -> Path:
    return tiny_bundle(tmp_path / "two", version="2.0", settings="draft = 'y'\n")
