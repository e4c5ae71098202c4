"""Drafters of many tokens per pass, with real processes, on either end: texts and figures.

The pair is a random walk on a ring (`tests.support.ring`): the drafter's later drafts of a pass are
right less often than its first, as those of published drafters are.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pilotfish import Device, EdgeServer
from pilotfish.bridge import Pair
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.vocabulary import Vocabulary
from tests.support.daemons import Daemon, running
from tests.support.in_process import Reader, RealDrafter, expect_the_same
from tests.support.registered import ALL_LOSSLESS, LOSSLESS, sampling_only
from tests.support.ring import MASK, RING, ring_pair

PROMPT = [5, 6, 7]
TOKENS = 60
END = RING
CONTEXT = 256


class Folders(NamedTuple):
    draft: Path
    target: Path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    return Folders(*ring_pair(tmp_path_factory.mktemp("ring")))


@pytest.fixture(scope="module")
def device(folders: Folders) -> Iterator[Device]:
    with (
        EdgeServer(folders.target, rate=1e6, threads=1) as edge,
        Device(folders.draft, edge.endpoint, threads=1) as opened,
    ):
        yield opened


@pytest.fixture(scope="module")
def drafting_edge(folders: Folders) -> Iterator[Daemon]:
    flags = ("--target", folders.target, "--draft", folders.draft, "--threads", 1)
    with running(*flags, "--context", 256) as daemon:
        yield daemon


@pytest.mark.parametrize(
    ("protocol", "temperature"),
    [("greedy", 0.0), ("coupled", 0.0), ("coupled", 1.0), ("ahead", 0.0), ("ahead", 1.0)],
)
def test_the_text_is_the_targets_own(device: Device, protocol: str, temperature: float) -> None:
    accepted = seed = 0
    # on a busy machine the target may finish an answer before the first hint comes
    while seed < 4 or (not accepted and seed < 100):
        options = {"temperature": temperature, "seed": seed, "max_tokens": TOKENS}
        seed += 1
        wanted = device.generate(PROMPT, protocol="stream", **options)
        hints = {"hints": "device"} if protocol == "ahead" else {"window": 12}
        got = device.generate(PROMPT, protocol=protocol, **hints, **options)
        assert got.tokens == wanted.tokens
        assert MASK not in got.tokens
        accepted += sum(round_.accepted for round_ in got.rounds)
    # a window holds drafts of two passes
    assert protocol != "greedy" or max(round_.accepted for round_ in got.rounds) == 12
    assert accepted


# All tokens of the ring but the best one are likely in pairs. `top_k` must not keep one of a pair:
# rounding would choose it, and passes of other widths round otherwise on a GPU.
@pytest.mark.parametrize("shaped", [{}, {"top_k": 7, "frequency_penalty": 0.5}])
@pytest.mark.parametrize("protocol", sampling_only(LOSSLESS))
def test_sampled_answers_are_those_of_the_protocol_alone(
    device: Device, folders: Folders, protocol: str, shaped: dict[str, Any]
) -> None:
    vocabularies = [Vocabulary.from_artifact(Artifact.open(each)) for each in folders]
    models = Reader(folders.target), Reader(folders.draft)
    drafter = RealDrafter(Artifact.open(folders.draft), Pair(*vocabularies))
    options: dict[str, Any] = {"protocol": protocol, "temperature": 1.0, "window": 5}
    if "tree" in protocol:
        options = {"protocol": protocol, "temperature": 1.0, "expansion": (2, 2, 1)}
    options |= shaped
    expect_the_same(device, models, PROMPT, END, drafter=drafter, seeds=6, **options)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_edge_drafts_several_tokens_per_pass(
    drafting_edge: Daemon, folders: Folders, temperature: float
) -> None:
    accepted = drafted = 0
    with Device(folders.target, drafting_edge.endpoint, threads=1) as device:
        for seed in range(4):
            options = {"temperature": temperature, "seed": seed, "max_tokens": TOKENS}
            wanted = device.generate(PROMPT, protocol="stream", **options)
            got = device.generate(PROMPT, protocol="ahead", hints="edge", **options)
            assert got.tokens == wanted.tokens
            ours = [round_ for round_ in got.rounds if round_.source == "edge"]
            accepted += sum(round_.accepted for round_ in ours)
            drafted += sum(round_.window for round_ in ours)
    assert 0 < accepted <= drafted


@pytest.mark.parametrize("protocol", [*ALL_LOSSLESS, "ahead", "local"])
def test_answers_end_with_the_context(device: Device, protocol: str) -> None:
    """The masks of a pass never take the room of tokens."""
    options: dict[str, Any] = {"protocol": protocol, "temperature": 0.0, "max_tokens": 64}
    if protocol not in {"ahead", "local"}:
        options["window"] = 8
    answer = device.generate([3] * 240, **options)
    assert 240 + len(answer.tokens) == CONTEXT
    assert answer.finish_reason == "length"
