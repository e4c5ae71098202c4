"""What a window's options cost a real edge: no more behind a long text than behind a short one."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from pilotfish.wire import messages as m
from tests.support.daemons import Daemon, running
from tests.support.hostile import RawClient, RawSession, cpu_s
from tests.support.tiny import tiny_artifact

VOCAB, TEXT, WINDOW, ROUNDS = 32_768, 16_000, 64, 20
# of a window: three times its share, by V, of the 20 ms that it may take at V = 151,665
MOST_S = 3 * 0.020 * VOCAB / 151_665


@pytest.fixture(scope="module")
def edge(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    folder = tmp_path_factory.mktemp("options")
    tiny_artifact(folder, vocab=VOCAB, context=TEXT + 8192, layers=1, hidden=16, intermediate=16)
    with running("--target", folder, "--threads", 1, "--context", TEXT + 8192) as daemon:
        yield daemon


def spent_s(edge: Daemon, client: RawClient, session: RawSession, ids: list[int]) -> float:
    """CPU time of a window, on average."""
    before_s = cpu_s(edge.pid)
    session.go_on(client, ROUNDS, ids)
    return (cpu_s(edge.pid) - before_s) / ROUNDS


def test_options_behind_a_long_text_cost_what_a_row_costs(edge: Daemon) -> None:
    random = np.random.default_rng(0)
    text = random.permutation(VOCAB)[:TEXT].tolist()
    ids = random.integers(0, VOCAB, WINDOW).tolist()
    shape = m.LogitsOptionsMsg(
        since=0,
        logit_bias=[(token, 1.0) for token in range(512)],
        repetition_penalty=1.1,
        frequency_penalty=0.5,
        presence_penalty=0.5,
    )
    with RawClient(edge.endpoint) as client:
        session = RawSession()
        client.send(*session.begin(text))
        session.go_on(client, 1, ids)
        plain_s = spent_s(edge, client, session, ids)
        options = {"keep": TEXT, "hash": session.committed.hash_at(TEXT), "logprobs": 20}
        frames = session.begin(text, shape=shape, **options)
        client.send(frames[0], b"")
        session.go_on(client, 1, ids)
        assert spent_s(edge, client, session, ids) - plain_s < MOST_S
