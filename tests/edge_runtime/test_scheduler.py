"""Batching: jobs that share a pass or wait, and the cost of failures and cancellations."""

from __future__ import annotations

import logging
import time

import numpy as np
import pytest

from pilotfish.edge_runtime.scheduler import CHUNK, NARROW, Job, Scheduler
from pilotfish.edge_runtime.targets.local import LocalTarget
from pilotfish.engines.engine import Engine, Work
from pilotfish.engines.onnx_decoder import Decoder
from pilotfish.speculation.distributions import Floats
from pilotfish.wire.protocols import Decision
from tests.support.passes import run
from tests.support.tiny import tiny_artifact

SLOTS = 9
CONTEXT = 512
MS = 1_000_000


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    path = tmp_path_factory.mktemp("scheduler") / "target"
    tiny_artifact(path, vocab=64, context=CONTEXT, seed=3)
    return Decoder(path, slots=SLOTS, threads=1)


class Clock:
    """A clock that a test sets."""

    now_ns = 1

    def __call__(self) -> int:
        return self.now_ns


class Client:
    """Submits work for one slot and remembers the logits that it was decided by."""

    def __init__(self, scheduler: Scheduler, slot: int, clock: Clock | None = None) -> None:
        self._scheduler = scheduler
        self._clock = clock or time.monotonic_ns
        self.slot = slot
        self.seen: list[Floats] = []

    def window(self, tokens: list[int], rows: int = 3) -> Job:
        """A window of rows − 1 tokens at the end of these."""
        return self._submit(tokens, rows)

    def prompt(self, tokens: list[int]) -> Job:
        """Tokens to read, without a decision."""
        return self._submit(tokens, 0)

    def _submit(self, tokens: list[int], rows: int) -> Job:
        def rule(logits: Floats, hidden: Floats) -> Decision:
            self.seen.append(logits.copy())
            return Decision(0, int(logits[0].argmax()))

        ids = np.array(tokens, dtype=np.uint32)
        name = bytes([self.slot]) * 16
        job = Job(name, self.slot, ids, rows, rule if rows else None, queued_ns=self._clock())
        self._scheduler.submit(job)
        return job


def text(seed: int, length: int) -> list[int]:
    values: list[int] = np.random.default_rng(seed).integers(0, 60, length).tolist()
    return values


def run_all(scheduler: Scheduler) -> list[Job]:
    """Make passes until no job waits; returns the jobs in the order of their ends."""
    done: list[Job] = []
    while scheduler.wait_s() is not None:
        done += run(scheduler)
    return done


def alone(decoder: Decoder, tokens: list[int], rows: int) -> Floats:
    """The logits of the last rows, from a pass of its own."""
    engine = Engine(decoder)
    engine.clear(0)
    logits: Floats = engine.run([Work(0, np.array(tokens), rows)])[0].logits.copy()
    engine.clear(0)
    return logits


def test_a_batch_decides_as_single_passes_do(decoder: Decoder) -> None:
    scheduler = Scheduler(LocalTarget(Engine(decoder)))
    clients = [Client(scheduler, slot) for slot in range(4)]
    texts = [text(slot, 20 + 7 * slot) for slot in range(4)]
    for client, tokens in zip(clients, texts, strict=True):
        client.prompt(tokens[:-3])
    run_all(scheduler)
    before = scheduler.passes
    for client, tokens in zip(clients, texts, strict=True):
        client.window(tokens, rows=1 + client.slot % 3)
    assert len(run_all(scheduler)) == len(clients)
    assert scheduler.passes == before + 1
    for client, tokens in zip(clients, texts, strict=True):
        wanted = alone(decoder, tokens, rows=1 + client.slot % 3)
        np.testing.assert_allclose(client.seen[0], wanted, atol=1e-4)


