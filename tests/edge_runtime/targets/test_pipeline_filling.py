"""Several passes at once keep the stages of a pipeline busy, and no pass waits for long."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.edge_runtime.scheduler import Job, Scheduler
from pilotfish.edge_runtime.targets.pipeline import PipelineDepth, PipelineTarget
from pilotfish.emulation.emulator import Emulator
from pilotfish.engines.engine import CHUNK, Work
from pilotfish.wire.protocols import Decision
from tests.support.passes import collect, run
from tests.support.pipelines import Row, cut, made_pair, opened, row

CONTEXT = 2048
SLOTS = 8
STAGES = 4


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Row]:
    """Their passes take as long as a file says, and their links as they are set."""
    folder = tmp_path_factory.mktemp("filling")
    stages = cut(made_pair(folder, CONTEXT).target, folder / "cut", STAGES)
    pace = stages / "pace"
    pace.write_text("0")
    size: dict[str, Any] = {"sessions": SLOTS, "context": CONTEXT}
    with row(stages, link=emulated, options=[{"pace": pace}] * (STAGES - 1), **size) as result:
        yield result


@contextmanager
def pipeline(
    nodes: Row, folder: Path, *, stage_s: float = 0.0, hop_s: float = 0.0
) -> Iterator[PipelineTarget]:
    """The target on nodes whose passes take so long, and hops to them; the edge's own do not."""
    (nodes.folder / "pace").write_text(str(stage_s))
    for link in nodes.links:
        link.set(rtt_s=0.0)
    with opened(nodes, folder / "list.toml", slots=SLOTS, context=CONTEXT) as target:
        for link in nodes.links:
            link.set(rtt_s=2.0 * hop_s)
        yield target


def emulated(endpoint: str) -> Emulator:
    return Emulator(endpoint).start()


def job(slot: int, length: int, rows: int = 5) -> Job:
    """A window behind a text, or a prompt."""
    tokens = np.full(length, slot + 1, np.uint32)
    name = bytes([slot]) * 16
    return Job(name, slot, tokens, rows, (lambda *_: Decision(0, 0)) if rows else None, owner=name)


def done(scheduler: Scheduler, target: PipelineTarget, count: int) -> dict[int, float]:
    """When so many jobs were done, by slot."""
    begun_s, result = time.monotonic(), {}
    while len(result) < count:
        assert time.monotonic() < begun_s + 30.0
        jobs = run(scheduler) if scheduler.wait_s() == 0.0 else collect(scheduler)
        for each in jobs:
            assert each.error is None
            result[each.slot] = time.monotonic() - begun_s
        if scheduler.wait_s() != 0.0:
            target.pause()
    return result


def read(scheduler: Scheduler, target: PipelineTarget, slots: int) -> None:
    """A text of 20 tokens in each slot."""
    for slot in range(slots):
        scheduler.submit(job(slot, 20, rows=0))
    done(scheduler, target, slots)


@pytest.mark.timing
def test_windows_that_come_together_are_shared_out_over_the_stages(
    nodes: Row, tmp_path: Path
) -> None:
    with pipeline(nodes, tmp_path, stage_s=0.05) as target:
        scheduler = Scheduler(target)
        read(scheduler, target, 4)
        before = scheduler.passes
        for slot in range(4):
            scheduler.submit(job(slot, 25))
        ends = sorted(done(scheduler, target, 4).values())
        assert scheduler.passes - before == 4
        assert ends[-1] < 2.0 * 0.05 * (STAGES - 1) + 3 * 0.05, "they waited for each other"


@pytest.mark.timing
def test_more_windows_than_stages_share_passes(nodes: Row, tmp_path: Path) -> None:
    with pipeline(nodes, tmp_path, stage_s=0.05) as target:
        scheduler = Scheduler(target)
        read(scheduler, target, SLOTS)
        target.run(10**6, [Work(0, np.full(25, 1, np.uint32), 5)])
        assert target.concurrent_passes == STAGES, "the links take no time"
        before = scheduler.passes
        for slot in range(SLOTS):
            scheduler.submit(job(slot, 30))
        done(scheduler, target, SLOTS)
        assert scheduler.passes - before == STAGES


