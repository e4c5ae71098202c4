"""Distributions of any size: none is cut, and a window ends where its message is full."""

from __future__ import annotations

import numpy as np
import pytest

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.plan import plan
from pilotfish.speculation.distributions import Sampling
from pilotfish.wire.codecs import decode_sparse
from pilotfish.wire.codecs.sparse import MAX_TOKENS
from pilotfish.wire.protocols import PROTOCOL_REGISTRY, SamplingParams
from pilotfish.wire.request import Request
from tests.support.flat_drafter import FlatDrafter

VOCAB = 49_152
WHOLE = MAX_TOKENS // VOCAB  # distributions over the whole vocabulary that a message holds
NO_TEXT = np.empty(0, np.uint32)


def draft_of(protocol, sampling, expansion, seed=1):
    params = SamplingParams(sampling=sampling, seed=seed)
    exchange = PROTOCOL_REGISTRY[protocol]
    return exchange, FlatDrafter(VOCAB).draft(NO_TEXT, expansion, exchange, params, ())


@pytest.mark.parametrize("protocol", ["tslt", "tree", "adaptive"])
@pytest.mark.parametrize("top_k", [3_200, 32_000, VOCAB])
def test_k_is_what_was_asked_for_up_to_the_whole_vocabulary(protocol, top_k):
    sampling = Sampling(temperature=1.0, top_k=top_k)
    exchange, draft = draft_of(protocol, sampling, (1, 1))
    assert np.diff(draft.q.ends, prepend=0).tolist() == [top_k] * 2
    frames = exchange.encode_draft(draft, NO_TEXT, VOCAB)
    assert exchange.decode_draft(frames, VOCAB).q.ids.tolist() == draft.q.ids.tolist()
    assert len(decode_sparse(frames[-1], 2, VOCAB).ids) == 2 * top_k


@pytest.mark.parametrize(
    ("protocol", "expansion", "levels"),
    [("tslt", (1,) * 12, WHOLE), ("tree", (2, 2, 1), 2), ("dsd", (1,) * 12, 12)],
)
def test_a_window_ends_where_the_message_is_full_whatever_is_drawn(protocol, expansion, levels):
    for seed in (1, 2, 3):
        _, draft = draft_of(protocol, Sampling(temperature=1.0), expansion, seed)
        assert draft.depth == levels


def test_a_nucleus_is_sent_whole():
    sampling = Sampling(temperature=1.0, top_p=0.9)
    exchange, draft = draft_of("tslt", sampling, (1,) * 12)
    sizes = np.diff(draft.q.ends, prepend=0)
    assert min(sizes) > 2_048
    assert MAX_TOKENS - VOCAB < sizes.sum() <= MAX_TOKENS
    assert len(exchange.decode_draft(exchange.encode_draft(draft, NO_TEXT, VOCAB), VOCAB).ids)


@pytest.mark.parametrize(
    ("options", "most"),
    [
        ({"protocol": "tslt", "draft_top_k": 32_000, "window": 9}, 8),
        ({"protocol": "adaptive", "draft_top_k": 10**6, "window": 6}, WHOLE),
        ({"protocol": "tslt", "draft_top_k": 0, "window": 6}, WHOLE),
        ({"protocol": "tree", "draft_top_k": VOCAB, "expansion": (2, 2, 1)}, WHOLE),
    ],
)
def test_a_window_that_no_message_holds_is_refused(options, most):
    with pytest.raises(UnsupportedError, match=f"{most} of them fit"):
        plan(Request(temperature=1.0, **options)).expect_sendable(VOCAB)


@pytest.mark.parametrize(
    "options",
    [
        {"protocol": "tslt", "draft_top_k": 32_000, "window": 8},
        {"protocol": "tslt", "draft_top_k": VOCAB, "window": WHOLE},
        {"protocol": "tslt", "draft_top_k": VOCAB, "window": "auto"},
        {"protocol": "tslt", "draft_top_p": 0.95, "window": 128},
        {"protocol": "tslt", "draft_temperature": 0.0, "draft_top_k": 0, "window": 128},
        {"protocol": "tree", "draft_top_k": VOCAB, "expansion": (2, 1, 4)},
        {"protocol": "dsd", "window": 128},
        {"protocol": "stream"},
    ],
)
def test_a_window_that_may_fit_is_not_refused(options):
    plan(Request(temperature=1.0, **options)).expect_sendable(VOCAB)
