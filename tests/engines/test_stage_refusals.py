"""What a stage refuses, by its right name: states, graphs and artifacts that will not do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish.engines.artifact import open_stages
from pilotfish.engines.backends import Load
from pilotfish.engines.backends.cpu import CpuBackend
from pilotfish.engines.engine_errors import ArtifactError, ProviderError
from pilotfish.engines.kv import HostCache
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.engines.stage import LARGEST, Head, Stage
from pilotfish.export.split import split_artifact
from tests.support.staged import STANDARD, TEXT, Both, both_in, providers
from tests.support.tiny import FAMILIES, tiny_artifact


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory) -> Both:
    return both_in(tmp_path_factory.mktemp("cut"))


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 2 * LARGEST["float32"]])
def test_states_that_are_no_numbers_are_refused_and_nothing_is_appended(
    cut: Both, bad: float
) -> None:
    second = Stage(open_stages(cut.folder)[1], slots=2)
    good = np.random.default_rng(0).standard_normal((5, second.width), np.float32)
    passes = [Pass(0, TEXT[:2]), Pass(1, TEXT[:3])]
    wanted = second.forward(passes, good).copy()
    for slot in range(2):
        second.rollback(slot, 0)
    for place in ((0, 0), (4, second.width - 1)):
        states = good.copy()
        states[place] = bad
        with pytest.raises(ValueError, match="finite"):
            second.forward(passes, states)
    assert [second.length(slot) for slot in range(2)] == [0, 0]
    np.testing.assert_array_equal(second.forward(passes, good), wanted)


@pytest.mark.parametrize("dialect", STANDARD)
@pytest.mark.parametrize("family", ["llama", "opt"])  # opt-350m alone has no norm in between
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_largest_states_leave_nothing_behind(
    tmp_path: Path, family: str, dialect: str, precision: Any
) -> None:
    """A NaN in the cache would be in all that the slot says from then on."""
    whole = tiny_artifact(
        tmp_path / "a", architecture=family, dialect=dialect, precision=precision, layers=3
    )
    split_artifact(whole.path, tmp_path / "cut", stages=3)
    stages = [Stage(each) for each in open_stages(tmp_path / "cut")]
    random = np.random.default_rng(1)
    for stage in stages[1:]:
        most = LARGEST[whole.manifest.kv_dtype]
        signs = np.where(random.random((6, stage.width)) < 0.5, -1.0, 1.0)
        states = random.standard_normal((4, stage.width), np.float32)
        wanted = stage.forward([Pass(0, TEXT[:4])], states).copy()
        stage.rollback(0, 0)
        stage.forward([Pass(0, TEXT[:6])], (most * signs).astype(np.float32))
        stage.rollback(0, 0)
        np.testing.assert_array_equal(stage.forward([Pass(0, TEXT[:4])], states), wanted)


def test_states_must_be_those_of_the_passes(cut: Both) -> None:
    first, second, _ = (Stage(each) for each in open_stages(cut.folder))
    states = np.zeros((3, first.width), np.float32)
    for wrong in (None, states[:2], states[:, :-1], states[0], states[None]):
        with pytest.raises(ValueError, match="states of shape"):
            second.forward([Pass(0, TEXT[:3])], wrong)
    with pytest.raises(ValueError, match="states of shape None"):
        first.forward([Pass(0, TEXT[:3])], states)
    assert (first.length(0), second.length(0)) == (0, 0)


def test_a_stage_is_no_whole_model_and_a_whole_model_no_stage(cut: Both) -> None:
    item, two, _ = open_stages(cut.folder)
    for named in (two.path, two):
        with pytest.raises(ArtifactError, match=r"stage 2 of 3 \(layer 1\).*cut from"):
            Decoder(named)
    for kind in (Stage, Head):
        for named in (cut.whole, cut.whole.path):
            with pytest.raises(ArtifactError, match=r"whole model.*export split"):
                kind(named)
    with pytest.raises(ArtifactError, match="folder of stage 1"):
        Head(two)
    assert Head(item).logits(np.zeros((2, 64), np.float32)).shape == (2, 100)


@pytest.mark.parametrize("provider", ["tensorrt-ep", "abacus"])
def test_providers_that_run_no_stages_are_named(cut: Both, provider: str) -> None:
    for kind in (Stage, Head):
        with pytest.raises(ProviderError, match=f"{provider}.*auto, tensorrt, tensorrt-rtx, cuda"):
            kind(open_stages(cut.folder)[0], provider=provider)


def test_damaged_graphs_are_refused_by_name(tmp_path: Path) -> None:
    whole = tiny_artifact(tmp_path / "a")
    item, two = split_artifact(whole.path, tmp_path / "cut", stages=2)
    for path in (item.head_path, two.graph_path):
        path.write_bytes(b"not a graph")
    with pytest.raises(ArtifactError, match=r"head\.onnx is not the file that was exported"):
        Head(item)
    with pytest.raises(ArtifactError, match=r"stage-2/model\.onnx is not the file"):
        Stage(two)
    item.head_path.unlink()
    with pytest.raises(ArtifactError, match=r"head\.onnx"):
        Head(item.path)


class Emptied(HostCache):
    def take_in(self, slot: int, start: int, count: int) -> None:
        for buffer in self._buffers:
            buffer.fill(0.0)


class Forgetful(CpuBackend):
    """Forgets keys and values between runs, and is not trusted."""

    trusted = False

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.cache = Emptied(load.artifact.manifest, load.slots, load.context)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_stage_that_forgets_is_found_out(tmp_path: Path, family: str) -> None:
    whole = tiny_artifact(tmp_path / "a", architecture=family, layers=3)
    stages = split_artifact(whole.path, tmp_path / "cut", stages=3)
    with providers(cpu=Forgetful):
        for stage in stages:
            with pytest.raises(ProviderError, match="forgets"):
                Stage(stage, provider="cpu")
