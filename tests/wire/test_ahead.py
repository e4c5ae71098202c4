"""`DraftAhead` and `HintChain`: hints come late, twice, in another order, forged or not at all.

Each is compared with a naive reference, which keeps plain lists and hashes the whole text anew.
"""

from __future__ import annotations

from contextlib import suppress
from hashlib import blake2b

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.base.errors import PilotfishError
from pilotfish.wire.codecs.ids import decode_ids, encode_ids
from pilotfish.wire.committed_tokens import CommittedTokens
from pilotfish.wire.messages import MAX_WINDOW
from pilotfish.wire.protocols.ahead import DraftAhead, HintChain
from tests.support.examples import examples

VOCAB = 3  # few, so that what differs agrees again by chance
MOST = 6
tokens = st.lists(st.integers(0, VOCAB - 1), max_size=5)
prompts = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)


def digest(ids):
    return blake2b(np.array(ids, "<u4").tobytes(), digest_size=8).digest()


def frames(ids, odds=None):
    odds = [200 - at for at in range(len(ids))] if odds is None else odds
    return [bytes(encode_ids(np.array(ids, np.uint32), VOCAB)), bytes(odds)]


class NaiveDraftAhead:
    """What `DraftAhead` does, by lists."""

    def __init__(self, committed):
        self.committed, self.drafts = list(committed), []
        self.sent_length = len(committed)  # tokens that the other end has, if nothing got lost
        self.depth = 0

    def grow(self, token):
        self.drafts.append(token)

    def tell(self):
        self.sent_length, start = (
            len(self.committed + self.drafts),
            max(self.sent_length, len(self.committed)),
        )
        text = self.committed + self.drafts
        return start, digest(text[:start]), text[start:]

    def meet(self, ids):
        """Return depth, compared and agreed."""
        both = [draft == id for draft, id in zip(self.drafts, ids, strict=False)]
        agreed = both.index(False) if False in both else len(both)
        match = self.depth, agreed + (False in both), agreed
        self.committed += ids
        if False in both or len(both) < len(ids):
            self.drafts, self.sent_length = [], len(self.committed)
        else:
            self.drafts = self.drafts[len(ids) :]
        self.depth = 0 if False in both else self.depth + len(ids)
        return match


steps = st.one_of(
    st.tuples(st.just("grow"), st.integers(0, VOCAB - 1)),
    st.tuples(st.just("right"), st.integers(1, 4)),  # the target agrees with so many drafts
    st.tuples(st.just("meet"), st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=4)),
    st.tuples(st.just("tell"), st.none()),
    st.tuples(st.just("again"), st.none()),
)


@given(prompts, st.lists(steps, max_size=40))
@examples(400)
def test_the_lead_is_that_of_plain_lists(prompt, moves):
    prefix, naive = DraftAhead(), NaiveDraftAhead(prompt)
    prefix.start(np.array(prompt, np.uint32))
    margins = []
    for number, (move, what) in enumerate(moves):
        if move == "grow":
            prefix.append(what, 1.0 - number / 256, float(number))
            naive.grow(what)
            margins.append(float(number))
        elif move == "tell":
            start, before, info = prefix.encode_hint(VOCAB)
            assert (start, before, decode_ids(info[0], VOCAB).tolist()) == naive.tell()
            assert len(info[1]) == len(info[0]) // 2
        elif move == "again":
            prefix.resend_all()
            naive.sent_length = len(naive.committed)
        else:
            ids = what if move == "meet" else naive.drafts[:what] or [0]
            match, wanted = prefix.compare(ids), naive.meet(ids)
            assert (match.depth, match.compared, match.agreed) == wanted
            assert list(match.margins) == margins[: match.compared]
            margins = margins[len(ids) :] if naive.drafts else []
        assert prefix.text.ids.tolist() == naive.committed + naive.drafts
        assert prefix.text.hash == digest(naive.committed + naive.drafts)
        assert prefix.drafts.tolist() == naive.drafts
        assert len(prefix) == len(naive.drafts)
        assert prefix.committed == len(naive.committed)
        assert max(0, prefix.unsent) == len(naive.drafts) - max(
            0, min(naive.sent_length - len(naive.committed), len(naive.drafts))
        )


def test_a_lead_starts_anew_behind_another_text():
    draft_ahead = DraftAhead()
    for text in ([1, 2, 0], [1, 2], [1, 0, 0, 2], [2]):
        draft_ahead.start(np.array(text, np.uint32))
        draft_ahead.append(1, 0.5, 0.1)
        draft_ahead.append(1, 0.5, 0.1)
        assert draft_ahead.joint_acceptance == 0.25
        start, before, info = draft_ahead.encode_hint(VOCAB)
        assert (start, before) == (len(text), digest(text))
        assert info == frames([1, 1], [128, 128])
        assert draft_ahead.compare([1]).depth == 0
        assert draft_ahead.unsent == 0


class NaiveChain:
    """What `HintChain` does, by lists."""

    def __init__(self, committed, most):
        self.committed, self.ids, self.odds, self.most = list(committed), [], [], most

    def add(self, start, before, ids, odds):
        text, length = self.committed + self.ids, len(self.committed)
        end = start + len(ids)
        if start > len(text) or before != digest(text[:start]) or end <= length or not ids:
            return False
        if self.committed[start:] != ids[: max(0, length - start)]:
            return False
        if text[start:end] != ids:  # else there is nothing new in it
            old = [1.0] * length + self.odds
            self.ids = (text[:start] + ids)[length:][: self.most]
            self.odds = (old[:start] + odds)[length:][: self.most]
        return True

    def meet(self, ids):
        agrees = self.ids[: len(ids)] == ids
        self.ids = self.ids[len(ids) :] if agrees else []
        self.odds = self.odds[len(ids) :] if agrees else []
        self.committed += ids