def test_a_long_prompt_holds_a_window_up_for_one_chunk_at_most(decoder: Decoder) -> None:
    scheduler = Scheduler(LocalTarget(Engine(decoder)))
    reader, other = Client(scheduler, 0), Client(scheduler, 1)
    prompt = reader.prompt(text(0, 3 * CHUNK + 5))
    tokens = text(1, 10)
    passes: list[str] = []
    done: list[Job] = []
    other.window(tokens)
    while prompt not in done:
        new = run(scheduler)
        passes.append("window" if any(job.slot == 1 for job in new) else "chunk")
        if passes[-1] == "window":
            tokens = [*tokens, 7]
            other.window(tokens)
        done += new
    assert passes[:6] == ["chunk", "window"] * 3
    final = reader.window(text(0, 3 * CHUNK + 5), rows=1)
    assert final in run_all(scheduler)
    np.testing.assert_allclose(
        reader.seen[-1], alone(decoder, text(0, 3 * CHUNK + 5), rows=1), atol=1e-4
    )


def test_jobs_of_a_slot_do_not_overtake_each_other(decoder: Decoder) -> None:
    scheduler = Scheduler(LocalTarget(Engine(decoder)))
    client = Client(scheduler, 2)
    jobs = [client.prompt(text(0, 2 * CHUNK)), client.window(text(0, 2 * CHUNK + 3))]
    assert run_all(scheduler) == jobs


def test_cancelled_work_leaves_nothing_behind(decoder: Decoder) -> None:
    scheduler = Scheduler(LocalTarget(Engine(decoder)))
    client, other = Client(scheduler, 0), Client(scheduler, 1)
    half_read = client.prompt(text(0, 2 * CHUNK))
    run(scheduler)
    half_read.cancelled = True
    never_begun = client.window(text(0, 2 * CHUNK + 4))
    never_begun.cancelled = True
    wanted = client.window(text(5, 50))
    neighbour = other.window(text(6, 30))
    done = run_all(scheduler)
    assert set(done) == {wanted, neighbour}
    np.testing.assert_allclose(client.seen[-1], alone(decoder, text(5, 50), rows=3), atol=1e-4)


def test_no_session_starves(decoder: Decoder) -> None:
    """Eight sessions that always have a window, and one that reads prompts without end."""
    scheduler = Scheduler(LocalTarget(Engine(decoder)))
    clients = [Client(scheduler, slot) for slot in range(8)]
    reader = Client(scheduler, 8)
    windows = dict.fromkeys(range(8), 0)
    prompts = 0
    for client in clients:
        client.window(text(client.slot, 10))
    reader.prompt(text(0, 2 * CHUNK))
    for _ in range(120):
        for job in run(scheduler):
            if job.slot == 8:
                prompts += 1
                reader.prompt(text(prompts, 2 * CHUNK))
            else:
                windows[job.slot] += 1
                clients[job.slot].window(text(job.slot, 10 + windows[job.slot]))
    assert max(windows.values()) - min(windows.values()) <= 1
    assert min(windows.values()) >= 55
    assert prompts >= 25


@pytest.mark.parametrize(
    ("others", "again", "forgotten"), [(900, 0, False), (1200, 0, True), (1200, 600, False)]
)
def test_whose_pass_was_last_is_remembered_of_so_many_owners(
    decoder: Decoder, others: int, again: int, forgotten: bool
) -> None:
    """Of more an edge would keep one for every key and connection that ever came."""
    scheduler = Scheduler(LocalTarget(Engine(decoder)))

    def submit(slot: int, owner: str, length: int) -> Job:
        ids = np.array(text(1, length), np.uint32)
        job = Job(owner.encode(), slot, ids, rows=0, verify=None, owner=owner.encode())
        scheduler.submit(job)
        return job

    submit(0, "served", 2)
    run_all(scheduler)
    for at in range(others):
        submit(at % SLOTS, f"another {at}", 2)
        if at + 1 == again:  # since then, fewer others
            run_all(scheduler)
            submit(0, "served", 2)
            run_all(scheduler)
    run_all(scheduler)
    served, new = submit(0, "served", NARROW + 1), submit(1, "new", NARROW + 1)
    first, second = run_all(scheduler)  # a prompt has a pass of its own
    assert (first, second) == ((served, new) if forgotten else (new, served))


