"""Share a few lanes among many clients.

A lane is a thread that owns one `Device`, and so the K/V of one conversation. The serving loop owns
the queue and assigns jobs to lanes. A lane takes jobs from its inbox and posts their events to the
loop, so nothing here needs a lock.

The next client is the one with the fewest running answers; among equals, the one that has used the
lanes for the shortest time (idle clients save up no time); then the one served longest ago. A job
of several answers yields to other clients after each answer. A job gets the free lane on which the
fewest tokens must be read again, for this job or a later one (`Lane.gain`). Each answer takes a
place in the queue; places are limited in total and per client, and `Lanes.admit` refuses more.
"""

import asyncio
import logging
import queue
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing, contextmanager, suppress

from msgspec import structs

from pilotfish.base.errors import DrainingError, PilotfishError
from pilotfish.bridge import Prompt
from pilotfish.device_runtime.device import Device
from pilotfish.device_runtime.record import Generation, Piece
from pilotfish.device_runtime.service.job import AnswerJob
from pilotfish.device_runtime.service.refusal import RefusalError, client_gone
from pilotfish.device_runtime.turn import AnswerStream
from pilotfish.speculation.randomness import derive_seed
from pilotfish.wire.request import Request

_log = logging.getLogger("pilotfish.service")
_each_log = logging.getLogger("pilotfish.answers")

BUFFERED = 1024  # pieces that may wait for a slow client
_HALF_LIFE_S = 300.0  # half-life of the probability that a resting conversation continues
_DRAINING = "The service is stopping; it accepts no new requests."
_FIRST_GUESS_S = 5.0  # initial estimate of an answer's duration
_LONGEST_RETRY_S = 60.0
_ATTEND_S = 0.5  # interval at which an idle lane serves its connection to the edge
_EVEN_S = 0.25  # clients count as equal if their times on the lanes differ by at most this
_CLIENTS = 1024  # limit of clients for which the time on the lanes is remembered
_INTERRUPT_AGAIN_S = 0.1


def _stopped() -> DrainingError:
    return DrainingError("The service stopped before the answer ended.")


class Lane(threading.Thread):
    """A thread that answers with one device, one answer at a time."""

    def __init__(self, device: Device, number: int, post: Callable[..., None]) -> None:
        super().__init__(name=f"lane-{number}", daemon=True)
        self.device = device
        self.number = number
        self.job: AnswerJob | None = None  # the running job; None: free; written by the loop
        self.active_s = time.monotonic()  # time of the last start or piece (monotonic)
        self.served_s = 0.0  # time when the last answer began (monotonic)
        self.held = 0  # length of the conversation after the last answer, tokens
        self._post = post
        self._inbox: queue.SimpleQueue[AnswerJob | None] = queue.SimpleQueue()

    def gain(self, job: AnswerJob) -> tuple[float, float]:
        """Rate this free lane for a job; the lane with the highest rating gets the job.

        The rating is the number of the prompt's tokens that are in the lane's K/V, minus the number
        of tokens that the lane's conversation would lose. Lost tokens count less the longer the
        lane has rested. Among equals, the lane that has rested longest is best.
        """
        shared = self.device.shared(job.prompt, job.owner)
        rested_s = time.monotonic() - self.active_s
        lost = max(0, self.held - shared) * 0.5 ** (rested_s / _HALF_LIFE_S)
        return shared - lost, rested_s

    def take(self, job: AnswerJob) -> None:
        """Give this free lane a job. On the loop only."""
        self.job = job
        self.active_s = self.served_s = time.monotonic()
        self._inbox.put(job)

    def end(self) -> None:
        """End the thread after its present job."""
        self._inbox.put(None)

    def run(self) -> None:
        """Take jobs from the inbox and make one answer of each; end at None."""
        while (job := self._next_job()) is not None:
            try:
                self._post(self, job, self._answer(job))
            except BaseException as error:
                self._post(self, job, error)
            del job  # a free lane must not hold a job's memory

    def _next_job(self) -> AnswerJob | None:
        """Wait for a job, or None; meanwhile greet the edge again whenever it has come back."""
        while True:
            try:
                return self._inbox.get(timeout=_ATTEND_S)
            except queue.Empty:
                self.device.attend()

    def _answer(self, job: AnswerJob) -> Generation:
        with closing(self._pieces(job)) as pieces:
            for piece in pieces:
                self.active_s = time.monotonic()
                if job.streamed:
                    job.await_room()
                if job.given_up is not None:
                    break
                if job.streamed:
                    self._post(self, job, piece)
        if job.given_up is not None:
            raise job.given_up
        assert self.device.last is not None
        return self.device.last

    def _pieces(self, job: AnswerJob) -> Generator[Piece, None, None]:
        if job.given_up is None:
            request = job.request
            if request.seed is not None:
                request = structs.replace(request, seed=derive_seed(request.seed, job.number))
            yield from job.context.run(self._begin, job, request)

    def _begin(self, job: AnswerJob, request: Request) -> AnswerStream:
        """Begin the answer to a request, in the context in which the request's span is current."""
        tracer = self.device.tracer
        if tracer is not None and tracer.has_current:
            tracer.start("queue", begun_ns=job.queued_ns).end()
        return self.device.answer(job.prompt, request, owner=job.owner)


