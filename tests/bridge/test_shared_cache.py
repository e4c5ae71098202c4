"""How the tokens that two vocabularies share are kept on disk."""

import hashlib
import os
from pathlib import Path

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pilotfish.bridge import shared as module
from pilotfish.bridge.shared import SharedTokens
from pilotfish.engines.vocabulary import Vocabulary
from tests.bridge.test_shared import cache, pairs, vocabulary

__all__ = ["cache"]


def a_pair() -> tuple[Vocabulary, Vocabulary]:
    """Three tokens in common, the last one special."""
    drafter = vocabulary(["a", "b", "c"], special=("<e>",), ends=("<e>",))
    target = vocabulary(["x", "c", "y", "a"], special=("<z>", "<e>"), ends=("<e>",))
    return drafter, target


COMMON = {1: 2, 3: 0, 5: 3}


def test_a_pair_is_found_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, target = a_pair()
    assert pairs(SharedTokens.find(drafter, target)) == COMMON
    [file] = cache.iterdir()
    assert drafter.digest in file.name
    assert target.digest in file.name
    monkeypatch.setattr(module, "_find", None)  # neither tokenizer is gone through again
    selection = SharedTokens.find(*a_pair())
    assert pairs(selection) == COMMON
    assert selection.specials == {5: 3}
    assert (selection.draft_size, selection.target_size) == (4, 6)
    assert selection.draft_ids.dtype == selection.target.dtype == np.int64


def rewritten(data: bytes, **changes: object) -> bytes:
    """The file with other fields, and a checksum that is right."""
    file = msgspec.msgpack.decode(data[32:], type=module._StoredPair)
    content = msgspec.msgpack.encode(msgspec.structs.replace(file, **changes))
    return hashlib.sha256(content).digest() + content


def ids(*values: int) -> bytes:
    return np.array(values, "<i4").tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"rule": 0},
        {"drafter": "0" * 64},
        {"target": "0" * 64},
        {"target_ids": ids(1, 3)},
        {"target_ids": b"", "own_ids": b""},
        {"target_ids": ids(1, 3, 5) + b"\0"},
        {"target_ids": ids(3, 1, 5)},
        {"target_ids": ids(1, 1, 5)},
        {"target_ids": ids(-1, 3, 5)},
        {"target_ids": ids(1, 5, 6)},
        {"own_ids": ids(2, 0, 4)},
        {"own_ids": ids(-1, 0, 3)},
        {"own_ids": ids(2, 2, 3)},
        {"specials": {5: 2}},
        {"specials": {0: -1}},
        {"specials": {6: 3}},
        {"specials": {-1: 3}},
        {"specials": {5: 2**63}},
    ],
)
def test_a_file_that_says_what_cannot_be_is_made_anew(
    cache: Path, changes: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    SharedTokens.find(*a_pair())
    [file] = cache.iterdir()
    good = file.read_bytes()
    file.write_bytes(rewritten(good, **changes))
    assert pairs(SharedTokens.find(*a_pair())) == COMMON
    assert "is not used" in caplog.text
    assert file.read_bytes() == good


@given(st.data())
def test_a_damaged_file_is_made_anew(data: st.DataObject) -> None:
    drafter, target = a_pair()
    SharedTokens.find(drafter, target)
    [file] = Path(os.environ["PILOTFISH_CACHE"], "bridges").iterdir()
    good = file.read_bytes()
    at = data.draw(st.integers(0, len(good) - 1))
    spoilt = data.draw(
        st.sampled_from(
            [good[:at], good + b"\0", good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :]]
        )
    )
    file.write_bytes(spoilt)
    assert pairs(SharedTokens.find(drafter, target)) == COMMON
    assert file.read_bytes() == good


@pytest.mark.parametrize("in_the_way", ["a file", "a folder", "a pipe"])
def test_without_a_cache_it_works_too(
    cache: Path, in_the_way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    drafter, target = a_pair()
    if in_the_way == "a file":
        cache.write_text("this is no folder")
    else:
        cache.mkdir()
        path = cache / f"{drafter.digest}-{target.digest}{module.SUFFIX}"
        path.mkdir() if in_the_way == "a folder" else os.mkfifo(path)
    for _ in range(2):
        assert pairs(SharedTokens.find(drafter, target)) == COMMON


def test_the_cache_does_not_grow_for_ever(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_FILES", 3)
    for other in range(5):
        SharedTokens.find(vocabulary(["a", f"{other}"]), vocabulary(["a"]))
        assert len(list(cache.iterdir())) == min(other + 1, 3)
    # the last ones stay
    monkeypatch.setattr(module, "_find", None)
    SharedTokens.find(vocabulary(["a", "4"]), vocabulary(["a"]))


def test_a_vocabulary_that_came_over_the_wire_is_the_same_pair(cache: Path) -> None:
    drafter, target = a_pair()
    SharedTokens.find(drafter, target)
    SharedTokens.find(drafter, Vocabulary.decode(target.encode(), target.model))
    assert len(list(cache.iterdir())) == 1
