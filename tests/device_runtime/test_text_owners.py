"""Texts are their owner's: nobody else drafts from them, pushes them out, or finds them on disk."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.service.access import ApiKeys, Client
from pilotfish.device_runtime.texts import text_folder as owners
from pilotfish.device_runtime.texts.text_memory import TextMemory
from pilotfish.device_runtime.texts.text_store import FileTextStore
from pilotfish.drafting.lookup import DEFAULT_OWNER, Owner, Recollection
from pilotfish.speculation.corpus import BREAK
from pilotfish.wire.protocols import LOCAL, STREAM, lossless, names
from tests.conftest import Pair
from tests.device_runtime.test_text_memory import TEXTS, holder, ids, kept_rows, written
from tests.support.plans import plan

SIZE = 100
SECRET = [1, 2, 3, 41, 42, 43, 44]
OWNERS: list[Owner] = ["alice", "bob", DEFAULT_OWNER, None]


def say(lane: Recollection, owner: Owner, text: list[int]) -> None:
    lane.start("words", SIZE, owner)
    lane.end(ids(*text))


def quoted(lane: Recollection, owner: Owner, begin: list[int], *, lossless: bool = True) -> int:
    """Return what the lane drafts behind these words for an owner; -1: nothing."""
    lane.start("words", SIZE, owner, lossless=lossless)
    lane.update(ids(*begin))
    echo = lane.predict([])
    return -1 if echo is None else echo.likeliest


@pytest.mark.parametrize("folder", [False, True])
def test_each_owner_is_quoted_its_own_words(tmp_path: Path, folder: bool) -> None:
    """In the same lane, in another, and nobody's words to nobody."""
    lane = Recollection(TextMemory(tmp_path if folder else None))
    other = lane.fork()
    for at, owner in enumerate(OWNERS):
        say(lane, owner, [5, 6, 50 + at])
    for each in (lane, other, lane):
        result = [quoted(each, owner, [9, 5, 6]) for owner in OWNERS]
        assert result == [50, 51, 52, -1]


@pytest.mark.parametrize("owner", OWNERS)
def test_shared_words_are_quoted_under_lossless_protocols_alone(owner: Owner) -> None:
    lane = Recollection(TextMemory(shared=True))
    say(lane, "alice", SECRET)
    ours = 41 if owner == "alice" else -1
    assert quoted(lane, owner, [9, 2, 3]) == 41
    assert quoted(lane, owner, [9, 2, 3], lossless=False) == ours
    if owner is not None:
        say(lane, owner, [2, 3, 60])
        assert quoted(lane, owner, [9, 2, 3], lossless=False) == 60


def test_which_protocols_are_lossy() -> None:
    lossy = {name for name in names() if not lossless(name)}
    assert lossy == {LOCAL, "adaptive", "wisv-full", "wisv-selective"}, (
        "Texts of other owners are drafted under lossless protocols alone. If it is intended that "
        "a new protocol is lossy, add its name here."
    )
    assert lossless(STREAM)
    assert not lossless("of another release")


def test_a_lane_forgets_the_conversation_of_its_last_owner() -> None:
    """Before the prompt of the next one is known, and though it begins alike."""
    lane = Recollection(TextMemory("off"))
    lane.start("words", SIZE, "alice")
    lane.update(ids(*SECRET, 2, 3))
    assert lane.predict([]) is not None
    lane.start("words", SIZE, "bob")
    assert lane.predict([]) is None
    assert quoted(lane, "bob", [1, 2, 3]) == -1


def test_what_repetitions_were_worth_is_told_of_the_owner_alone() -> None:
    lane = Recollection(TextMemory())

    def message_of(owner: str) -> float:
        quoted(lane, owner, [7, 8, 7, 8, 7, 8])
        echo = lane.predict([])
        assert echo is not None
        return lane.acceptance(echo)

    before = message_of("bob")
    say(lane, "alice", [])
    for end in range(2, 60):
        lane.update(np.tile(ids(1, 2), 30)[:end])
    assert message_of("carol") == before
    assert message_of("alice") > before