@st.composite
def attempts(draw):
    """Make hints behind arbitrary parts of the text, forged ones among them, and commits."""
    return draw(
        st.one_of(
            st.tuples(st.just("add"), st.integers(-4, 8), tokens, st.sampled_from("rrrrf")),
            st.tuples(st.just("meet"), st.integers(0, 3), tokens, st.just("")),
        )
    )


@given(prompts, st.lists(attempts(), max_size=25))
@examples(200)
def test_the_chain_is_that_of_plain_lists(prompt, moves):
    committed = CommittedTokens()
    committed.extend(prompt)
    chain, naive = HintChain(committed, MOST), NaiveChain(prompt, MOST)
    for move, at, ids, how in moves:
        if move == "meet":
            ids = (naive.ids[:at] + ids)[:4] or [0]
            committed.extend(ids)
            chain.drop_committed(ids)
            naive.meet(ids)
        else:
            text = naive.committed + naive.ids
            start = max(0, len(naive.committed) + at)
            before = digest(text[:start]) if how == "r" else digest([*text[:start], 1])
            odds = [255 - index for index in range(len(ids))]
            selection = chain.add(start, before, frames(ids, odds), VOCAB)
            assert selection == naive.add(start, before, ids, [byte / 255 for byte in odds])
        assert chain.ids == naive.ids
        assert chain.acceptances == pytest.approx(naive.odds)
        assert len(chain.ids) == len(chain.acceptances) <= MOST


@given(prompts, st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20), st.data())
@examples(300)
def test_whatever_arrives_in_order_is_what_the_device_has_drafted(prompt, target, data):
    """A device and an edge with the same committed tokens: each hint that was sent has arrived."""
    prefix, committed = DraftAhead(), CommittedTokens()
    committed.extend(prompt)
    prefix.start(committed.ids)
    chain = HintChain(committed, MAX_WINDOW)
    at = 0
    while at < len(target):
        for _ in range(data.draw(st.integers(0, 3))):
            prefix.append(data.draw(st.integers(0, VOCAB - 1)), 0.5, 0.0)
        if prefix.unsent > 0:
            assert chain.add(*prefix.encode_hint(VOCAB), VOCAB)
        assert chain.ids == prefix.drafts.tolist()
        ids = target[at : at + data.draw(st.integers(1, 3))]
        at += len(ids)
        committed.extend(ids)
        chain.drop_committed(ids)
        prefix.compare(ids)
        assert chain.ids == prefix.drafts.tolist()


def test_a_hint_that_was_lost_is_made_good_by_telling_again():
    prefix, committed = DraftAhead(), CommittedTokens()
    committed.extend([1, 2])
    prefix.start(committed.ids)
    chain = HintChain(committed, MOST)
    prefix.append(0, 1.0, 0.0)
    prefix.encode_hint(VOCAB)  # lost
    prefix.append(1, 1.0, 0.0)
    assert not chain.add(*prefix.encode_hint(VOCAB), VOCAB)
    assert chain.ids == []
    prefix.resend_all()
    assert chain.add(*prefix.encode_hint(VOCAB), VOCAB)
    assert chain.ids == [0, 1]


MALFORMED = {
    "no frames": [],
    "no odds": frames([1, 2])[:1],
    "three frames": [*frames([1, 2]), b""],
    "too few odds": [frames([1, 2])[0], b"\x01"],
    "too many odds": [frames([1, 2])[0], b"\x01\x02\x03"],
    "odds alone": [b"", b"\x01"],
    "half an id": [b"\x01\x00\x02", b"\x01"],
    "an id beyond the vocabulary": [b"\x01\x00\x03\x00", b"\x01\x01"],
    "10,000 ids": [b"\x01\x00" * 10_000, b"\xff" * 10_000],
}


@pytest.mark.parametrize("spoilt", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_malformed_hint_changes_nothing(spoilt):
    committed = CommittedTokens()
    committed.extend([1, 2])
    chain = HintChain(committed, MOST)
    assert chain.add(2, committed.hash, frames([0, 0]), VOCAB)
    with pytest.raises(PilotfishError):
        chain.add(2, committed.hash, spoilt, VOCAB)
    assert chain.ids == [0, 0]


@given(st.integers(0, 2**31 - 1), st.binary(min_size=8, max_size=8), st.binary(max_size=600))
@examples(200)
def test_any_bytes_are_dropped_or_refused(start, before, raw):
    committed = CommittedTokens()
    committed.extend([1, 2, 1])
    chain = HintChain(committed, MOST)
    for both in ([raw, bytes(len(raw) // 2)], [raw, raw]):
        with suppress(PilotfishError):
            assert not chain.add(start, before, both, VOCAB)
        assert chain.ids == chain.acceptances == []


@pytest.mark.parametrize("most", [0, 1, 64, 128, 10**6])
def test_the_chain_keeps_no_more_than_it_may(most):
    committed = CommittedTokens()
    committed.extend([1])
    chain = HintChain(committed, most)
    bound = min(most, MAX_WINDOW)
    for _ in range(5):
        start = 1 + len(chain.ids)
        before = committed.hash_after(chain.ids)
        chain.add(start, before, frames([2] * MAX_WINDOW, [255] * MAX_WINDOW), VOCAB)
        assert len(chain.ids) == len(chain.acceptances) == bound
