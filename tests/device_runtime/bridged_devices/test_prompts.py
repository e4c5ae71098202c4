"""Prompts of two vocabularies and templates."""

from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import PairMismatchError
from pilotfish.bridge import Pair, Prompt
from pilotfish.device_runtime.vocabulary_pairs import VocabularyPairs
from pilotfish.drafting.model_drafter import ModelDrafter
from pilotfish.engines.vocabulary import Vocabulary
from tests.bridge.test_drafter import THEIRS
from tests.device_runtime.bridged_devices.asking import (
    CONTEXT,
    GREEDY,
    TEXT,
    Models,
    change,
    opened,
    wanted_of,
)
from tests.device_runtime.test_link_loss import NOWHERE
from tests.support.bridged import vocabulary
from tests.support.relay import Relay
from tests.support.tiny import tiny_artifact


def test_a_prompt_of_this_device_knows_what_it_is(models: Models, server: EdgeServer) -> None:
    messages = [
        {"role": "system", "content": "abc"},
        {"role": "user", "content": "da"},
        {"role": "assistant", "content": "cab"},
        {"role": "user", "content": "d"},
    ]
    with opened(models, server.endpoint) as device:
        prompt = device.prompt(messages)
        assert isinstance(prompt, Prompt)
        assert device.tokenizer.decode(prompt.ids.tolist()) == "abcdaacabda"  # no "s", no "u"
        got = device.generate(prompt, **GREEDY)
        assert got.prompt_tokens == len(prompt.ids)
        assert got.tokens == wanted_of(device, messages, GREEDY)
        again = [*messages, {"role": "assistant", "content": got.text}]
        assert device.shared(device.prompt(again)) >= len(prompt) - 1


def test_a_target_with_the_same_tokens_has_its_own_template(models: Models, tmp_path: Path) -> None:
    """A base drafter does not know how to chat, and its target does."""
    tiny_artifact(tmp_path / "base", tokens=THEIRS, eos="<end of target>", context=CONTEXT)
    change(tmp_path / "base", chat_template=None)
    with (
        EdgeServer(models.target, threads=1) as edge,
        Device(tmp_path / "base", edge.endpoint, threads=1) as device,
    ):
        prompt = device.prompt(TEXT)
        assert device.template is not None
        text = device.template.render([{"role": "user", "content": TEXT}])
        assert prompt.ids.tolist() == device.tokenizer.encode(text, special=True)
        assert prompt.ids.tolist() != device.tokenizer.encode(TEXT)
        assert prompt.draft_ids is prompt.ids  # the bridge is trivial
        wanted = device.generate(TEXT, protocol="stream", max_tokens=40).tokens
        assert device.generate(TEXT, protocol="greedy", max_tokens=40).tokens == wanted


