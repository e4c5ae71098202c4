"""Parameters of which `make test` takes a part, and `make test-all` the rest as well."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def thinned(params: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return parameters as `pytest.param`, and mark those not in ``quick`` as `slow`."""
    made = []
    for param in params:
        values = param if isinstance(param, tuple) else (param,)
        made.append(pytest.param(*values, marks=[] if param in quick else pytest.mark.slow))
    return made
