"""The order of versions, against the one that PEP 440 asks for."""

from __future__ import annotations

from itertools import product

import pytest
from packaging.version import Version

from pilotfish.deploy.precedence import is_older

# In their order (PEP 440, "Summary of permitted suffixes and relative ordering").
ORDERED = (
    *("0.2.dev1", "0.2.0a1.dev2", "0.2a1", "0.2b3", "0.2rc1.dev1", "0.2rc1", "0.2.0", "0.2+abc"),
    *("0.2+1.b", "0.2+1.1", "0.2.post1.dev3", "0.2.post1", "0.2.1", "0.10", "1", "1.0.1", "2024.1"),
    "1!0.1",
)


@pytest.mark.parametrize("version", ORDERED)
def test_every_version_has_its_place(version: str) -> None:
    for other in ORDERED:
        assert is_older(version, other) == (ORDERED.index(version) < ORDERED.index(other))


def test_it_is_the_order_of_the_library_that_pip_has() -> None:
    parts = ("1", "1.0", "1.0.0.1"), ("", "a1", ".b2", "rc3", "c1"), ("", ".post0", ".post2")
    texts = ["".join(words) for words in product(*parts, ("", ".dev0", ".dev7"), ("", "+1", "+a"))]
    for item, other in zip(texts, texts[1:] + texts[:1], strict=True):
        for left, right in ((item, other), (other, item)):
            assert is_older(left, right) == (Version(left) < Version(right)), (left, right)


@pytest.mark.parametrize("version", ["", "x", "1..0", "1.0-beta-x", "1.0+", "one", "1.0.abc"])
def test_what_is_no_version_has_no_place(version: str) -> None:
    assert is_older(version, "1.0") is None
    assert is_older("1.0", version) is None
