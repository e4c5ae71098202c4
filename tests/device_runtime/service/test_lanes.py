"""Several clients of one service: fair, bounded, and none of them can hold a lane for nothing."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.device_runtime.record import Generation
from pilotfish.device_runtime.service.lanes import BUFFERED, Lanes
from pilotfish.device_runtime.service.refusal import RefusalError
from pilotfish.wire.request import Request
from tests.conftest import Pair
from tests.support import web
from tests.support.serving import Serving, chat, content_of, eventually, serving

ENDLESS = 30_000  # tokens: minutes
LONG = 800  # tokens: half a second or more
KEYS = {name: f"{name}-{'0123456789abcdef'}" for name in ("alice", "bob", "carol")}


@pytest.fixture(scope="module")
def endless_edge(long_pair: Pair) -> Iterator[EdgeServer]:
    with EdgeServer(long_pair.target, threads=1) as server:
        yield server


@pytest.fixture(scope="module")
def api_keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("keys") / "api-keys"
    path.write_text("".join(f"{name}:{key}\n" for name, key in KEYS.items()))
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def service(long_pair: Pair, endless_edge: EdgeServer, api_keys: Path) -> Iterator[Serving]:
    """One lane, four places: of them a client may have two besides the lane."""
    flags = ("--lanes", 1, "--queue", 4, "--api-keys", api_keys)
    with serving(long_pair.draft, endless_edge.endpoint, *flags) as started:
        yield started


def bearer(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def stream(client: openai.OpenAI, tokens: int = ENDLESS) -> Any:
    """A stream that has begun."""
    chunks = chat(client, stream=True, max_tokens=tokens)
    next(chunks)
    next(chunks)
    return chunks


def free(service: Serving) -> bool:
    health = service.get("/health").json()
    return health["lanes"]["busy"] == 0 and health["waiting"] == 0


class Flood:
    """Send requests of one client at once; notes the order of their ends."""

    def __init__(self, client: openai.OpenAI, name: str, ended: list[str]) -> None:
        self._client, self._name, self._ended = client, name, ended
        self._threads: list[threading.Thread] = []

    def _ask(self, tokens: int) -> None:
        with suppress(openai.APIError):
            chat(self._client, max_tokens=tokens)
            self._ended.append(self._name)

    def add(self, count: int, tokens: int) -> None:
        for _ in range(count):
            thread = threading.Thread(target=self._ask, args=(tokens,))
            thread.start()
            self._threads.append(thread)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(120)


@pytest.mark.timing
def test_a_flood_is_bounded_and_starves_no_client(service: Serving) -> None:
    alice, bob = (service.client(KEYS[name]) for name in ("alice", "bob"))
    ended: list[str] = []
    flood = Flood(alice, "alice", ended)
    flood.add(3, 600)
    eventually(lambda: service.get("/health").json()["waiting"] == 2)
    with pytest.raises(openai.RateLimitError) as refused:
        chat(alice)
    assert refused.value.code == "busy"
    assert int(refused.value.response.headers["retry-after"]) >= 1
    chat(bob)  # though alice waits with two, and came first
    ended.append("bob")
    flood.join()
    assert ended.count("alice") == 3
    assert ended.index("bob") <= 1
    assert service.metric('pilotfish_refusals_total{reason="busy"', headers=bearer("bob")) >= 1


def test_sixteen_answers_to_one_request_take_turns_with_others(service: Serving) -> None:
    """Carol holds the lane until all sixteen wait, and each of them takes half a second or more."""
    alice, bob, carol = (service.client(KEYS[name]) for name in ("alice", "bob", "carol"))
    running = stream(carol)
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": LONG, "n": 16}
    with socket.create_connection(("127.0.0.1", service.port)) as sixteen:
        sixteen.sendall(request(body, "bob"))
        eventually(lambda: service.get("/health").json()["waiting"] == 16)
        with pytest.raises(openai.RateLimitError):
            chat(bob)  # it has more than its share
        running.close()
        for _ in range(3):
            chat(alice, max_tokens=5)
        left = service.get("/health").json()["waiting"]
        assert left >= 8, "each of alice's waited for one of bob's, or two"
        assert service.metric("pilotfish_num_requests_waiting", headers=bearer("bob")) >= 8
    eventually(lambda: free(service))


def test_all_places_taken_is_429_for_any_client(service: Serving) -> None:
    alice, bob = (service.client(KEYS[name]) for name in ("alice", "bob"))
    running = stream(alice)
    ended: list[str] = []
    floods = Flood(alice, "alice", ended), Flood(bob, "bob", ended)
    floods[0].add(2, 5)
    floods[1].add(2, 5)
    eventually(lambda: service.get("/health").json()["waiting"] == 4)
    with pytest.raises(openai.RateLimitError):
        chat(bob)
    running.close()
    for flood in floods:
        flood.join()
    assert sorted(ended) == ["alice", "alice", "bob", "bob"]


@pytest.mark.parametrize("streamed", [True, False])
def test_a_client_that_goes_away_frees_its_lane(service: Serving, streamed: bool) -> None:
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": ENDLESS,
        "stream": streamed,
    }
    with socket.create_connection(("127.0.0.1", service.port)) as raw:
        raw.sendall(request(body, "alice"))
        eventually(lambda: service.get("/health").json()["lanes"]["busy"] == 1)
    eventually(lambda: free(service), 10)
    assert chat(service.client(KEYS["bob"])).choices


def test_one_that_waits_and_goes_away_is_never_served(service: Serving) -> None:
    running = stream(service.client(KEYS["alice"]))
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": ENDLESS}
    with socket.create_connection(("127.0.0.1", service.port)) as raw:
        raw.sendall(request(body, "bob"))
        eventually(lambda: service.get("/health").json()["waiting"] == 1)
    eventually(lambda: service.get("/health").json()["waiting"] == 0)
    running.close()
    eventually(lambda: free(service), 10)


def request(body: dict[str, Any], name: str) -> bytes:
    content = json.dumps(body).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
        f"Authorization: Bearer {KEYS[name]}\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    return head.encode() + content


def test_a_client_that_does_not_read_loses_its_answer_not_the_lane(service: Serving) -> None:
    chat(service.client(KEYS["bob"]))
    before = service.resident_bytes()
    body = {
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": ENDLESS,
        "stream": True,
        "pilotfish": {"protocol": "local"},
    }
    with socket.socket() as raw:
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        raw.connect(("127.0.0.1", service.port))
        raw.sendall(request(body, "alice"))
        eventually(lambda: service.get("/health").json()["lanes"]["busy"] == 1)
        assert chat(service.client(KEYS["bob"])).choices  # once alice is dropped
    assert service.resident_bytes() - before < 32 * 2**20


def test_a_conversation_goes_on_where_its_tokens_are_held(pair: Pair, edge: EdgeServer) -> None:
    with serving(pair.draft, edge.endpoint, "--lanes", 3) as service:
        client = service.client()
        texts = [letter * 60 for letter in "abc"]
        for text in [*texts, *reversed(texts)]:
            chat(client, text)
        info = [line for line in service.lines if "shares" in line]
        shares = [int(line.rpartition("shares")[2].split()[0]) for line in info]
        assert all(share < 10 for share in shares[:3])
        assert all(share > 50 for share in shares[3:])


def test_sigterm_lets_running_answers_end_and_takes_no_new_ones(
    long_pair: Pair, endless_edge: EdgeServer
) -> None:
    flags = ("--lanes", 1, "--drain", 120)
    with serving(long_pair.draft, endless_edge.endpoint, *flags) as service:
        chunks = stream(service.client(), 4000)
        waiting: list[int] = []

        def wait() -> None:
            body = {"messages": [{"role": "user", "content": "x"}]}
            answer = web.post(f"{service.url}/v1/chat/completions", json=body, timeout=120)
            waiting.append(answer.status_code)

        thread = threading.Thread(target=wait)
        thread.start()
        eventually(lambda: service.get("/health").json()["waiting"] == 1)
        service.tell(signal.SIGTERM)
        thread.join(30)
        assert waiting == [503]
        # a connection that the closing listener had taken is reset
        with pytest.raises((httpx.ConnectError, httpx.ReadError)):
            eventually(lambda: service.get("/health") is None)
        assert list(chunks)[-1].choices[0].finish_reason == "length"
        assert service.process.wait(60) == 0


def test_what_does_not_end_in_time_is_told_so(long_pair: Pair, endless_edge: EdgeServer) -> None:
    with serving(
        long_pair.draft, endless_edge.endpoint, "--drain", 0.05, "--protocol", "stream"
    ) as service:
        chunks = stream(service.client())
        service.tell(signal.SIGTERM)
        with pytest.raises(openai.APIError) as info:
            content_of(chunks)
        assert info.value.code == "draining"
        assert service.process.wait(30) == 0


def test_a_lost_edge_is_waited_for_and_the_client_sees_that_it_is_not_forgotten(
    pair: Pair, tmp_path: Path
) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{unused.getsockname()[1]}"
    with serving(pair.draft, address) as service:
        assert service.get("/health").status_code == 503
        body = {"messages": [{"role": "user", "content": "x"}], "stream": True, "max_tokens": 5}
        began = time.monotonic()
        with web.stream(
            "POST", f"{service.url}/v1/chat/completions", json=body, timeout=60
        ) as answer:
            assert answer.status_code == 200
            lines = answer.iter_lines()
            first = [next(lines) for _ in range(4)]
            assert any(line.startswith(":") for line in first)
            assert time.monotonic() - began < 30
            with EdgeServer(pair.target, address, threads=1):
                assert list(lines)[-2] == "data: [DONE]"
                eventually(lambda: service.get("/health").status_code == 200)
    with serving(pair.draft, address, "--patience", 1) as service:
        with pytest.raises(openai.InternalServerError) as refused:
            chat(service.client())
        assert refused.value.status_code == 503
        assert refused.value.code == "edge_lost"


def test_a_lane_that_hangs_is_seen(pair: Pair, edge: EdgeServer) -> None:
    """The callback of a round never returns."""
    go_on = threading.Event()

    async def hang() -> tuple[list[int], list[int], list[int]]:
        lanes = Lanes([device], places=1)
        with lanes.admit("somebody") as job:
            lanes.submit(job, device.prompt([1, 2, 3]), Request(max_tokens=8), streamed=False)
            at_once = lanes.stuck(0.5)
            await asyncio.sleep(1.0)
            later = lanes.stuck(0.5)
            go_on.set()
            await job.ready(30)
            assert isinstance(job.take(), Generation)
        idle = lanes.stuck(0.0)
        assert await asyncio.to_thread(lanes.close, 30)
        return at_once, later, idle

    with Device(pair.draft, edge.endpoint, threads=1, on_round=lambda _: go_on.wait(30)) as device:
        assert asyncio.run(hang()) == ([], [0], [])


class CountingDevice(Device):
    """Counts its interruptions."""

    interruptions = 0

    def interrupt(self) -> None:
        self.interruptions += 1
        super().interrupt()


def test_a_lane_that_hangs_is_left_alone_once_the_lanes_are_closed(
    pair: Pair, edge: EdgeServer
) -> None:
    go_on = threading.Event()

    async def abandon() -> tuple[bool, int, int, int]:
        lanes = Lanes([device], places=1)
        with lanes.admit("somebody") as job:
            lanes.submit(job, device.prompt([1, 2, 3]), Request(max_tokens=8), streamed=False)
            await asyncio.sleep(0.3)
        before = device.interruptions
        ended = await asyncio.to_thread(lanes.close, 0.5)
        at_close = device.interruptions
        await asyncio.sleep(0.5)
        later = device.interruptions
        go_on.set()
        await asyncio.to_thread(lanes.lanes[0].join, 30)
        return ended, before, at_close, later

    with CountingDevice(
        pair.draft, edge.endpoint, threads=1, on_round=lambda _: go_on.wait(30)
    ) as device:
        ended, before, at_close, later = asyncio.run(abandon())
    assert not ended
    assert before < at_close  # while there is hope
    assert later == at_close


def test_an_answer_that_nobody_takes_is_given_up(long_pair: Pair) -> None:
    """So many pieces may wait for a client; a lane makes no more for it."""

    async def unread(device: Device) -> tuple[int, int]:
        lanes = Lanes([device], places=1)
        with lanes.admit("somebody") as job:
            request = Request(max_tokens=3 * BUFFERED, protocol="local")
            lanes.submit(job, device.prompt([1, 2, 3]), request, streamed=True)
            while not job.ended:
                assert await job.ready(30)  # and takes nothing
                await asyncio.sleep(0.01)
            waited = job.backlog - 1  # behind them is why
            for _ in range(waited):
                job.take()
            with pytest.raises(RefusalError, match="reads too slowly"):
                job.take()
        running = lanes.running
        assert await asyncio.to_thread(lanes.close, 30)
        return running, waited

    with Device(long_pair.draft, threads=1) as device:
        assert asyncio.run(unread(device)) == (0, BUFFERED + 1)


@pytest.mark.parametrize(("places", "retry_s"), [(1, 10.0), (8, 45.0), (200, 60.0)])
def test_how_soon_a_client_is_told_to_come_again(pair: Pair, places: int, retry_s: float) -> None:
    """5 s an answer at first, for all that wait; a minute at most, however many they are."""

    async def fill(device: Device) -> RefusalError:
        lanes = Lanes([device], places=places)
        with ExitStack() as held:
            for at in range(places + 1):
                held.enter_context(lanes.admit(f"client {at}"))
            with pytest.raises(RefusalError) as refused:
                held.enter_context(lanes.admit("one more"))
        assert await asyncio.to_thread(lanes.close, 30)
        return refused.value

    with Device(pair.draft, threads=1) as device:
        refused = asyncio.run(fill(device))
    assert (refused.status, refused.retry_s) == (429, retry_s)


def test_what_systemd_is_told(pair: Pair, edge: EdgeServer, tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(str(tmp_path / "notify"))
        systemd.settimeout(60)
        messages: list[str] = []

        def until(word: str) -> None:
            while not any(word in line for line in messages):
                messages.append(systemd.recv(4096).decode())

        environment = {"NOTIFY_SOCKET": str(tmp_path / "notify"), "WATCHDOG_USEC": "1000000"}
        with serving(pair.draft, edge.endpoint, "--lanes", 2, **environment) as service:
            until("READY=1")
            assert "0 of 2 lanes busy" in messages[-1]
            until("WATCHDOG=1")
            chat(service.client())
            messages.clear()
            until("last protocol: ")
            assert f"edge at {edge.endpoint}: connected" in messages[-1]
            messages.clear()
            service.tell(signal.SIGHUP)
            until("RELOADING=1")
            until("READY=1")
            service.tell(signal.SIGSTOP)
            time.sleep(0.5)
            systemd.setblocking(False)
            with suppress(BlockingIOError):
                while systemd.recv(4096):
                    pass
            time.sleep(1.5)
            with pytest.raises(BlockingIOError):
                systemd.recv(4096)  # no food: systemd would restart it
            systemd.setblocking(True)
            service.tell(signal.SIGCONT)
            messages.clear()
            service.tell(signal.SIGTERM)
            until("STOPPING=1")
