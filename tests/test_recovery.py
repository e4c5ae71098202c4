"""A connection that breaks in the middle of a generation changes nothing of the text."""

import pytest

from pilotfish import Device, EdgeServer
from tests.relay import Relay
from tests.tiny import tiny_artifact
from wire import keys

PROMPT = [1, 3, 2, 7]


@pytest.fixture(scope="module")
def artifacts(tmp_path_factory):
    folder = tmp_path_factory.mktemp("recovery")
    tiny_artifact(folder / "target", seed=1)
    tiny_artifact(folder / "draft", seed=2)
    keys.create(folder / "keys", keys.EDGE)
    keys.allow(folder / "keys", keys.create(folder / "keys", keys.DEVICE))
    return folder


@pytest.mark.parametrize("encrypted", [True, False], ids=["keys", "no-keys"])
@pytest.mark.parametrize(
    "options",
    [
        {"protocol": "greedy"},
        {"protocol": "dsd", "temperature": 1.0, "seed": 5},
        {"protocol": "stream", "temperature": 1.0, "seed": 5},
    ],
    ids=lambda options: options["protocol"],
)
def test_cut_connections_change_nothing(artifacts, encrypted, options):
    folder = artifacts / "keys" if encrypted else None
    with EdgeServer(artifacts / "target", keys=folder) as edge:
        relay = Relay(edge.endpoint)
        with Device(artifacts / "draft", relay.endpoint, folder) as device:
            wanted = device.generate(PROMPT, max_tokens=40, **options)
            pieces = device.stream(PROMPT, max_tokens=40, **options)
            for _ in range(3):
                next(pieces, None)  # after a cut, a stream brings all that was missed at once
                relay.cut()
            for _ in pieces:
                pass
            assert device.last.tokens == wanted.tokens
            assert relay.connections >= 2
        relay.close()
