"""A provider that computes something else is found, by the check that is about it.

The providers are those of the doubles of NVIDIA's libraries. Each fault is one that a library, a
GPU or the code between could have; what is expected of it is which checks it makes differ.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from pilotfish.engines.backends import Backend
from pilotfish.engines.device_cache import DeviceCache
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.passes import HIDDEN_FROM_VIEW, Pass
from pilotfish.engines.stage import Stage
from pilotfish.engines.tensorrt.profiles import NARROW
from pilotfish.export.blocks import Quantized
from pilotfish.lab.selftest.check_artifacts import CheckArtifacts
from pilotfish.lab.selftest.checks import CHECKS
from pilotfish.lab.selftest.models import KINDS, TARGET
from pilotfish.lab.selftest.providers import NVIDIA_FORM, QUANTISED
from pilotfish.lab.selftest.worker import STAGES, Assignment, ProviderJob, attempt
from tests.support import cudart_double, tensorrt_double
from tests.support.cudart_double import Gpu
from tests.support.opening import CudaOnHost, TensorRTProviderOnHost
from tests.support.runnable import needs, runnable
from tests.support.staged import providers

Patch = pytest.MonkeyPatch
COMPARED = {*CHECKS, STAGES}
MIXTURES = ("gpt_oss", "qwen2_moe")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> CheckArtifacts:
    return CheckArtifacts(tmp_path_factory.mktemp("shelf"), lambda *_: None)


@pytest.fixture
def patch(tmp_path: Path) -> Iterator[Patch]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PILOTFISH_CACHE", str(tmp_path))
        yield patch


def job(shelf: CheckArtifacts, provider: str, model: str = TARGET) -> ProviderJob:
    """The model's first job in a dialect that this onnxruntime runs, without the protocols.

    The protocols are left out because an edge has no doubles.
    """
    jobs = shelf.jobs(provider, quick=True)
    first = next(each for each in jobs if each.model == model and each.dialect in runnable())
    return msgspec.structs.replace(first, drafter=None, timed=False)


def findings(provider: str, *jobs: ProviderJob) -> dict[str, dict[str, Any]]:
    """What is found of them, by check."""
    messages: list[dict[str, Any]] = []
    attempt(Assignment(provider=provider, jobs=jobs), messages.append)
    return {reply["finding"]["check"]: reply["finding"] for reply in messages if "finding" in reply}


def over_tensorrt(
    shelf: CheckArtifacts, patch: Patch, model: str = TARGET, **double: Any
) -> dict[str, dict[str, Any]]:
    """Check a model over the double, without its stages."""
    tensorrt_double.install(patch, "10.3.0", **double)
    return findings("tensorrt", msgspec.structs.replace(job(shelf, "tensorrt", model), cut=None))


def over_cuda(shelf: CheckArtifacts) -> dict[str, dict[str, Any]]:
    with providers(cuda=CudaOnHost):
        return findings("cuda", job(shelf, "cuda"))


def differing(options: dict[str, dict[str, Any]]) -> set[str]:
    assert "failed" not in {each["status"] for each in options.values()}, options
    return {check for check, each in options.items() if each["status"] == "differs"}


def downloads(patch: Patch, spoil: Callable[[NDArray[np.float32]], None]) -> None:
    """Have this done to the numbers that come from the GPU."""
    real = Gpu.cudaMemcpyAsync

    def copy(gpu: Gpu, target: int, source: int, size: int, kind: int, stream: int) -> int:
        code: int = real(gpu, target, source, size, kind, stream)
        if kind == cudart_double.DOWN:
            numbers = np.ctypeslib.as_array((ctypes.c_float * (size // 4)).from_address(target))
            gpu.queue.append(lambda: spoil(numbers))
        return code

    patch.setattr(Gpu, "cudaMemcpyAsync", copy)


def logits_off(patch: Patch) -> None:
    def spoil(numbers: NDArray[np.float32]) -> None:
        numbers[::7] *= 1.5

    downloads(patch, spoil)


def full_passes_are_not_taken_in(patch: Patch) -> None:
    real = DeviceCache.take_in

    def take_in(cache: DeviceCache, slot: int, start: int, count: int) -> None:
        if count != NARROW:
            real(cache, slot, start, count)

    patch.setattr(DeviceCache, "take_in", take_in)


def siblings_are_seen(patch: Patch) -> None:
    real = Pass.fill_mask

    def show(item: Pass, mask: Any, length: int) -> None:
        if item.parents is None:
            real(item, mask, length)
            return
        for row in range(len(mask)):
            mask[row] = np.where(np.arange(mask.shape[1]) <= length + row, 0, HIDDEN_FROM_VIEW)

    patch.setattr(Pass, "fill_mask", show)


def rollback_is_ignored(patch: Patch) -> None:
    real = Decoder.rollback

    def rollback(decoder: Decoder, slot: int, length: int) -> None:
        if length == 0:  # between the checks
            real(decoder, slot, length)

    patch.setattr(Decoder, "rollback", rollback)


def paths_stay_where_they_were(patch: Patch) -> None:
    patch.setattr(DeviceCache, "_move", lambda *_: None)


def the_last_slot_writes_into_the_one_before(patch: Patch) -> None:
    real = DeviceCache.take_in

    def take_in(cache: DeviceCache, slot: int, start: int, count: int) -> None:
        real(cache, slot - (slot == 3), start, count)

    patch.setattr(DeviceCache, "take_in", take_in)


def longer_buffers_are_empty(patch: Patch) -> None:
    patch.setattr(Gpu, "cudaMemcpy2DAsync", lambda *_: 0)


FAULTS: list[tuple[Callable[[Patch], None], set[str]]] = [
    (logits_off, set(CHECKS)),
    (full_passes_are_not_taken_in, {"chain"}),
    (siblings_are_seen, {"tree", "keep", "slots"}),
    (rollback_is_ignored, {"rollback"}),
    (paths_stay_where_they_were, {"keep"}),
    (the_last_slot_writes_into_the_one_before, {"slots"}),
    (longer_buffers_are_empty, {"growth"}),
]


@pytest.mark.parametrize("model", [TARGET, *MIXTURES])
@pytest.mark.parametrize(("fault", "checks"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_is_found_by_its_check_and_no_other(
    shelf: CheckArtifacts,
    patch: Patch,
    fault: Callable[[Patch], None],
    checks: set[str],
    model: str,
) -> None:
    fault(patch)
    result = over_tensorrt(shelf, patch, model)
    assert differing(result) == checks
    for check in checks:
        assert result[check]["difference"] > 10 * result[check]["tolerance"]
        assert "row" in result[check]["where"]


def test_every_check_differs_under_some_fault() -> None:
    assert set().union(*(checks for _, checks in FAULTS)) == set(CHECKS)


def test_without_a_fault_all_pass(shelf: CheckArtifacts, patch: Patch) -> None:
    tensorrt_double.install(patch, "10.3.0")
    result = findings("tensorrt", job(shelf, "tensorrt"))
    assert result.keys() == {"opening", *COMPARED}
    assert {each["status"] for each in result.values()} == {"passed"}


@pytest.mark.parametrize(
    ("provider", "kind"), [("cuda", CudaOnHost), ("tensorrt-ep", TensorRTProviderOnHost)]
)
def test_the_providers_of_onnxruntime_pass_in_all_their_forms(
    shelf: CheckArtifacts, patch: Patch, provider: str, kind: type[Backend]
) -> None:
    wanted = [
        msgspec.structs.replace(each, drafter=None)
        for each in shelf.jobs(provider, quick=True)
        if each.model in {TARGET, *MIXTURES}
    ]
    assert {each.precision for each in wanted} == {"fp32", "fp16", "int4"}
    with providers(**{provider: kind}):
        for each in wanted:
            result = findings(provider, each)
            if each.dialect not in runnable():
                assert result.keys() == {"opening"}
                assert result["opening"]["status"] == "left out"
                continue
            assert result.keys() >= {"opening", *CHECKS}
            assert differing(result) == set()


def test_weights_that_are_wrong_in_nvidias_form_differ_in_every_check(
    tmp_path: Path, patch: Patch
) -> None:
    needs("tensorrt")
    patch.setattr(
        Quantized,
        "with_positive_scales",
        lambda weight: replace(weight, scales=np.abs(weight.scales)),
    )
    wrong = CheckArtifacts(tmp_path / "shelf", lambda *_: None)
    result = findings("cpu", wrong._tiny_job("cpu", TARGET, NVIDIA_FORM, main=False))
    assert differing(result) == {*CHECKS}
    assert {result[check]["tolerance"] for check in CHECKS} == {QUANTISED}


def test_a_stage_that_keeps_no_path_is_found_by_stages(shelf: CheckArtifacts, patch: Patch) -> None:
    assert differing(over_cuda(shelf)) == set()
    patch.setattr(Stage, "keep_path", lambda *_: None)
    assert differing(over_cuda(shelf)) == {STAGES}


def test_answers_that_are_no_numbers_differ_without_a_figure(
    shelf: CheckArtifacts, patch: Patch
) -> None:
    rows = 48  # only `logits` asks for so many

    def spoil(numbers: NDArray[np.float32]) -> None:
        if numbers.size == rows * KINDS[TARGET]["vocab_size"]:
            numbers[5] = np.nan

    downloads(patch, spoil)
    result = over_tensorrt(shelf, patch)
    assert differing(result) == {"logits"}
    assert "difference" not in result["logits"]
    assert "contain NaN" in result["logits"]["reason"]


def test_an_engine_that_cannot_be_built_fails_and_nothing_else_is_tried(
    shelf: CheckArtifacts, patch: Patch
) -> None:
    result = over_tensorrt(shelf, patch, fail_build=True)
    assert result.keys() == {"opening"}
    assert result["opening"]["status"] == "failed"
    assert "TensorRT built no engine" in result["opening"]["reason"]


def test_an_older_tensorrt_is_not_asked_for_what_it_lacks(
    shelf: CheckArtifacts, patch: Patch
) -> None:
    tensorrt_double.install(patch, "10.3.0")
    of_target = [each for each in shelf.jobs("tensorrt", quick=True) if each.model == TARGET]
    result = findings("tensorrt", *(each for each in of_target if each.dialect == "opset24"))
    assert result["opening"]["status"] == "left out"
    assert "10.15" in result["opening"]["reason"]


def test_no_gpu_is_not_there_and_says_why(shelf: CheckArtifacts, patch: Patch) -> None:
    tensorrt_double.install(patch, "10.3.0", gpu=Gpu(devices=0))
    messages: list[dict[str, Any]] = []
    attempt(Assignment(provider="tensorrt", jobs=(job(shelf, "tensorrt"),)), messages.append)
    (reply,) = messages
    assert "no CUDA-capable device" in reply["absent"]