def test_what_could_not_be_kept_is_not_among_the_words_of_the_last_owner(tmp_path: Path) -> None:
    """Another device has the next one's file: nothing is searched, and nothing is kept."""
    lane = Recollection(TextMemory(tmp_path))
    say(lane, "alice", SECRET)
    say(lane, "bob", [4, 5])
    lane.release()
    path = owners.TextFolder(tmp_path).owner_path("words", "bob")
    other = FileTextStore(path, 1000, SIZE)
    again = Recollection(TextMemory(tmp_path))
    assert quoted(again, "alice", [9, 2, 3]) == 41
    with pytest.raises(UnsupportedError, match="Another device"):
        again.start("words", SIZE, "bob")
    again.update(ids(9, 2, 3))
    assert again.predict([]) is None
    again.end(ids(9, 2, 3, 77, 78))  # an answer ends, however it does
    other.close()
    assert quoted(again, "alice", [9, 77]) == -1
    again.release()


# Bounds


def test_who_says_much_pushes_out_nobody_else() -> None:
    memory = TextMemory(max_tokens=1000)
    lane = Recollection(memory)
    say(lane, "alice", SECRET)
    for at in range(200):
        say(lane, ("bob", "carol")[at % 2], [at % SIZE] * 50)
        held = [len(memory.texts("words", SIZE, owner)) for owner in ("alice", "bob", "carol")]
        assert sum(held) <= 1000
        assert held[0] == len(SECRET) + 1
    assert min(held) > 0
    assert quoted(lane, "alice", [9, 2, 3]) == 41


def test_owners_in_memory_are_bounded(tmp_path: Path) -> None:
    """On disk the texts of those that were longest away are found again."""
    opened = len(os.listdir("/proc/self/fd"))
    for folder, wanted in ((None, -1), (tmp_path, 41)):
        memory = TextMemory(folder, max_owners=4)
        lane = Recollection(memory)
        say(lane, "alice", SECRET)
        for at in range(9):
            say(lane, f"client {at}", [4, 5, 6])
        assert len(os.listdir("/proc/self/fd")) <= opened + 4
        assert quoted(lane, "alice", [9, 2, 3]) == wanted
        lane.release()
    assert len(os.listdir("/proc/self/fd")) == opened


@pytest.mark.parametrize("bound", ["files", "bytes"])
def test_files_of_owners_that_do_not_come_again_are_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    """The longest unused first; never one that a device has open, nor the user's own."""
    name, most = {"files": ("_MOST_FILES", 8), "bytes": ("_MOST_BYTES", 8 * 36)}[bound]
    monkeypatch.setattr(owners, name, most)
    folder = owners.TextFolder(tmp_path)
    say(Recollection(TextMemory(tmp_path)), DEFAULT_OWNER, SECRET)
    first = FileTextStore(folder.owner_path("words", "first"), 1000, SIZE)
    first.add(ids(*SECRET))
    os.utime(folder.owner_path("words", "first"), ns=(0, 0))
    (folder.owner_path("words", "x").with_name(".half.pilotfish-partial")).write_bytes(b"1" * 36)
    for at in range(20):
        lane = Recollection(TextMemory(tmp_path))
        for owner in ("often", f"client {at}"):
            say(lane, owner, [] if at and owner == "often" else SECRET)
        lane.release()
    left = sorted(path.name for path in (tmp_path / "owners").iterdir() if path.name != "secret")
    assert len(left) <= 9
    stay = ("first", "often", "client 19", "client 18")
    assert {folder.owner_path("words", owner).name for owner in stay} <= set(left)
    assert not [path for path in left if "partial" in path]
    assert [*tmp_path.glob("*.own.texts")]
    first.close()


def test_a_file_shrinks_with_what_is_in_memory(tmp_path: Path) -> None:
    memory = TextMemory(tmp_path, max_tokens=20_000)
    lane = Recollection(memory)
    path = owners.TextFolder(tmp_path).owner_path("words", "alice")
    for at in range(300):
        say(lane, "alice", [at % SIZE] * 99)
        say(lane, f"client {at % 9}", [at % SIZE] * 199)
        assert path.stat().st_size <= 8 * 8192 + 404
    lane.release()


