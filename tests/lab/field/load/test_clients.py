"""Services that fail in the middle of an answer, or send nonsense: the answer fails."""

from __future__ import annotations

import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.lab.field.load.service_client import ServiceClient
from tests.lab.field.load.answering import DONE, TOKEN, answering


def done(tokens: int) -> bytes:
    return DONE.replace(b": 2}", b": %d}" % tokens)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        (TOKEN + b'data: {"error": {"message": "no room"}}\n\n', "no room"),
        (TOKEN, "ended before"),
        (TOKEN + b"data: {broken\n\n", "no chat completion"),
        (TOKEN + b'data: {"choices": [{}]}\n\n', "no chat completion"),
        (TOKEN + b"data: []\n\n", "no chat completion"),
        (DONE, "no token"),
        (TOKEN * 50 + DONE, "more than the 2 tokens"),
        (TOKEN + done(9 * 10**18), "more than the 2 tokens"),
        (TOKEN + done(-5), "no chat completion"),
        (b"x" * 3_000_000, "a line that does not end"),
        (b"data: " + b"x" * 3_000_000, "a line that does not end"),
    ],
)
def test_an_answer_that_is_cut_or_faulty_has_failed(body: bytes, error: str) -> None:
    with answering(body) as url:
        client = ServiceClient(url, ["Why?"], 2)
        answer = client.ask(0, 0, 0.0)
        client.close()
    assert error in answer.error
    assert not answer.arrivals


def test_a_whole_answer_has_not() -> None:
    with answering(TOKEN + TOKEN + DONE) as url:
        client = ServiceClient(url, ["Why?"], 2)
        answer = client.ask(0, 0, 0.0)
        client.close()
    assert not answer.error
    assert answer.tokens == 2


def test_an_error_is_one_short_line():
    with answering(b"\x1b[31m\x07evil\n" * 1000, status=500) as url:
        client = ServiceClient(url, ["Why?"], 2)
        error = client.ask(0, 0, 0.0).error
    assert error.isprintable()
    assert len(error) < 400
    assert "500" in error
    assert "evil" in error


@pytest.mark.parametrize("url", ["http://h:99999", "http://[", "https://h", "h:80", "http://:80"])
def test_what_is_no_address(url):
    with pytest.raises(UnsupportedError, match="is not the address of a service"):
        ServiceClient(url, ["Why?"], 2)
