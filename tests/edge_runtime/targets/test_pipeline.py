"""A target in stages over real nodes says what the whole one says, whatever it is asked."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.edge_runtime.scheduler import Job, Scheduler
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.engine import CHUNK, Work
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.speculation.distributions import Floats
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, Decision
from tests.conftest import Pair
from tests.support.hostile import drafted
from tests.support.judging import random_head, saved
from tests.support.passes import run
from tests.support.pipelines import Row, cut, made_pair, opened, row, served, whole_logits
from tests.support.registered import temperature_of

CONTEXT = 512
SLOTS = 8
MOST = 4  # stages
SLOW = pytest.mark.slow
LENGTHS = [pytest.param(1, marks=SLOW), pytest.param(2, marks=SLOW), MOST]
PROMPTS = ([1, 3, 2, 7], [9], [*range(30, 60)], [*range(60)] * 5)  # the last one takes 3 passes
BY_ROUNDS = [name for name, protocol in PROTOCOL_REGISTRY.items() if not protocol.streams]
PROTOCOLS: dict[str, dict[str, Any]] = {
    name: {"temperature": temperature_of(name)} for name in (*BY_ROUNDS, "stream")
}
# Of the tiny model's logits, which go up to 2.8: how far states that lose something move them.
# Measured at most: fp16 0.0013, int8 0.04, int4 0.73.
MOST_OFF = {"fp32": 0.0, "fp16": 0.005, "int8": 0.15, "int4": 2.0}


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made_pair(tmp_path_factory.mktemp("pipeline"), CONTEXT)


@pytest.fixture(scope="module")
def judge(made: Pair, tmp_path_factory: pytest.TempPathFactory) -> str:
    manifests = (Artifact.open(path).manifest for path in made)
    return saved(random_head(*manifests, link=None), tmp_path_factory.mktemp("judge"))


@pytest.fixture(scope="module")
def server_options(judge: str) -> dict[str, Any]:
    return {"context": CONTEXT, "sessions": SLOTS, "head": judge}


@pytest.fixture(scope="module")
def whole(made: Pair, server_options: dict[str, Any]) -> Iterator[Device]:
    """A device of an edge that has the whole model."""
    with (
        EdgeServer(made.target, threads=1, **server_options) as server,
        Device(made.draft, server.endpoint, threads=1) as opened,
    ):
        yield opened


@contextmanager
def in_stages(made: Pair, stages: int) -> Iterator[Row]:
    """The nodes of a target cut into so many stages. One edge at a time can have them."""
    folder = cut(made.target, made.target.parent / f"cut-{stages}", stages)
    with row(folder, sessions=SLOTS, context=CONTEXT) as nodes:
        yield nodes


@pytest.fixture(scope="module", params=LENGTHS)
def cut_edge(
    request: pytest.FixtureRequest, made: Pair, server_options: dict[str, Any]
) -> Iterator[EdgeServer]:
    """An edge with this many stages."""
    listed = made.target.parent / f"{request.param}.toml"
    with (
        in_stages(made, request.param) as nodes,
        served(nodes, listed, server=server_options) as edge,
    ):
        yield edge


@pytest.fixture(scope="module")
def nodes(made: Pair) -> Iterator[Row]:
    """Nodes for targets that are opened here, one after the other."""
    with in_stages(made, MOST) as result:
        yield result


@pytest.fixture
def decoder(made: Pair) -> Decoder:
    return Decoder(made.target, slots=1, threads=1)


# The same text


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_the_text_is_the_whole_models(
    cut_edge: EdgeServer, whole: Device, made: Pair, protocol: str
) -> None:
    with Device(made.draft, cut_edge.endpoint, threads=1) as device:
        for seed, prompt in enumerate(PROMPTS):
            wish = {**PROTOCOLS[protocol], "protocol": protocol, "seed": seed, "max_tokens": 40}
            wanted = whole.generate(prompt, **wish)
            got = device.generate(prompt, **wish)
            assert got.tokens == wanted.tokens
            assert [r.accepted for r in got.rounds] == [r.accepted for r in wanted.rounds]
            assert [r.notes.get("forgiven", 0) for r in got.rounds] == [
                r.notes.get("forgiven", 0) for r in wanted.rounds
            ]


def test_several_devices_at_once(cut_edge: EdgeServer, whole: Device, made: Pair) -> None:
    wishes = [
        (prompt, {**PROTOCOLS[name], "protocol": name, "seed": seed, "max_tokens": 60})
        for seed, prompt in enumerate(PROMPTS)
        for name in ("coupled", "tree")
    ]
    wanted = [whole.generate(prompt, **wish).tokens for prompt, wish in wishes]

    def answers(at: int) -> list[list[int]]:
        prompt, wish = wishes[at]
        with Device(made.draft, cut_edge.endpoint, threads=1) as device:
            return [device.generate(prompt, **wish).tokens for _ in range(3)]

    with ThreadPoolExecutor(len(wishes)) as pool:
        assert list(pool.map(answers, range(len(wishes)))) == [[each] * 3 for each in wanted]


def test_cancelled_answers_leave_nothing_behind(
    cut_edge: EdgeServer, whole: Device, made: Pair
) -> None:
    wish: dict[str, Any] = {"protocol": "tree", "temperature": 1.0, "seed": 1, "max_tokens": 40}
    with Device(made.draft, cut_edge.endpoint, threads=1) as device:
        for turn, prompt in enumerate(PROMPTS * 3):
            pieces = device.stream(prompt, **{**wish, "seed": 9, "protocol": "stream"})
            for _ in range(turn % 4):
                next(pieces)
            pieces.close()
            wanted = whole.generate(prompt, **wish).tokens
            assert device.generate(prompt, **wish).tokens == wanted


def test_more_sessions_come_and_go_than_there_are_slots(
    whole: Device, made: Pair, tmp_path: Path
) -> None:
    few = {"context": CONTEXT, "sessions": 2, "idle": 0.001}
    with (
        row(cut(made.target, tmp_path / "cut", 3), sessions=2, context=CONTEXT) as result,
        served(result, tmp_path / "3.toml", server=few) as server,
    ):
        for seed in range(8):
            wish = {"protocol": "coupled", "temperature": 1.0, "seed": seed, "max_tokens": 20}
            prompt = PROMPTS[seed % len(PROMPTS)]
            with Device(made.draft, server.endpoint, threads=1) as device:
                wanted = whole.generate(prompt, **wish).tokens
                assert device.generate(prompt, **wish).tokens == wanted


# The same logits


@pytest.mark.parametrize("states", MOST_OFF)
def test_logits_are_as_near_as_the_states_are(
    nodes: Row, decoder: Decoder, tmp_path: Path, states: str
) -> None:
    tokens = np.random.default_rng(0).integers(0, 60, 400).astype(np.uint32)
    listed = tmp_path / "list.toml"
    with opened(nodes, listed, slots=SLOTS, context=CONTEXT, states=states) as target:
        off = []
        for number, length in enumerate((1, 5, CHUNK, 400)):
            rows_wanted = min(length, 9)
            (answer,) = target.run(number, [Work(1, tokens[:length], rows_wanted)])
            wanted = whole_logits(decoder, tokens[:length].tolist(), rows_wanted)
            off.append(float(np.abs(answer.logits - wanted).max()))
        assert max(off) <= MOST_OFF[states]
        assert states == "fp32" or max(off) > 0.0


class Talk:
    """One slot's session: text that grows by windows, chains and trees, and now and then is cut."""

    def __init__(self, slot: int, scheduler: Scheduler, fresh: Decoder) -> None:
        self._slot, self._scheduler, self._fresh = slot, scheduler, fresh
        self._random = np.random.default_rng(slot)
        self._text: list[int] = self._tokens(int(self._random.integers(1, 200)))
        self._turns = 0

    def _tokens(self, count: int) -> list[int]:
        values: list[int] = self._random.integers(0, 60, count).tolist()
        return values

    def speak(self) -> Job:
        """The next job."""
        self._turns += 1
        if self._random.random() < 0.15:  # another generation, from an earlier place
            self._text = self._text[: int(self._random.integers(1, len(self._text) + 1))]
            self._text += self._tokens(int(self._random.integers(0, 150)))
        self._text = self._text[: CONTEXT - 40]
        shape = [(2, 2, 1), (1, 1, 1, 1), (), (3, 1)][int(self._random.integers(4))]
        draft = drafted("tree" if max(shape, default=0) > 1 else "coupled", shape, self._turns)
        accept, node = (int(self._random.integers(0, len(draft.ids) + 1)) for _ in range(2))
        text = list(self._text)

        def rule(logits: Floats, hidden: Floats) -> Decision:
            path = [int(draft.ids[place - 1]) for place in draft.path(node)]
            wanted = whole_logits(self._fresh, [*text, *path], 1)[0]
            np.testing.assert_allclose(logits[node], wanted, atol=1e-4)
            return Decision(accept, 0)

        self._text += [int(draft.ids[place - 1]) for place in draft.path(accept)]
        self._text += self._tokens(1)
        tokens = np.array([*text, *draft.ids], np.uint32)
        name = bytes([self._slot]) * 16
        return Job(name, self._slot, tokens, len(draft.ids) + 1, rule, draft, owner=name)


def test_windows_of_all_shapes_cross_the_stages_together(
    nodes: Row, decoder: Decoder, tmp_path: Path
) -> None:
    with opened(nodes, tmp_path / "list.toml", slots=SLOTS, context=CONTEXT) as target:
        scheduler = Scheduler(target)
        talks = [Talk(slot, scheduler, decoder) for slot in range(SLOTS)]
        for talk in talks:
            scheduler.submit(talk.speak())
        done, end_s = 0, time.monotonic() + 120.0
        while done < 20 * len(talks):
            assert time.monotonic() < end_s
            for job in run(scheduler):
                assert job.error is None, job.error
                done += 1
                scheduler.submit(talks[job.slot].speak())
            target.pause()
        assert scheduler.passes >= done / SLOTS