# On disk


def test_whose_texts_they_are_is_not_on_disk(tmp_path: Path) -> None:
    """Files and folders are their user's alone; another folder has other names."""
    before = os.umask(0)
    try:
        for name in ("a", "b"):
            (tmp_path / name / "owners").mkdir(parents=True, mode=0o755)
            lane = Recollection(TextMemory(tmp_path / name))
            say(lane, "alice-0123456789", SECRET)
            lane.release()
    finally:
        os.umask(before)
    result = [sorted((tmp_path / name / "owners").iterdir()) for name in ("a", "b")]
    assert all(len(each) == 2 for each in result)
    assert {item.name for item in result[0]} & {item.name for item in result[1]} == {"secret"}
    for item in (*result[0], *result[1]):
        assert stat.S_IMODE(item.stat().st_mode) == 0o600
        assert stat.S_IMODE(item.parent.stat().st_mode) == 0o700
        assert b"alice" not in item.read_bytes()
        assert "alice" not in item.name


def test_texts_of_owners_come_back_while_the_folder_has_its_secret(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lane = Recollection(TextMemory(tmp_path))
    say(lane, "alice", SECRET)
    lane.release()
    for _ in range(2):
        lane = Recollection(TextMemory(tmp_path))
        assert quoted(lane, "alice", [9, 2, 3]) == 41
        assert quoted(lane, "bob", [9, 2, 3]) == -1
        lane.release()
    for damaged in (b"", b"short", b"long" * 32):
        (tmp_path / "owners" / "secret").write_bytes(damaged)
        lane = Recollection(TextMemory(tmp_path))
        assert quoted(lane, "alice", [9, 2, 3]) == -1
        lane.release()
        assert caplog.messages[-1].endswith("can no longer be used")


@pytest.mark.parametrize("name", ["owners", "owners/secret"])
def test_what_stands_in_the_place_of_owners_is_one_sentence(tmp_path: Path, name: str) -> None:
    memory = TextMemory(tmp_path)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).symlink_to(tmp_path / "elsewhere")
    opened = len(os.listdir("/proc/self/fd"))
    with pytest.raises(UnsupportedError, match=r"Texts cannot be kept in .*: name another folder"):
        memory.texts("words", SIZE, "alice")
    assert len(os.listdir("/proc/self/fd")) == opened
    assert not (tmp_path / "elsewhere").exists()


def test_texts_from_before_there_were_owners_are_quoted_to_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """They stay, are said once, and with sharing are everyone's under lossless protocols."""
    path = written(tmp_path)
    path.rename(path.with_name(path.name.replace(".own", "")))
    (old,) = tmp_path.glob("*.texts")
    before = old.read_bytes()
    caplog.set_level(logging.WARNING)
    lane = Recollection(TextMemory(tmp_path))
    for _ in range(2):
        assert [quoted(lane, owner, [6, 99]) for owner in OWNERS] == [-1] * 4
        say(lane, "alice", SECRET)
    lane.release()
    assert [line for line in caplog.messages if "without an owner" in line] == caplog.messages[:1]
    assert len(caplog.messages) == 1
    assert old.read_bytes() == before
    memory = TextMemory(tmp_path, shared=True)
    lane = Recollection(memory)
    for exact, wanted in ((True, 7), (False, -1)):
        result = {quoted(lane, owner, [6, 99], lossless=exact) for owner in OWNERS}
        assert result == {wanted}
    lane.release()
    assert len(caplog.messages) == 1


