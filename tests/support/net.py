"""The records of `tests.system.test_net`: an answer's text and costs, over a real edge process."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import ExitStack
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from pilotfish import Device, EdgeServer, Generation
from pilotfish.engines.artifact import Artifact
from pilotfish.wire.protocols import PROTOCOL_REGISTRY
from tests.support.daemons import free_port, scrape
from tests.support.judging import random_head, saved
from tests.support.relay import Relay
from tests.support.tiny import tiny_artifact
from tests.support.wire_tap import Message, Tap
from tests.support.writing import PIECES

PROMPTS: dict[int, Any] = {1: [3, 1, 4, 1, 5], 2: [40, 3, 5], 3: "ab 12, nul", 4: [*range(50)] * 3}
TURNS = ("ab", "c 1", "true, ba")
SPLIT: dict[str, Any] = {"protocol": "dssd", "seed": 12, "max_tokens": 5, "temperature": 1.0}
DEVICES = {"plain": "_device", "across": "_across", "text": "_text"}  # attributes, by setup
# Messages that are no part of a round: greeting, vocabulary, link, end of a session.
ASIDE = {"hello", "welcome", "fetch", "part", "ping", "train", "pong", "cancel", "close"}


class Case(NamedTuple):
    """A request and its setup.

    setup: "plain"; "across": a drafter of another vocabulary; "text": the text drafter; "turns":
    the prompt is turn number ``prompt`` of a conversation; "after": an answer of `SPLIT` came
    before; "cut": connections break; "killed": the edge dies.
    """

    setup: str
    prompt: int
    options: dict[str, Any]

    @property
    def has_costs(self) -> bool:
        """Whether passes and bytes do not depend on time."""
        exchange = PROTOCOL_REGISTRY.get(self.options["protocol"])
        by_rounds = exchange is not None and not exchange.streams
        return by_rounds and self.setup not in ("cut", "killed")


class Net:
    """An edge with all that protocols need, and its devices; makes the records of ``cases``."""

    def __init__(self, folder: Path, cases: Mapping[str, Case]) -> None:
        self._cases = cases
        self._stack = ExitStack()
        self._folder = folder
        for name, sharpness in (("draft", 0.9), ("target", 0.7)):
            tiny_artifact(folder / name, tokens=PIECES, seed=1, sharpness=sharpness)
        manifests = (Artifact.open(folder / name).manifest for name in ("draft", "target"))
        head = saved(random_head(*manifests, link=None), folder / "head")
        self._metrics = free_port()
        self._flags = {"threads": 1, "head": head, "metrics": self._metrics, "sessions": 200}
        self._flags |= {"draft": folder / "draft", "rate": 1e6}
        self._edge = self._serve("tcp://127.0.0.1:0")
        self._tap = Tap(self._edge.endpoint)
        self._stack.callback(self._tap.close)

    def _serve(self, endpoint: str) -> EdgeServer:
        edge = EdgeServer(self._folder / "target", endpoint, **self._flags)
        return self._stack.enter_context(edge)

    def close(self) -> None:
        self._stack.close()

    def _open(self, draft: str | Path, endpoint: str, **options: Any) -> Device:
        device = Device(draft, endpoint, threads=1, **options)
        return self._stack.enter_context(device)

    @cached_property
    def _device(self) -> Device:
        return self._open(self._folder / "draft", self._tap.endpoint, lanes=2)

    @cached_property
    def _across(self) -> Device:
        """A drafter that shares single characters with the target, and not all of them."""
        ours = [piece for piece in PIECES if len(piece) == 1 and piece not in "tx5"]
        tiny_artifact(self._folder / "across", tokens=ours, eos="<other end>", seed=3)
        return self._open(self._folder / "across", self._tap.endpoint, lanes=2)

    @cached_property
    def _text(self) -> Device:
        return self._open("text", self._tap.endpoint, lanes=2, texts="off")

    def record(self, name: str) -> dict[str, Any]:
        """Make the record of a case."""
        case = self._cases[name]
        if case.setup == "killed":
            return self._killed[name]
        if case.setup == "cut":
            return self._record_cut(case)
        device: Device = getattr(self, DEVICES.get(case.setup, "_device"))
        with device.beside() as fresh:
            if case.setup == "turns":
                return self._record_turn(fresh, case)
            prompt = PROMPTS[case.prompt]
            if case.setup == "after":
                prompt = [*prompt, *fresh.generate(prompt, **SPLIT).tokens]
            return self._record(fresh, case, prompt)

    def _record(self, device: Device, case: Case, prompt: Any) -> dict[str, Any]:
        """Return the record of an answer, while no other runs."""
        before = scrape(self._metrics)
        self._tap.up.clear()
        self._tap.down.clear()
        answer = device.generate(prompt, **case.options)
        if not case.has_costs:
            return text_of(answer)
        after = scrape(self._metrics)
        costs = {
            name: int(after[sample] - before[sample])
            for name, sample in (("passes", "batch_sessions_count"), ("read", "pass_tokens_sum"))
        }
        return text_of(answer) | costs | costs_of(answer, self._tap.up, self._tap.down)

    def _record_turn(self, device: Device, case: Case) -> dict[str, Any]:
        """Return the record of a turn of a conversation, after the turns before it."""
        messages: list[dict[str, str]] = []
        record: dict[str, Any] = {}
        for words in TURNS[: case.prompt + 1]:
            messages.append({"role": "user", "content": words})
            record = self._record(device, case, messages)
            messages.append({"role": "assistant", "content": record["text"]})
        return record

    def _record_cut(self, case: Case) -> dict[str, Any]:
        """Return the record of an answer whose connection breaks twice."""
        relay = Relay(self._edge.endpoint)
        with Device(self._folder / "draft", relay.endpoint, threads=1) as device:
            with device.stream(PROMPTS[case.prompt], **case.options) as pieces:
                for _ in range(2):
                    next(pieces, None)
                    relay.cut()
                for _ in pieces:
                    pass
            relay.close()
            return text_of(pieces.generation)

    @cached_property
    def _killed(self) -> dict[str, dict[str, Any]]:
        """The records of answers that run when the edge dies and another comes."""
        names = [name for name, case in self._cases.items() if case.setup == "killed"]
        lanes = 1 + len(names)
        endpoint = self._edge.endpoint
        with ExitStack() as stack:
            first = self._open(self._folder / "draft", endpoint, lanes=lanes, on_link_loss="wait")
            answers = []
            for name in names:
                device, case = stack.enter_context(first.beside()), self._cases[name]
                answers.append(device.stream(PROMPTS[case.prompt], **case.options))
                stack.enter_context(answers[-1])
                next(answers[-1])
            os.kill(self._edge.pid, signal.SIGKILL)
            self._edge.stop()
            self._edge = self._serve(endpoint)
            for pieces in answers:
                for _ in pieces:
                    pass
            records = (text_of(pieces.generation) for pieces in answers)
            return dict(zip(names, records, strict=True))


def text_of(answer: Generation | None) -> dict[str, Any]:
    """Return the answer's tokens, its text, and why it ended."""
    assert answer is not None
    ids = " ".join(map(str, answer.tokens))
    return {"ids": ids, "text": answer.text, "finish": answer.finish_reason}


def costs_of(answer: Generation, up: list[Message], down: list[Message]) -> dict[str, Any]:
    """Return the bytes of `begin`, the number of messages, and of each round its costs.

    A round's are γ, nodes, accepted, bytes up and bytes down. The last are those of the messages
    that passed the tap, if each number of a header took one byte.
    """
    up, down = ([item for item in way if item.kind not in ASIDE] for way in (up, down))
    begins = [item.steady for item in up if item.kind == "begin"]
    sizes_up = [item.size for item in up if item.kind != "begin"]
    assert sum(sizes_up) == sum(each.uplink_bytes for each in answer.rounds)
    assert sum(item.size for item in down) == sum(each.downlink_bytes for each in answer.rounds)
    replies, rounds = iter(down), []
    for each in answer.rounds:
        size_down = sum(next(replies).steady for _ in range(each.exchanges))
        rounds.append([each.window, each.nodes, each.accepted, each.uplink_bytes, size_down])
    costs = {"begin": begins, "messages": [len(up), len(down)], "rounds": rounds}
    return costs | ({"forced": answer.forced} if answer.forced else {})
