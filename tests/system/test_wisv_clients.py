"""An ordinary OpenAI client at a service with a decision head: it states no temperature.

The service has the default flags of the paper's rule (`--lossy --policy threshold`) or names a
protocol. Between device and edge is an emulated link, whose RTT moves across 10 ms.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from pilotfish import EdgeServer
from pilotfish.emulation.emulator import Emulator
from tests.conftest import Pair
from tests.support.serving import Serving, serving
from tests.support.threshold_link import FAR_S, NEAR_S, TRIES, road

__all__ = ["road"]  # a fixture

FULL, SELECTIVE = "wisv-full", "wisv-selective"
QUESTION: Any = [{"role": "user", "content": "once upon"}]
WHOLE = {"window": 4, "threshold": 0.5}


@pytest.fixture(scope="module")
def headline(pair: Pair, road: Emulator) -> Iterator[Serving]:
    flags = ("--lanes", 1, "--lossy", "--policy", "threshold")
    with serving(pair.draft, road.endpoint, *flags) as started:
        yield started


def ask(client: openai.OpenAI, **extension: Any) -> tuple[str, dict[str, Any]]:
    """The answer's text, and what the service says of it; the client knows nothing of wisv."""
    answer = client.chat.completions.create(
        model="pilotfish", messages=QUESTION, max_tokens=12, extra_body={"pilotfish": extension}
    )
    text, figures = answer.choices[0].message.content, answer.model_extra["pilotfish"]
    assert text
    return text, figures


def test_a_far_edge_gets_all_states_after_one_ping_each(headline: Serving, road: Emulator) -> None:
    """A second ping follows only if the machine held up the first, so three of some have one."""
    road.set(rtt_s=FAR_S)
    client = headline.client()
    ask(client)  # the first request of a connection measures the rates, too
    pings = []
    for _ in range(TRIES):
        figures = ask(client)[1]
        assert figures["protocol"] == FULL
        assert "RTT above 10 ms" in figures["choice"]
        pings.append(figures["pings"])
        if pings.count(1) == 3:
            break
    assert pings.count(1) == 3
    assert min(pings) == 1


@pytest.mark.timing
def test_the_upload_follows_the_rtt_of_each_request(headline: Serving, road: Emulator) -> None:
    client = headline.client()
    for rtt_s, wanted in ((NEAR_S, SELECTIVE), (FAR_S, FULL), (NEAR_S, SELECTIVE), (FAR_S, FULL)):
        road.set(rtt_s=rtt_s)
        for _ in range(TRIES):
            _, figures = ask(client)
            measured = re.search(r"RTT ([\d.]+) ms", figures["choice"])
            assert measured is not None
            assert float(measured[1]) >= rtt_s * 1e3
            assert figures["pings"] >= 1
            if wanted == FULL or float(measured[1]) <= 10:
                break
        assert figures["protocol"] == wanted


def test_both_uploads_say_what_temperature_0_says(headline: Serving, road: Emulator) -> None:
    road.set(rtt_s=FAR_S)
    client = headline.client()
    texts = set()
    for extension in (
        WHOLE,
        {"protocol": FULL, **WHOLE},
        {"protocol": SELECTIVE, **WHOLE},
        {"lossy": True, "policy": "threshold", "rtt_threshold_s": 60, **WHOLE},
    ):
        text, figures = ask(client, **extension)
        texts.add(text)
        assert figures["protocol"] in (FULL, SELECTIVE)
    assert len(texts) == 1  # the tiny pair's head does not look at the link
    cold = client.chat.completions.create(
        model="pilotfish", messages=QUESTION, max_tokens=12, temperature=0,
        extra_body={"pilotfish": WHOLE},
    )  # fmt: skip
    assert texts == {cold.choices[0].message.content}


def test_other_routes_of_the_same_service(headline: Serving) -> None:
    client = headline.client()
    text = client.completions.create(model="pilotfish", prompt="once", max_tokens=4)
    assert text.model_extra["pilotfish"]["protocol"] in (FULL, SELECTIVE)
    response = client.responses.create(model="pilotfish", input="once", max_output_tokens=16)
    assert response.temperature == 0
    with client.chat.completions.create(
        model="pilotfish", messages=QUESTION, max_tokens=4, stream=True
    ) as chunks:
        assert [*chunks][-1].model_extra["pilotfish"]["protocol"] in (FULL, SELECTIVE)


def test_a_stated_temperature_above_0_is_refused(headline: Serving) -> None:
    with pytest.raises(openai.BadRequestError, match="work only at temperature 0") as refused:
        headline.client().chat.completions.create(
            model="pilotfish", messages=QUESTION, max_tokens=4, temperature=0.7
        )
    assert refused.value.status_code == 400


def test_another_protocol_has_its_own_default(headline: Serving) -> None:
    """`adaptive` refuses temperature 0, and `greedy` all others."""
    for name in ("adaptive", "greedy"):
        assert ask(headline.client(), protocol=name)[1]["protocol"] == name


@pytest.mark.parametrize("protocol", [FULL, SELECTIVE])
def test_a_service_that_names_a_protocol(pair: Pair, edge: EdgeServer, protocol: str) -> None:
    with serving(pair.draft, edge.endpoint, "--lanes", 1, "--protocol", protocol) as started:
        assert ask(started.client())[1]["protocol"] == protocol
        with pytest.raises(openai.BadRequestError, match=r"decodes at temperature 0, not 0\.7"):
            started.client().chat.completions.create(
                model="pilotfish", messages=QUESTION, max_tokens=4, temperature=0.7
            )


def test_the_temperature_that_the_service_names_stays(pair: Pair, edge: EdgeServer) -> None:
    with serving(pair.draft, edge.endpoint, "--lanes", 1, "--temperature", 0.6) as started:
        with pytest.raises(openai.BadRequestError, match=r"decodes at temperature 0, not 0\.6"):
            ask(started.client(), protocol=FULL)
        cold = started.client().chat.completions.create(
            model="pilotfish",
            messages=QUESTION,
            max_tokens=4,
            temperature=0,
            extra_body={"pilotfish": {"protocol": FULL}},
        )
        assert cold.model_extra["pilotfish"]["protocol"] == FULL