def test_what_was_said_unshared_is_not_shared_later(tmp_path: Path) -> None:
    """And what was said while texts were shared is its owner's, too, when they are not any more."""
    lane = Recollection(TextMemory(tmp_path))
    say(lane, "alice", SECRET)
    lane.release()
    lane = Recollection(TextMemory(tmp_path, shared=True))
    assert quoted(lane, "bob", [9, 2, 3]) == -1
    say(lane, "alice", [5, 6, 50])
    assert quoted(lane, "bob", [9, 5, 6]) == 50
    lane.release()
    lane = Recollection(TextMemory(tmp_path))
    assert quoted(lane, "bob", [9, 5, 6]) == -1
    assert quoted(lane, "alice", [9, 5, 6]) == 50
    lane.release()


def test_everyones_texts_are_bounded_as_an_owners_are(tmp_path: Path) -> None:
    memory = TextMemory(max_tokens=500, shared=True)
    lane = Recollection(memory)
    for at in range(60):
        say(lane, f"client {at % 5}", [at] * 50)
        shared = memory.shared_texts("words", SIZE)
        assert shared is not None
        assert len(shared) <= 500
    assert np.count_nonzero(shared.snapshot().ids == BREAK) >= 7


def test_another_process_may_have_other_owners(tmp_path: Path) -> None:
    written(tmp_path)
    with holder(tmp_path, "words") as process:  # has the user's own
        lane = Recollection(TextMemory(tmp_path))
        say(lane, "alice", SECRET)
        assert quoted(lane, "alice", [9, 2, 3]) == 41
        lane.release()
        process.kill()
        process.wait()
    memory = TextMemory(tmp_path)
    assert kept_rows(memory) == TEXTS
    memory.close()


# Keys


def test_a_name_that_is_given_to_another_key_is_another_owner(tmp_path: Path) -> None:
    """A key that is given another name is the same one."""

    def owner(line: str) -> Client:
        path = tmp_path / "api-keys"
        path.write_text(line + "\n")
        path.chmod(0o600)
        client = ApiKeys.load(path).client(f"Bearer {line.rpartition(':')[2]}")
        assert client is not None
        return client

    first, again = owner("bob:0123456789abcdef"), owner("bob:fedcba9876543210")
    assert first[0] == again[0] == "bob"
    assert first[1] != again[1]
    assert first.identity != again.identity
    assert owner("robert:0123456789abcdef")[1] == first[1]
    assert owner("0123456789abcdef")[1] == first[1]
    assert "0123456789abcdef" not in str(first[1])


# What else a lane holds


@pytest.mark.parametrize("draft", ["text", "model"])
def test_a_lane_holds_nothing_of_another_owners_prompt(long_pair: Pair, draft: str) -> None:
    """Neither end: else the time of an answer would tell. There is room for one session."""
    prompt = [1, 3, 2, 7, 5, 4]
    with (
        EdgeServer(long_pair.target, threads=1, sessions=1) as server,
        Device(
            "text" if draft == "text" else long_pair.draft, server.endpoint, threads=1
        ) as device,
        Device(long_pair.draft, server.endpoint, threads=1, share_texts=True) as shares,
    ):
        made = device.prompt(prompt)
        for protocol in ("greedy", "ahead", "stream", "greedy"):
            wish = {"protocol": protocol, "temperature": 0.0, "max_tokens": 20}
            texts = []
            for owner in ("alice", "bob", None, DEFAULT_OWNER, "alice"):
                assert device.shared(made, owner) == 0
                read = device._conversation.session.edge._id
                texts.append(tuple(device.generate(made, owner=owner, **wish).tokens))
                assert device._conversation.session.edge._id != read
                assert device.shared(made, owner) == len(prompt)
            assert len(set(texts)) == 1
            assert device.shared(made, "bob") == 0
            if draft == "model":  # what the drafter has read is dropped before it reads anew
                device._conversation.session.start(made, plan(**wish), owner="bob")
                assert device._drafter._shared_model.engine.model.length(device._drafter._slot) == 0
            device.generate(made, owner=DEFAULT_OWNER, **wish)
        device.close()
        for owner in ("alice", "bob"):
            shares.generate(prompt, protocol="greedy", owner=owner, temperature=0.0, max_tokens=5)
            assert shares.shared(shares.prompt(prompt), "carol") == len(prompt)
