"""Fixtures of the tests of nodes."""

from __future__ import annotations

import pytest

from tests.support.federating import Cast, cast_in


@pytest.fixture(scope="module")
def cast(tmp_path_factory: pytest.TempPathFactory) -> Cast:
    return cast_in(tmp_path_factory.mktemp("cast"))