def test_a_pass_that_fails_fails_its_jobs_and_no_others(
    decoder: Decoder, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL, logger="pilotfish.edge")
    scheduler = Scheduler(LocalTarget(Engine(decoder)))
    greedy, honest = Client(scheduler, 0), Client(scheduler, 1)
    good = text(0, CONTEXT - 10)
    greedy.prompt(good)
    run_all(scheduler)
    too_long = greedy.window([*good, *text(1, 20)], rows=20)  # ends beyond the context
    assert run_all(scheduler) == [too_long]
    assert too_long.error is not None
    again = greedy.window([*good, *text(1, 5)], rows=5)
    neighbour = honest.window(text(2, 12))
    done = run_all(scheduler)
    assert {again, neighbour} == set(done)
    assert again.error is None
    assert neighbour.error is None
    np.testing.assert_allclose(
        greedy.seen[-1], alone(decoder, [*good, *text(1, 5)], rows=5), atol=1e-4
    )


def test_a_text_that_was_read_before_fails_nobodys_pass(decoder: Decoder) -> None:
    scheduler = Scheduler(LocalTarget(Engine(decoder)))
    client, other = Client(scheduler, 0), Client(scheduler, 1)
    read = text(0, 30)
    client.prompt(read)
    run_all(scheduler)
    jobs = {client.prompt(read), other.window(text(1, 12)), client.window(read, rows=3)}
    assert set(run_all(scheduler)) == jobs
    assert [job.error for job in jobs] == [None] * 3
    np.testing.assert_allclose(client.seen[-1], alone(decoder, read, rows=3), atol=1e-4)


class Pace:
    """Two clients under a clock that a test sets; a pass takes 80 ms."""

    def __init__(self, decoder: Decoder) -> None:
        self.clock = Clock()
        self.scheduler = Scheduler(LocalTarget(Engine(decoder)), self._tick)
        self.first, self.second = (Client(self.scheduler, i, self.clock) for i in range(2))
        self._passing = False

    def _tick(self) -> int:
        if self._passing:  # asked at the beginning of a pass and at its end
            self.clock.now_ns += 80 * MS
        return self.clock.now_ns

    def both(self, late_ns: int) -> None:
        """A pass for both, the second one having come so much later than the first."""
        self.first.window(text(0, 10))
        self.clock.now_ns += late_ns
        self.second.window(text(1, 10))
        self.make_pass()

    def make_pass(self) -> None:
        self._passing = True
        assert run(self.scheduler)
        self._passing = False

    def wait_ms(self) -> float:
        wait_s = self.scheduler.wait_s()
        assert wait_s is not None
        return wait_s * 1e3


@pytest.fixture
def pace(decoder: Decoder) -> Pace:
    return Pace(decoder)


def test_a_lone_device_is_never_kept_waiting(pace: Pace) -> None:
    for _ in range(3):
        pace.first.window(text(0, 10))
        assert pace.wait_ms() == 0.0
        pace.make_pass()
        pace.clock.now_ns += 1 * MS


def test_a_device_that_is_due_is_waited_for_and_no_longer(pace: Pace) -> None:
    pace.both(late_ns=0)
    pace.both(late_ns=4 * MS)  # 4 ms from its verdict to its next window
    pace.first.window(text(0, 10))
    assert pace.wait_ms() == pytest.approx(5.0)  # a quarter more than last time
    pace.clock.now_ns += 3 * MS
    assert pace.wait_ms() == pytest.approx(2.0)
    pace.second.window(text(1, 10))
    assert pace.wait_ms() == 0.0  # both are there
    pace.make_pass()
    pace.first.window(text(0, 10))
    pace.clock.now_ns += 6 * MS  # the second one does not come back
    assert pace.wait_ms() == 0.0


def test_a_device_that_is_far_from_ready_is_not_waited_for(pace: Pace) -> None:
    pace.both(late_ns=0)
    pace.both(late_ns=30 * MS)  # it drafts for longer than a share of a pass
    pace.first.window(text(0, 10))
    assert pace.wait_ms() == 0.0


def test_a_prompt_waits_for_no_device(pace: Pace) -> None:
    pace.both(late_ns=0)
    pace.both(late_ns=4 * MS)
    pace.first.prompt(text(3, CHUNK))
    assert pace.wait_ms() == 0.0