def open_beside(first: Device, count: int) -> list[Device]:
    """Return ``count`` devices for as many lanes: the first, and others with the same weights.

    After an error all of them are closed.
    """
    devices = [first]
    try:
        while len(devices) < count:
            devices.append(first.beside())
    except BaseException:
        for device in devices:
            device.close()
        raise
    return devices


class Lanes:
    """The lanes and the queue before them. All methods are called on the loop.

    devices: one device per lane. places: limit of waiting answers. on_generation: called with each
    finished generation. on_counts: called with the numbers of waiting and of running answers
    whenever these change.
    """

    def __init__(
        self,
        devices: Sequence[Device],
        *,
        places: int,
        on_generation: Callable[[Generation], None] = lambda generation: None,
        on_counts: Callable[[int, int], None] = lambda waiting, running: None,
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self.lanes = [Lane(device, at, self._post) for at, device in enumerate(devices)]
        self._most = len(self.lanes) + places
        # limit of places per client: no client can take all of them
        self._most_each = len(self.lanes) + (places + 1) // 2
        self._on_generation, self._on_counts = on_generation, on_counts
        self._held: Counter[str] = Counter()  # by client: number of places taken
        self._waiting: dict[str, deque[AnswerJob]] = {}
        # by client with places: the turn in which the client was last served, or else the last turn
        # before its first job came
        self._served: dict[str, int] = {}
        self._turn = 0
        # by client, in the order of last use: time on the lanes, seconds. A returning client starts
        # with ``_now_s`` at least: the shortest time of any client that waited at the last turn.
        self._used_s: OrderedDict[str, float] = OrderedDict()
        self._now_s = 0.0
        self._typical_s = _FIRST_GUESS_S
        self.draining = False
        self._closed = False  # whether `close` has waited for the threads
        for lane in self.lanes:
            lane.start()

    @property
    def running(self) -> int:
        """The number of answers that run on lanes."""
        return sum(lane.job is not None for lane in self.lanes)

    @property
    def waiting(self) -> int:
        """The number of answers that wait for a lane, or for their prompt to be read."""
        return self._held.total() - self.running

    @contextmanager
    def admit(
        self, client: str, choices: int = 1, prompts: int = 1, *, pieces: int | None = None
    ) -> Iterator[AnswerJob]:
        """Make a job for this client, and hold its places during the block: one for each answer to
        one prompt. A job of several prompts needs no more, since it makes one answer at a time.

        choices: number of answers to each prompt. pieces: see `AnswerJob`. Raises a `RefusalError`
        if there are too few free places. At the end of the block the job is given up, unless it has
        ended.
        """
        self._refuse_if_draining()
        if (full := self._full(client, choices)) is not None:
            raise RefusalError(
                429,
                f"{full} is full; try again later.",
                code="busy",
                reason="busy",
                retry_s=self._retry_s(),
            )
        job = AnswerJob(client, choices, prompts, pieces=pieces)
        self._held[client] += choices
        # before clients that are served from now on, after clients that have waited longer
        self._served.setdefault(client, self._turn - 1)
        try:
            yield job
        finally:
            self._free_places(job, job.places)
            self.give_up(job, client_gone())
            self._report()

    def _full(self, client: str, choices: int) -> str | None:
        """Name the queue that lacks room for this client's new answers; None: there is room.

        A job larger than its client's share is admitted if the client has no other job; the answers
        beyond the share take no places from other clients.
        """
        client_places = self._held[client]
        places = sum(min(each, self._most_each) for each in self._held.values())
        if places + min(choices, self._most_each) > self._most:
            return "The queue"
        return (
            "Your share of the queue"
            if client_places and client_places + choices > self._most_each
            else None
        )

    def _free_places(self, job: AnswerJob, count: int) -> None:
        job.places -= count
        self._held[job.client] -= count
        if not self._held[job.client]:
            del self._held[job.client]
            self._served.pop(job.client, None)

    def submit(
        self,
        job: AnswerJob,
        prompt: Prompt,
        request: Request,
        *,
        more: Sequence[Prompt] = (),
        streamed: bool,
    ) -> None:
        """Queue an admitted job. more: its further prompts. streamed: post each piece, too."""
        self._refuse_if_draining()
        job.prompts, job.request, job.streamed = [prompt, *more], request, streamed
        if job.given_up is None:
            job.queued_ns = time.monotonic_ns()
            self._waiting.setdefault(job.client, deque()).append(job)
            self._assign()

    def give_up(self, job: AnswerJob, reason: BaseException) -> None:
        """Drop a job: take it off the queue, or interrupt its lane."""
        if job.ended or job.given_up is not None:
            return
        job.give_up(reason)
        for lane in self.lanes:
            if lane.job is job:
                self._interrupt(lane, job)
                return
        with suppress(KeyError, ValueError):
            self._waiting[job.client].remove(job)
            if not self._waiting[job.client]:
                del self._waiting[job.client]
        job.post(reason)

    def _interrupt(self, lane: Lane, job: AnswerJob) -> None:
        """Interrupt a given-up job until its lane is free: the first time it may not have begun.

        A lane that still hangs when the lanes have been closed is left alone.
        """
        if lane.job is job and lane.is_alive() and not self._closed:
            lane.device.interrupt()
            self._loop.call_later(_INTERRUPT_AGAIN_S, self._interrupt, lane, job)

    def refuse_waiting(self) -> None:
        """Begin to drain: refuse waiting and new jobs, finish jobs that have begun an answer."""
        self.draining = True
        for job in self._queued():
            if not job.choice:
                self.give_up(job, DrainingError(_DRAINING))

    def _queued(self) -> list[AnswerJob]:
        return [job for jobs in self._waiting.values() for job in jobs]

    def _refuse_if_draining(self) -> None:
        if self.draining:
            raise DrainingError(_DRAINING)

    def interrupt(self, reason: Callable[[], PilotfishError] = _stopped) -> None:
        """Interrupt all jobs that have begun, and drop those that wait. reason: makes the error."""
        running = [lane.job for lane in self.lanes if lane.job is not None]
        for job in [*running, *self._queued()]:
            self.give_up(job, reason())

    def stuck(self, limit_s: float) -> list[int]:
        """List the lanes whose jobs have shown no sign of life for ``limit_s``.

        A sign is a piece, or a check for an interruption. A lane also checks while it waits for the
        edge or reads a long prompt.
        """
        now_s = time.monotonic()
        return [
            lane.number
            for lane in self.lanes
            if lane.job is not None
            and now_s - max(lane.active_s, lane.device.last_checked_s) > limit_s
        ]

    def close(self, limit_s: float) -> bool:
        """End the threads and close the devices; return False if a lane did not end in time."""
        until_s = time.monotonic() + limit_s
        for lane in self.lanes:
            lane.end()
        for lane in self.lanes:
            lane.join(max(0.0, until_s - time.monotonic()))
            if not lane.is_alive():  # a lane that hangs still uses its device
                lane.device.close()
        self._closed = True
        return not any(lane.is_alive() for lane in self.lanes)

    def _post(
        self, lane: Lane, job: AnswerJob, event: "Piece | Generation | BaseException"
    ) -> None:
        """Deliver a job's event to the loop. Called by the lanes' threads."""
        with suppress(RuntimeError):  # the loop has ended
            self._loop.call_soon_threadsafe(self._deliver, lane, job, event)

    def _deliver(
        self, lane: Lane, job: AnswerJob, event: "Piece | Generation | BaseException"
    ) -> None:
        if isinstance(event, Piece):
            if job.given_up is None:
                job.post(event)
                if job.backlog > BUFFERED:
                    self.give_up(job, client_gone("The client reads too slowly."))
            return
        lane.job = None
        took_s = time.monotonic() - lane.served_s
        self._typical_s += (took_s - self._typical_s) / 8
        self._used_s[job.client] = self._used_s.pop(job.client, self._now_s) + took_s
        lane.held = len(job.prompt)
        if isinstance(event, Generation):
            self._on_generation(event)
            lane.held += len(event.tokens)
        if job.given_up is not None and (job.left > 1 or not isinstance(event, Generation)):
            event = job.given_up  # the reason replaces the interruption's own error
        job.post(event)
        if not job.ended:  # queue its next answer: other clients may come first
            if job.left < job.places:
                self._free_places(job, 1)
            job.queued_ns = time.monotonic_ns()
            self._waiting.setdefault(job.client, deque()).appendleft(job)
        self._assign()

    def _assign(self) -> None:
        """Give waiting jobs to free lanes, in the order of `_next`."""
        while self._waiting and (free := [lane for lane in self.lanes if lane.job is None]):
            client = self._next()
            jobs = self._waiting[client]
            job = jobs.popleft()
            if not jobs:
                del self._waiting[client]
            self._turn += 1
            self._served[client] = self._turn
            self._used_s[client] = max(self._used_s.pop(client, 0.0), self._now_s)
            if len(self._used_s) > _CLIENTS:
                self._used_s.popitem(last=False)
            lane = max(free, key=lambda lane: lane.gain(job))
            shares = lane.device.shared(job.prompt, job.owner)
            _each_log.info("lane %d shares %d of %d tokens", lane.number, shares, len(job.prompt))
            lane.take(job)
        self._report()

    def _next(self) -> str:
        """Return the waiting client whose turn it is."""
        used_s = {each: max(self._used_s.get(each, 0.0), self._now_s) for each in self._waiting}
        self._now_s = min(used_s.values())
        even_s = self._now_s + _EVEN_S

        def precedence(client: str) -> tuple[int, float, int]:
            running = sum(lane.job is not None and lane.job.client == client for lane in self.lanes)
            ahead_s = used_s[client] if used_s[client] > even_s else 0.0
            return running, ahead_s, self._served[client]

        return min(self._waiting, key=precedence)

    def _retry_s(self) -> float:
        """Estimate the seconds until a place is free."""
        return min(_LONGEST_RETRY_S, self._typical_s * max(1, self.waiting) / len(self.lanes))

    def _report(self) -> None:
        self._on_counts(max(0, self.waiting), self.running)
