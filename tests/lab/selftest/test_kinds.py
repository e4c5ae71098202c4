"""What a kind of model alone has is compared: experts, sinks, states; on this machine's CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnxruntime.capi.onnxruntime_pybind11_state as native
import pytest

from pilotfish.engines import states
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.passes import check_all
from pilotfish.engines.slots import Slots
from pilotfish.engines.states import StateCache, StateStep
from pilotfish.export.model import export_model
from pilotfish.lab.selftest import providers
from pilotfish.lab.selftest.check_artifacts import CheckArtifacts
from pilotfish.lab.selftest.checks import CHECKS
from pilotfish.lab.selftest.models import (
    KINDS,
    LINEAR,
    SHARPNESS,
    STATEFUL,
    Floats,
    Spoil,
    write_model,
)
from pilotfish.lab.selftest.providers import Variant
from pilotfish.lab.selftest.worker import STAGES
from tests.lab.selftest.test_faults import MIXTURES, differing, findings, job, shelf
from tests.support import tensorrt_double

__all__ = ["shelf"]
Patch = pytest.MonkeyPatch

if not any(each.name == "LinearAttention" for each in native.get_all_operator_schema()):
    STATEFUL = tuple(kind for kind in STATEFUL if kind not in LINEAR)


def changed(part: str, how: Callable[[Floats], Floats]) -> Spoil:
    """Change the weights of which this is a part of the name."""

    def spoil(weights: dict[str, Floats]) -> None:
        names = [name for name in weights if part in name]
        assert names
        for name in names:
            weights[name] = how(weights[name])

    return spoil


PARTS = [
    ("gpt_oss", "no sinks", changed(".sinks", lambda local: local - 30)),
    (
        "gpt_oss",
        "other experts",
        changed(".router.weight", lambda local: np.roll(local, 1, axis=0)),
    ),
    ("qwen2_moe", "other experts", changed(".router.weight", lambda local: -local)),
    ("qwen2_moe", "no common part", changed(".shared_expert.down_proj", np.zeros_like)),
    ("lfm2", "taps turned round", changed(".conv.conv.", lambda local: local[..., ::-1])),
    ("qwen3_5", "taps turned round", changed(".conv1d.", lambda local: local[..., ::-1])),
    ("qwen3_5", "a short memory", changed(".A_log", lambda local: local + 1)),
    ("qwen3_5", "attention without gates", changed(".self_attn.gate_proj", np.zeros_like)),
]


@pytest.mark.parametrize(
    ("model", "spoil"),
    [pytest.param(kind, spoil, id=f"{kind}: {what}") for kind, what, spoil in PARTS],
)
def test_a_model_without_its_own_part_differs_in_every_check(
    shelf: CheckArtifacts, tmp_path: Path, model: str, spoil: Spoil
) -> None:
    if model not in {*STATEFUL, *MIXTURES}:
        pytest.skip("this onnxruntime has no LinearAttention")
    write_model(tmp_path / "source", KINDS[model], SHARPNESS, spoil)
    wanted = job(shelf, "cpu", model)
    export_model(str(tmp_path / "source"), tmp_path / "spoiled", dialect=wanted.dialect)
    result = findings(
        "cpu", msgspec.structs.replace(wanted, artifact=str(tmp_path / "spoiled"), cut=None)
    )
    compared = {*CHECKS} - ({"tree"} if model in STATEFUL else set())
    assert differing(result) == compared
    for check in compared:
        assert result[check]["difference"] > 10 * result[check]["tolerance"]


def sixteen_tokens_leave_zeros(patch: Patch) -> None:
    real = StateCache.take_in

    def take_in(cache: StateCache, slot: int, step: StateStep) -> None:
        if step.inputs.shape[1] == 16:  # a piece of `chain`
            step.inputs[:] = 0
        real(cache, slot, step)

    patch.setattr(StateCache, "take_in", take_in)


def trees_are_read_as_chains(patch: Patch) -> None:
    patch.setattr(
        Slots,
        "check",
        lambda slots, passes: check_all(passes, slots._cache.lengths, slots.context, None),
    )


def states_stay_when_tokens_are_taken_back(patch: Patch) -> None:
    real = states._SlotStates.resume

    def resume(path: states._SlotStates, length: int) -> int:
        return real(path, max(length, path._high) if length else 0) and length

    patch.setattr(states._SlotStates, "resume", resume)


def all_of_a_chain_is_kept(patch: Patch) -> None:
    real = Slots.rollback

    def rollback(slots: Slots, slot: int, length: int) -> None:
        if length == 0:  # between the checks
            real(slots, slot, length)

    patch.setattr(Slots, "rollback", rollback)


def two_slots_share_their_states(patch: Patch) -> None:
    real = StateCache.__init__

    def make(cache: StateCache, *arguments: object) -> None:
        real(cache, *arguments)
        cache._slots[3:] = cache._slots[2:3] * len(cache._slots[3:])  # the reference has one slot

    patch.setattr(StateCache, "__init__", make)


def trails_end_at_128(patch: Patch) -> None:
    real = states._SlotStates._write

    def write(path: states._SlotStates, start: int, inputs: Floats) -> None:
        real(path, start, inputs if start < 128 else np.zeros_like(inputs))

    patch.setattr(states._SlotStates, "_write", write)


FAULTS: list[tuple[Callable[[Patch], None], set[str]]] = [
    (sixteen_tokens_leave_zeros, {"chain"}),
    (trees_are_read_as_chains, {"tree"}),
    (states_stay_when_tokens_are_taken_back, {"rollback", "keep"}),
    (all_of_a_chain_is_kept, {"rollback", "keep"}),
    (two_slots_share_their_states, {"slots"}),
    (trails_end_at_128, {"growth"}),
]


@pytest.mark.parametrize("model", STATEFUL)
@pytest.mark.parametrize(("fault", "checks"), FAULTS, ids=[fault.__name__ for fault, _ in FAULTS])
def test_a_fault_of_states_is_found_by_its_check_and_no_other(
    shelf: CheckArtifacts,
    monkeypatch: Patch,
    fault: Callable[[Patch], None],
    checks: set[str],
    model: str,
) -> None:
    fault(monkeypatch)
    assert differing(findings("cpu", job(shelf, "cpu", model))) == checks


@pytest.mark.parametrize("model", STATEFUL)
def test_trees_of_states_are_not_there_and_say_why(shelf: CheckArtifacts, model: str) -> None:
    result = findings("cpu", job(shelf, "cpu", model))
    assert STAGES not in result
    tree = result.pop("tree")
    assert tree["status"] == "not there"
    assert "has recurrent states, which follow one chain" in tree["reason"]
    assert {each["status"] for each in result.values()} == {"passed"}


@pytest.mark.parametrize("model", STATEFUL)
def test_a_provider_that_keeps_no_states_is_not_asked_to(
    shelf: CheckArtifacts, tmp_path: Path, monkeypatch: Patch, model: str
) -> None:
    monkeypatch.setenv("PILOTFISH_CACHE", str(tmp_path))
    tensorrt_double.install(monkeypatch, "10.16.2")
    (result,) = findings("tensorrt", job(shelf, "tensorrt", model)).values()
    assert (result["check"], result["status"]) == ("opening", "left out")
    assert "it runs on cpu" in result["reason"]


def test_linear_attention_is_left_out_where_the_runtime_lacks_its_operator(
    shelf: CheckArtifacts, monkeypatch: Patch
) -> None:
    """Also in contrib, whose other operators an older runtime has."""
    monkeypatch.setattr(providers, "runtime_version", lambda: (1, 23))
    for kind, reason in (("qwen3_5", "linear attention needs ONNX Runtime 1.31"), ("lfm2", None)):
        manifest = Artifact.open(shelf.artifact(kind, Variant("contrib", "fp32"))).manifest
        assert providers.why_unable("cpu", manifest) == reason
