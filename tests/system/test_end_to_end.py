"""The main job with real weights: a drafter here, a real edge process, CURVE between them."""

from functools import cache
from itertools import product

import numpy as np
import pytest

from pilotfish import Device, EdgeServer, PilotfishError
from pilotfish.cli.summary import report, summary
from pilotfish.device_runtime.record import STAGES
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.wire import keys
from tests.support.prefill import prefill
from tests.support.thinned import thinned

PROMPTS = ("Why is the sky blue?", "Write a Python function that adds two numbers.")
WINDOWS = (1, 4, 8, 16)
TOKENS = 16
TIE = 1e-3  # passes of different shape differ by about 1e-5 in their logits


@pytest.fixture(scope="module")
def device(default_artifacts, tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    keys.create(folder, keys.EDGE)
    keys.allow(folder, keys.create(folder, keys.DEVICE))
    draft, target = default_artifacts
    with EdgeServer(target, keys=folder) as edge, Device(draft, edge.endpoint, folder) as opened:
        yield opened


def assert_same(device, target, prompt, got, wanted):
    """Equal token for token, or parted at a tie of the target's logits, which is then shown."""
    if got == wanted:
        return
    at = next(i for i, (a, b) in enumerate(zip(got, wanted, strict=False)) if a != b)
    tokens = np.concatenate([device.prompt(prompt).ids, np.array(wanted[:at], dtype=np.uint32)])
    decoder = Decoder(target)
    logits = prefill(decoder, 0, tokens.astype(np.int64), rows=1).logits[0]
    gap = abs(float(logits[got[at]]) - float(logits[wanted[at]]))
    assert gap < TIE, f"token {at}: {got[at]} for {wanted[at]}, {gap} apart in their logits"


@pytest.fixture(scope="module")
def streamed(device):
    """What the target says to a prompt."""

    @cache
    def tokens(prompt, count):
        return device.generate(prompt, protocol="stream", max_tokens=count).tokens

    return tokens


# `make test` looks at two windows of a short answer.
@pytest.mark.parametrize(
    ("prompt", "window", "count"),
    thinned([*product(PROMPTS, WINDOWS, (TOKENS, 40))], [*product(PROMPTS[:1], (1, 4), (TOKENS,))]),
)
def test_greedy_over_the_link_is_the_targets_own_output(
    device, default_artifacts, streamed, prompt, window, count
):
    wanted = streamed(prompt, count)
    got = device.generate(prompt, protocol="greedy", window=window, max_tokens=count)
    assert_same(device, default_artifacts[1], prompt, got.tokens, wanted)
    assert max(r.window for r in got.rounds) == min(window, count - 1)
    assert len(got.rounds) < len(got.tokens)


def test_stream_is_what_the_target_says_without_a_link(device, default_artifacts):
    got = device.generate(PROMPTS[0], protocol="stream", max_tokens=12)
    decoder = Decoder(default_artifacts[1])
    ids = device.prompt(PROMPTS[0]).ids.astype(np.int64)
    logits = prefill(decoder, 0, ids, rows=1).logits[0]
    wanted = []
    for _ in range(12):
        wanted.append(int(logits.argmax()))
        logits = decoder.forward([Pass(slot=0, tokens=np.array(wanted[-1:]), rows=1)])[0].logits[0]
    assert_same(device, default_artifacts[1], PROMPTS[0], got.tokens, wanted)


def test_local_is_what_the_drafter_says(device, default_artifacts):
    over = device.generate(PROMPTS[0], protocol="local", max_tokens=12)
    with Device(default_artifacts[0]) as alone:
        assert alone.generate(PROMPTS[0], protocol="local", max_tokens=12).tokens == over.tokens
        with pytest.raises(PilotfishError, match="no edge"):
            alone.generate(PROMPTS[0], protocol="greedy", max_tokens=4)


def test_pieces_join_to_the_text_and_tell_where_they_come_from(device):
    pieces = list(device.stream(PROMPTS[1], protocol="greedy", window=4, max_tokens=TOKENS))
    answer = device.last
    assert "".join(piece.text for piece in pieces) == answer.text
    assert [token for piece in pieces for token in piece.tokens] == answer.tokens
    accepted = sum(len(p.tokens) for p in pieces if p.origin == "drafted")
    assert accepted == sum(r.accepted for r in answer.rounds) > 0
    assert {p.origin for p in pieces} <= {"drafted", "corrected", "bonus"}
    assert device.tokenizer.decode(answer.tokens) == answer.text


def test_records_count_bytes_and_time(device):
    answer = device.generate(
        PROMPTS[0], protocol="dsd", window=3, max_tokens=12, temperature=1.0, seed=1
    )
    vocab = device.tokenizer.vocab_size
    for record in answer.rounds:
        arrays = record.window * (2 + 2 * vocab)  # ids, and probabilities in fp16
        # a large message over a link of unknown rate goes in chunks, with a header each
        assert arrays < record.uplink_bytes <= 1.01 * arrays + 64
        assert 0 < record.downlink_bytes <= 80
        stages = [getattr(record.timings, stage) for stage in STAGES]
        assert all(seconds >= 0 for seconds in stages)
        assert record.timings.verify > 0
        assert record.timings.total == pytest.approx(sum(stages))
    spent = sum(record.timings.total for record in answer.rounds)
    assert spent <= answer.total_s
    figures = summary(answer)
    assert figures["tokens"] == 12
    assert len(report([figures]).columns) == 2


def test_one_session_goes_on_without_sending_its_past_again(device):
    ids = [int(i) for i in device.prompt(PROMPTS[0]).ids]
    first = device.generate(ids, protocol="greedy", max_tokens=8, window=4)
    longer = [*ids, *first.tokens, *device.tokenizer.encode(" And at night?")]
    warm = device.generate(longer, protocol="greedy", max_tokens=8, window=4)
    device.generate([5, 6, 7], protocol="greedy", max_tokens=2)  # nothing in common
    cold = device.generate(longer, protocol="greedy", max_tokens=8, window=4)
    assert warm.tokens == cold.tokens


def test_ids_are_taken_as_they_are(device):
    answer = device.generate([504, 6330, 314], max_tokens=4, protocol="stream")
    assert answer.prompt_tokens == 3


@pytest.mark.parametrize("protocol", thinned(["greedy", "stream", "local"], ["greedy"]))
def test_stop_strings_and_limits(device, protocol):
    whole = device.generate(PROMPTS[0], protocol=protocol, max_tokens=30, window=8)
    assert len(whole.tokens) == 30
    assert whole.finish_reason == "length"
    stop = whole.text[20:26]
    cut = device.generate(PROMPTS[0], protocol=protocol, max_tokens=30, window=8, stop=[stop, "ÿ"])
    assert cut.text == whole.text[: whole.text.index(stop)]
    assert cut.finish_reason == "stop"
    assert cut.tokens == whole.tokens[: len(cut.tokens)]


def test_the_answer_ends_at_the_end_token(device):
    answer = device.generate(
        "Reply with one word: yes.", protocol="greedy", max_tokens=120, window=8
    )
    stream = device.generate("Reply with one word: yes.", max_tokens=120, protocol="stream")
    assert answer.finish_reason == "stop"
    assert answer.tokens == stream.tokens
    assert device.tokenizer.is_special(answer.tokens[-1])
    assert "<|im_end|>" not in answer.text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"protocol": "telepathy"}, "telepathy"),
        ({"protocol": "greedy", "temperature": 1.0}, "use coupled"),
        ({"window": 1000}, "window"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1.0, "protocol": "dsd"}, "temperature"),
        ({"seed": -1}, "seed"),
    ],
)
def test_senseless_options_are_refused_in_words(device, options, words):
    with pytest.raises(PilotfishError, match=words):
        device.generate(PROMPTS[0], **options)


@pytest.mark.parametrize("prompt", [[], [10**9], [-1], [True, "x"]])
def test_senseless_prompts_are_refused(device, prompt):
    with pytest.raises(PilotfishError):
        device.generate(prompt, protocol="greedy")
    assert device.generate([504], protocol="greedy", max_tokens=2).tokens
