"""A last stage that answers nonsense: it is counted, and what it was asked for is done again."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest

from pilotfish.base.errors import TargetLostError
from pilotfish.edge_runtime.edge_metrics import EdgeMetrics
from pilotfish.edge_runtime.node.stage import StageWork
from pilotfish.edge_runtime.targets.pipeline import PipelineTarget
from pilotfish.engines.engine import StageEngine, Work
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.engines.stage import Head, Stage
from pilotfish.wire.nodes import AttachReply, Refused, Scored
from tests.conftest import HIDDEN, Pair
from tests.support.federating import Frames, Said, WorkerThread
from tests.support.pipelines import Node, Row, cut, made_pair, opened, whole_logits
from tests.support.runnable import same_up_to_a_gpus_rounding

CONTEXT = 512
SLOTS = 4
TOKENS = np.random.default_rng(3).integers(0, 60, 200).astype(np.uint32)


class Told(NamedTuple):
    """A pipeline whose last stage a test may have lie, and what its edge counts."""

    target: PipelineTarget
    liar: WorkerThread
    metrics: EdgeMetrics
    whole: Decoder

    def flies(self, number: int, slot: int, length: int) -> None:
        """A pass that comes back with the right logits."""
        (answer,) = self.target.run(number, [Work(slot, TOKENS[:length], 3)], timeout_s=60.0)
        wanted = whole_logits(self.whole, TOKENS[:length].tolist(), 3)
        same_up_to_a_gpus_rounding(answer.logits, wanted)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return made_pair(tmp_path_factory.mktemp("lies"), CONTEXT)


@pytest.fixture(scope="module")
def message_of(made: Pair, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Told]:
    folder = cut(made.target, made.target.parent / "cut", 3)
    middle = Node(folder / "stage-2", sessions=SLOTS, context=CONTEXT)
    work = StageWork(
        StageEngine(Stage(folder / "stage-3", slots=SLOTS, context=CONTEXT, threads=1)), None
    )
    edge_metrics = EdgeMetrics()
    path = tmp_path_factory.mktemp("list") / "list.toml"
    size: dict[str, Any] = {"slots": SLOTS, "context": CONTEXT}
    try:
        with WorkerThread(folder / "stage-3", work=work) as liar:
            row = Row(folder, [middle], [middle, liar])
            with opened(
                row, path, metrics=edge_metrics, late_s=1.0, give_up_s=8.0, **size
            ) as target:
                yield Told(target, liar, edge_metrics, Decoder(made.target, slots=1, threads=1))
    finally:
        middle.stop()


def replaced(**fields: Any) -> Callable[[Scored, Frames], Said]:
    return lambda scored, frames: (msgspec.structs.replace(scored, **fields), frames)


NAN = np.full((3, HIDDEN), math.nan, np.float32).tobytes()
LIES: dict[str, Callable[[Scored, Frames], Said]] = {
    "of-a-step-before": lambda scored, frames: (
        msgspec.structs.replace(scored, number=scored.number - 1), frames),
    "of-a-step-to-come": replaced(number=2**62),
    "no-frame": lambda scored, frames: (scored, []),
    "two-frames": lambda scored, frames: (scored, [*frames, *frames]),
    "short": lambda scored, frames: (scored, [frames[0][:-1]]),
    "long": lambda scored, frames: (scored, [frames[0] * 2]),
    "nothing": lambda scored, frames: (scored, [b""]),
    "not-finite": lambda scored, frames: (scored, [NAN]),
}  # fmt: skip


def once(lie: Callable[[Scored, Frames], Said], liar: WorkerThread) -> None:
    """It lies in its next answer."""

    def spoil(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
        if not isinstance(message, Scored):
            return [(message, frames)]
        liar.is_honest()
        return [lie(message, frames)]

    liar.lies(spoil)


@pytest.mark.parametrize("lie", LIES)
def test_an_answer_that_makes_no_sense_is_asked_for_again(message_of: Told, lie: str) -> None:
    message_of.flies(1, 0, 40)
    before = message_of.metrics.node_events["stage 3", "lied"]
    once(LIES[lie], message_of.liar)
    message_of.flies(2, 0, 45)
    assert message_of.metrics.node_events["stage 3", "lied"] == before + 1
    message_of.flies(3, 0, 50)
    message_of.flies(4, 1, 180)


def test_an_answer_that_is_said_twice_is_a_lie(message_of: Told) -> None:
    def spoil(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
        if isinstance(message, Scored):
            message_of.liar.is_honest()
            return [(message, frames), (message, frames)]
        return [(message, frames)]

    before = message_of.metrics.node_events["stage 3", "lied"]
    message_of.liar.lies(spoil)
    message_of.flies(1, 0, 40)
    message_of.flies(2, 0, 45)
    assert message_of.metrics.node_events["stage 3", "lied"] == before + 1


@pytest.mark.parametrize("times", [[], [0] * 256, [2**62] * 256], ids=["none", "many", "ages"])
def test_nonsensical_times_do_no_harm(message_of: Told, times: list[int]) -> None:
    once(replaced(compute_ns=times), message_of.liar)
    message_of.flies(1, 0, 40)
    message_of.flies(2, 0, 45)
    assert 1 <= message_of.target.depth <= SLOTS
    assert 1 <= message_of.target.concurrent_passes <= SLOTS


def test_an_answer_that_never_comes_is_late(message_of: Told) -> None:
    before = message_of.metrics.node_events["stage 3", "late"]

    def silent(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
        if isinstance(message, Scored):
            message_of.liar.is_honest()
            return []
        return [(message, frames)]

    message_of.liar.lies(silent)
    message_of.flies(1, 0, 40)
    assert message_of.metrics.node_events["stage 3", "late"] == before + 1


@pytest.mark.parametrize("what", ["scored", "attached", "refused"])
def test_what_concerns_another_attachment_is_not_heeded(message_of: Told, what: str) -> None:
    other = bytes(16)
    reply = {
        "scored": Scored(incarnation=other, number=0, compute_ns=[]),
        "attached": AttachReply(incarnation=other),
        "refused": Refused(incarnation=other, code="internal", message="nothing to do with it"),
    }[what]

    def spoil(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
        return [(reply, [b""] if what == "scored" else []), (message, frames)]

    before = dict(message_of.metrics.node_events)
    message_of.liar.lies(spoil)
    message_of.flies(1, 0, 40)
    message_of.liar.is_honest()
    assert dict(message_of.metrics.node_events) == before


def test_a_constant_liar_is_given_up(message_of: Told) -> None:
    def spoil(message: msgspec.Struct, frames: Frames) -> Iterable[Said]:
        return [(message, [NAN] if isinstance(message, Scored) else frames)]

    message_of.flies(1, 0, 40)
    before = message_of.metrics.node_events["stage 3", "lied"]
    message_of.liar.lies(spoil)
    begun_s = time.monotonic()
    with pytest.raises(TargetLostError, match="its answer is not valid"):
        message_of.target.run(2, [Work(0, TOKENS[:45], 3)], timeout_s=60.0)
    assert time.monotonic() - begun_s < 12.0
    assert message_of.metrics.node_events["stage 3", "lied"] - before <= 6, (
        "it was asked again and again"
    )
    message_of.liar.is_honest()
    message_of.flies(3, 0, 50)


@pytest.mark.parametrize(("room", "name"), [(StageEngine, "run"), (Head, "logits")])
def test_a_pass_that_fails_at_the_edge_itself_costs_that_pass_only(
    message_of: Told, monkeypatch: pytest.MonkeyPatch, room: type, name: str
) -> None:
    """Memory ran out, say: inference has errors of its own, of any type."""

    def fails(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(room, name, fails)
        with pytest.raises(RuntimeError, match="out of memory"):
            message_of.target.run(900, [Work(1, TOKENS[:20], 3)], timeout_s=20.0)
    message_of.flies(901, 1, 25)
