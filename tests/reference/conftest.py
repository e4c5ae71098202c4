"""What the tests against transformers share."""

from __future__ import annotations

import pytest

from tests.reference.parity import Library


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Checkpoints and artifacts, each made once."""
    return Library(tmp_path_factory.mktemp("library"))
