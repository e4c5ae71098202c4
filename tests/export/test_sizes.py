"""The sizes of models before they are exported."""

from __future__ import annotations

from math import prod
from pathlib import Path

import msgspec
import onnx
import pytest

from pilotfish.boards.board import board_named
from pilotfish.boards.expectation import expect
from pilotfish.boards.shape import shape_of
from pilotfish.export.model import export_model
from pilotfish.export.model_config import Layer
from pilotfish.export.sizes import shape_of_config, shape_of_source
from tests.support.tiny import FAMILIES, RandomSource, plain_rope, tiny_config


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_are_those_of_the_artifact(family: str, tmp_path: Path) -> None:
    # a context this short has hardly any rotary table, which the estimate leaves out
    source = RandomSource(tiny_config(family, context=16), 0, vocab=128)
    shape = shape_of_source(source)
    artifact = export_model(source, tmp_path / "fp32", precision="fp32", dialect="opset24")
    graph = onnx.load(str(artifact.graph_path), load_external_data=False).graph
    # not the file's size: a file begins each tensor on a page
    size = 4 * sum(prod(tensor.dims) for tensor in graph.initializer)
    assert shape.in_form("opset24", "fp32").weights_bytes == pytest.approx(size, rel=0.02)
    measured = shape_of(artifact)
    assert (shape.cached, shape.states, shape.context) == (
        measured.cached,
        measured.states,
        measured.context,
    )


def test_a_longer_context_than_the_default_has_its_own_keys_and_values() -> None:
    """Longrope: the default context is that of the short factors; --context may exceed it."""
    short, long = plain_rope(1e4, 16), plain_rope(1e6, 16)
    rope = msgspec.structs.replace(short, long=long.frequencies, short_context=64)
    shape = shape_of_config(tiny_config(pattern=(Layer(rope),), context=256), [])
    expected = {context: expect(board_named("cpu"), shape, context=context) for context in (0, 256)}
    assert (expected[0].context, expected[256].context) == (64, 256)
    assert expected[256].kv_bytes == 4 * expected[0].kv_bytes


def test_a_token_uses_some_experts_alone() -> None:
    source = RandomSource(tiny_config("mixtral"), 0, vocab=128)
    counts = shape_of_source(source).parameters
    experts = source.config.experts
    assert counts is not None
    assert experts is not None
    assert counts.active_experts * experts.count == counts.experts * experts.chosen
    assert counts.experts > 0
