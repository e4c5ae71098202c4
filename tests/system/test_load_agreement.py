"""The benchmark beside another load generator lets its service answer as `field load` names it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.cli import parser

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets tests import the benchmarks' modules."""
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS), *sys.path])


@pytest.mark.parametrize(
    ("method", "protocol", "window", "hints"),
    [
        ("stream", "stream", None, None),
        ("greedy:4", "greedy", 4, None),
        ("ahead", "ahead", None, None),
        ("ahead:edge", "ahead", None, "edge"),
    ],
)
def test_a_method_is_flags_of_the_service(
    method: str, protocol: str, window: int | None, hints: str | None
) -> None:
    from load_agreement import service_flags

    words = ["device", "serve", "--draft", "text"]
    usual = parser(words).parse_args(words)
    args = parser(words).parse_args([*words, *service_flags(method)])
    assert args.protocol == protocol
    assert args.window == (usual.window if window is None else window)
    assert args.hints == (usual.hints if hints is None else hints)


def test_what_is_no_method_is_refused() -> None:
    from load_agreement import service_flags

    with pytest.raises(UnsupportedError, match="has no window"):
        service_flags("greedy:edge")
