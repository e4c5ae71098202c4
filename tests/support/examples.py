"""How many examples a property is tried on: fewer in `make test` than in `make test-all`."""

from __future__ import annotations

from typing import Any

from hypothesis import settings


def examples(most: int, **more: Any) -> settings:
    """Settings with ``most`` examples in the profile "thorough", and a share in "pilotfish".

    The profiles are those of `tests/conftest.py`; the share is what they say of 100.
    """
    return settings(max_examples=max(1, most * settings().max_examples // 100), **more)
