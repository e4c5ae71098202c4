"""What the tests against transformers share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.reference.parity import Library


@pytest.fixture(scope="module", autouse=True)
def _one_thread() -> Iterator[None]:
    """Several of these files share the cores, and tiny models gain nothing from more threads."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    """Checkpoints and artifacts, each made once."""
    return Library(tmp_path_factory.mktemp("library"))