@pytest.mark.timing
def test_long_links_hold_more_passes_than_there_are_stages(nodes: Row, tmp_path: Path) -> None:
    with pipeline(nodes, tmp_path, hop_s=0.05) as target:
        scheduler = Scheduler(target)
        read(scheduler, target, SLOTS)
        assert target.depth == target.concurrent_passes == SLOTS
        for slot in range(SLOTS):
            scheduler.submit(job(slot, 25))
        ends = done(scheduler, target, SLOTS).values()
        assert max(ends) < 1.7 * 0.05 * STAGES


@pytest.mark.timing
def test_pieces_of_a_long_prompt_follow_each_other(nodes: Row, tmp_path: Path) -> None:
    with pipeline(nodes, tmp_path, hop_s=0.1) as target:
        scheduler = Scheduler(target)
        scheduler.submit(job(0, 8 * CHUNK, rows=0))
        took_s = done(scheduler, target, 1)[0]
        assert scheduler.passes == 1
        assert took_s < 3.5 * 0.1 * STAGES, "eight rounds would take 3.2 s"


@pytest.mark.timing
def test_a_window_does_not_wait_for_all_of_a_long_session(nodes: Row, tmp_path: Path) -> None:
    """That is fed again, in pieces: no more of these are under way than keep the stages busy."""
    long, short = np.full(16 * CHUNK - 40, 1, np.uint32), np.full(25, 2, np.uint32)
    with pipeline(nodes, tmp_path, stage_s=0.05) as target:
        target.run(0, [Work(1, short[:20], 5)])
        begun_s = time.monotonic()
        target.start(1, [Work(0, long, 5)])
        ends = all_scores(target, begun_s + 0.1)
        target.start(2, [Work(1, short, 5)])
        ends |= all_scores(target, begun_s + 2.0)
        assert ends[2] - begun_s < 0.1 + (STAGES + 1 + STAGES) * 0.05 + 0.1
        assert ends[1] - begun_s > 16 * 0.05


def all_scores(target: PipelineTarget, until_s: float) -> dict[int, float]:
    """When passes came in until then, by number."""
    results: dict[int, float] = {}
    while (now_s := time.monotonic()) < until_s:
        for scores in target.collect_scores():
            assert scores.error is None
            results[scores.number] = now_s
        target.pause()
    return results


# The depth

SECONDS = st.floats(1e-4, 1.0)


@given(st.integers(1, 8), st.integers(1, 32), SECONDS, st.lists(SECONDS, min_size=1, max_size=8))
def test_as_many_passes_as_fit_into_the_way(
    stages: int, slots: int, hops_s: float, computed_s: list[float]
) -> None:
    depth = PipelineDepth(stages, slots)
    computed_ns = [int(1e9 * each) for each in computed_s]
    depth.update(hops_s + sum(computed_s[1:]), computed_ns, alone=True)
    assert min(stages, slots) <= depth.passes <= slots
    fitting = (hops_s + sum(computed_s)) / max(computed_s)
    if stages <= fitting <= slots:
        assert abs(depth.passes - fitting) < 0.51


def test_steps_that_waited_for_others_do_not_make_the_way_longer() -> None:
    depth = PipelineDepth(4, 32)
    way_ns = [10_000_000] * 4
    depth.update(0.07, way_ns, alone=True)  # 40 ms on the links
    assert depth.passes == 8
    depth.update(0.5, way_ns, alone=False)
    assert depth.passes == 8
    depth.update(0.05, way_ns, alone=False)
    assert depth.passes == 6
    depth.update(0.5, way_ns, alone=True)
    assert depth.passes == 32