def test_a_prompt_that_was_made_for_another_drafter_is_read_anew(
    models: Models, server: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[list[int]] = []
    start = ModelDrafter.start

    def noted(self: ModelDrafter, prompt: Prompt, *others: Any, **more: Any) -> None:
        read.append(prompt.draft_ids.tolist())
        start(self, prompt, *others, **more)

    monkeypatch.setattr(ModelDrafter, "start", noted)
    with (
        opened(models, server.endpoint) as device,
        Device(models.target, server.endpoint, threads=1) as akin,
    ):
        ids = device.tokenizer.encode("abcd cabd", special=True)
        for wanted in (TEXT, ids):
            made, foreign = device.prompt(wanted), akin.prompt(wanted)
            assert made.vocabulary == foreign.vocabulary
            assert made.draft_ids.tolist() != foreign.draft_ids.tolist()
            device.generate(foreign, protocol="greedy", max_tokens=1)
            assert read[-1] == made.draft_ids.tolist()


def test_a_prompt_is_said_anew_in_another_template(
    models: Models, server: EdgeServer, tmp_path: Path
) -> None:
    tiny_artifact(tmp_path / "tuned", tokens=THEIRS, eos="<end of target>", context=CONTEXT)
    change(tmp_path / "tuned", chat_template="{{ messages[0].content }}abab")
    with (
        EdgeServer(tmp_path / "tuned", threads=1) as tuned,
        Device(models.target, server.endpoint, threads=1) as device,
    ):
        prompt = device.prompt(TEXT)
        device.redirect(tuned.endpoint)
        device.generate([1, 2], protocol="greedy", max_tokens=1)  # in which the edge is greeted
        got = device.generate(prompt, protocol="greedy", max_tokens=1)
        assert got.prompt_tokens == len(device.prompt(TEXT)) != len(prompt)


def test_the_first_prompt_is_said_in_the_template_of_an_edge_that_comes_late(
    models: Models, relay: Relay, server: EdgeServer, tmp_path: Path
) -> None:
    tiny_artifact(tmp_path / "base", tokens=THEIRS, eos="<end of target>", context=CONTEXT)
    change(tmp_path / "base", chat_template=None)
    relay.turn_to(NOWHERE)
    with Device(tmp_path / "base", relay.endpoint, threads=1, on_link_loss="wait") as device:
        coming = threading.Timer(0.2, relay.turn_to, [server.endpoint])
        coming.start()
        messages = [{"role": "user", "content": TEXT}]
        got = device.generate(messages, protocol="greedy", max_tokens=4)
        coming.join()
        assert got.prompt_tokens == len(device.prompt(messages))


def test_what_is_shared_with_a_prompt_of_another_vocabulary_is_nothing(
    models: Models, server: EdgeServer, other_server: EdgeServer
) -> None:
    with opened(models, server.endpoint) as device, opened(models, other_server.endpoint) as other:
        ids = [0, 1, 2]
        device.generate(ids, protocol="greedy", max_tokens=1)
        assert device.shared(device.prompt(ids)) == len(ids)
        assert device.shared(other.prompt(ids)) == 0


def test_a_vocabulary_with_nothing_in_common_is_looked_at_once(
    models: Models, strange_server: EdgeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded: list[str] = []
    decode = Vocabulary.decode

    def noted(data: bytes, model: str) -> Vocabulary:
        decoded.append(model)
        return decode(data, model)

    monkeypatch.setattr(Vocabulary, "decode", noted)
    with opened(models, strange_server.endpoint, "local") as device:
        for _ in range(3):
            assert device.generate(TEXT, protocol="greedy", max_tokens=2).tokens
        assert len(decoded) == 1
    with pytest.raises(PairMismatchError, match="cannot draft for"):
        opened(models, strange_server.endpoint)


def test_ever_new_vocabularies_do_not_fill_the_memory(
    models: Models, server: EdgeServer, monkeypatch: pytest.MonkeyPatch, empty_cache: Path
) -> None:
    ours = vocabulary(["a", "b"], "<end>")
    arriving = [vocabulary(["a", letter], "<end>") for letter in "cdefghij"]
    with opened(models, server.endpoint) as device:
        link, welcome = device._link, device.welcome
        assert link is not None
        assert welcome is not None
        vocabulary_pairs = VocabularyPairs(ours, None, {1: 0.01}, 1, 0.8, 64, None)
        pairs: list[weakref.ref[Pair]] = []
        for it in arriving:
            monkeypatch.setattr(
                "pilotfish.device_runtime.vocabulary_pairs.target_vocabulary", lambda *_, it=it: it
            )
            info = msgspec.structs.replace(
                welcome, vocabulary=it.digest, tokenizer=it.fingerprint, vocab_size=it.vocab_size
            )
            partner = vocabulary_pairs.get(link, info)
            assert vocabulary_pairs.get(link, info) is partner
            pairs.append(weakref.ref(partner.pair))
            del partner
        gc.collect()
        assert [pair() is not None for pair in pairs] == [False] * 5 + [True] * 3
