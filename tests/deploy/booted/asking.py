"""What is asked of a booted machine: OpenAI's client, and a stream in which something happens."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import openai

from tests.deploy.booted.conftest import API_KEY
from tests.deploy.booted.machine import Machine
from tests.support import web

LONG = 7500  # tokens that take longer than whatever is done meanwhile
AFTERWARDS = 100  # pieces that are read when it has been done
_BASE = "http://127.0.0.1:8080"


@dataclass(frozen=True)
class Answer:
    """What was read of a streamed text, and of how many tokens it is."""

    text: str
    tokens: int


def client(line: str = API_KEY) -> openai.OpenAI:
    """The real client with a line of the key file; for use on the machine's network."""
    key = line.partition(":")[2]
    return openai.OpenAI(base_url=f"{_BASE}/v1", api_key=key, max_retries=0, timeout=120)


def complete(machine: Machine, *, seed: int = 7, tokens: int = 50) -> str:
    """The text of one completion, unstreamed."""

    def ask() -> str:
        with client() as opened:
            answer = opened.completions.create(
                model="pilotfish", prompt="abc", seed=seed, max_tokens=tokens
            )
        return answer.choices[0].text

    return machine.on_network(ask)


def stream(machine: Machine, on_wait: Callable[[], object], *, seed: int) -> Answer:
    """A long streamed completion: from its tenth piece on ``meanwhile`` is done, beside it.

    What comes after that is read a while longer, then the client has enough.
    """

    def ask() -> Answer:
        pieces: list[str] = []
        tokens, enough = 0, LONG
        with client() as opened, machine.thread() as neighbour:
            with opened.completions.create(
                model="pilotfish", prompt="abc", seed=seed, max_tokens=LONG, stream=True
            ) as chunks:
                for choice in (choice for chunk in chunks for choice in chunk.choices):
                    pieces.append(choice.text)
                    tokens += (choice.model_extra or {}).get("pilotfish", {}).get("tokens", 0)
                    if len(pieces) == 10:
                        interfering = neighbour.submit(on_wait)
                    if len(pieces) > 10 and enough == LONG and interfering.done():
                        enough = len(pieces) + AFTERWARDS
                    if len(pieces) >= enough:
                        break
                else:
                    raise AssertionError("the answer ended before all was done")
            interfering.result()
        return Answer("".join(pieces), tokens)

    return machine.on_network(ask)


def is_undisturbed(machine: Machine, answer: Answer, *, seed: int) -> bool:
    """Whether a stream that was left says what the same completion says when nothing happens.

    Of a character whose last bytes are yet to come a stream shows nothing, an end all of them.
    """
    text = complete(machine, seed=seed, tokens=answer.tokens)
    return text.startswith(answer.text) and len(text) - len(answer.text) <= 3


def link_losses(machine: Machine) -> int:
    """How often the device has lost its edge since it started."""
    metrics = machine.on_network(lambda: get("/metrics").raise_for_status().text)
    match = re.search(r"^pilotfish_link_losses_total (\S+)$", metrics, re.MULTILINE)
    assert match is not None, metrics
    return int(float(match[1]))


def get(path: str, line: str = API_KEY) -> httpx.Response:
    """One plain request with a line of the key file; on the machine's network."""
    key = {"Authorization": f"Bearer {line.partition(':')[2]}"}
    return web.get(f"{_BASE}{path}", headers=key, timeout=60)
