"""Where windows end: at an end token, in a stop string, before the last token, at a full context.

Every drafting protocol, on a real edge: the text must be that of the same run, cut.
"""

import numpy as np
import pytest

from pilotfish import Device, EdgeServer, PilotfishError
from pilotfish.engines.onnx_decoder import Decoder
from tests.support.prefill import prefill
from tests.support.registered import LOSSLESS, sampling_only, temperature_of
from tests.support.tiny import tiny_artifact

VOCAB = 40
EOS = VOCAB - 1
PROMPT = [1, 3, 2]


@pytest.fixture(scope="module")
def device(tmp_path_factory):
    """The drafter is the target but for its sharpness, so that whole windows are accepted."""
    folder = tmp_path_factory.mktemp("windows")
    tiny_artifact(folder / "target", vocab=VOCAB, seed=3, sharpness=0.6, context=128)
    tiny_artifact(folder / "draft", vocab=VOCAB, seed=3, sharpness=0.7, context=128)
    with (
        EdgeServer(folder / "target", rate=1e6, threads=1) as edge,
        Device(folder / "draft", edge.endpoint, threads=1) as opened,
    ):
        yield opened


def options(protocol, seed=0, **more):
    temperature = temperature_of(protocol)
    return {"protocol": protocol, "temperature": temperature, "seed": seed, "window": 6} | more


@pytest.mark.parametrize("protocol", LOSSLESS)
def test_windows_are_accepted_whole_and_in_part(device, protocol):
    """The ground that the tests below stand on."""
    accepteds = set()
    for seed in range(60):  # six are enough, unless the protocol accepts little
        rounds = device.generate(PROMPT, **options(protocol, seed, max_tokens=40)).rounds
        assert all(len(record.tokens) <= record.accepted + 1 for record in rounds)
        accepteds |= {record.accepted for record in rounds if record.window == 6}
        if seed >= 5 and (6 in accepteds or not temperature_of(protocol)):
            break
    assert len(accepteds) > 1
    if temperature_of(protocol):
        assert 6 in accepteds


@pytest.mark.parametrize("protocol", LOSSLESS)
@pytest.mark.parametrize("limit", range(1, 9))
def test_the_last_window_is_as_short_as_needed(device, protocol, limit):
    """The last round drafts no more than may be kept; the law of what is kept does not change."""
    answer = device.generate(PROMPT, **options(protocol, max_tokens=limit))
    assert len(answer.tokens) == limit or answer.tokens[-1] == EOS
    left = limit
    for record in answer.rounds:
        assert record.window <= left - 1
        left -= len(record.tokens)


@pytest.mark.parametrize("protocol", sampling_only(LOSSLESS))
def test_an_end_token_within_a_window_ends_the_answer(device, protocol):
    ended = 0
    for seed in range(12):
        answer = device.generate(PROMPT, **options(protocol, seed, max_tokens=60))
        assert EOS not in answer.tokens[:-1]
        if answer.tokens[-1] == EOS:
            ended += 1
            assert answer.finish_reason == "stop"
            again = device.generate(PROMPT, **options(protocol, seed, max_tokens=60))
            assert again.tokens == answer.tokens
    assert ended


@pytest.mark.parametrize("protocol", LOSSLESS)
def test_a_stop_string_within_a_window_ends_the_answer(device, protocol):
    whole = device.generate(PROMPT, **options(protocol, max_tokens=40))
    for at in range(3, min(12, len(whole.text) - 2)):
        stop = whole.text[at : at + 2]
        cut = device.generate(PROMPT, **options(protocol, max_tokens=40, stop=[stop]))
        assert cut.finish_reason == "stop"
        assert cut.text == whole.text[: whole.text.index(stop)]
        assert cut.tokens == whole.tokens[: len(cut.tokens)]


@pytest.mark.parametrize("protocol", LOSSLESS)
def test_an_answer_that_was_cut_is_gone_on_from(device, protocol):
    """The edge has committed more than was kept, or, with a pending token, less."""
    prompt = PROMPT
    for turn in range(8):
        answer = device.generate(prompt, **options(protocol, turn, max_tokens=1 + turn % 4))
        prompt = [*prompt, *answer.tokens, 5]
    warm = device.generate(prompt, **options(protocol, 99, max_tokens=12))
    device.generate([7, 7], protocol="greedy", max_tokens=1)  # forgets all
    cold = device.generate(prompt, **options(protocol, 99, max_tokens=12))
    assert warm.tokens == cold.tokens


@pytest.mark.parametrize("protocol", LOSSLESS)
def test_protocols_take_turns_in_one_session(device, protocol):
    """A pending token of one protocol is no trouble to the next."""
    for seed in range(6):
        first = device.generate(PROMPT, **options("dssd", seed, max_tokens=5))
        prompt = [*PROMPT, *first.tokens]
        warm = device.generate(prompt, **options(protocol, seed, max_tokens=8))
        device.generate([7, 7], protocol="greedy", max_tokens=1)
        assert (
            device.generate(prompt, **options(protocol, seed, max_tokens=8)).tokens == warm.tokens
        )


@pytest.mark.parametrize("protocol", LOSSLESS)
def test_a_full_context_ends_windows_of_any_shape(device, protocol):
    for room in range(1, 9):
        answer = device.generate([1] * (128 - room), **options(protocol, room, max_tokens=50))
        assert len(answer.tokens) == room or answer.tokens[-1] == EOS


@pytest.mark.parametrize("protocol", LOSSLESS)
def test_auto_windows_end_where_confidence_does(device, protocol):
    """Not by the end of the answer, nor by an end token."""
    early = 0
    for seed in range(8):
        answer = device.generate(PROMPT, **options(protocol, seed, max_tokens=80, window="auto"))
        left = 80
        for record in answer.rounds[:-1]:
            early += record.window < min(16, left - 1) and EOS not in record.tokens
            left -= len(record.tokens)
    assert early


def test_an_edge_that_takes_less_gets_less(tmp_path):
    """Windows are cut to the edge's limit, by the nodes that they may have."""
    target = tiny_artifact(tmp_path / "target", vocab=VOCAB, seed=3).path
    with (
        EdgeServer(target, max_window=5, threads=1) as edge,
        Device(target, edge.endpoint, threads=1) as device,
    ):
        for protocol in LOSSLESS:
            answer = device.generate(PROMPT, **options(protocol, max_tokens=40, window=20))
            assert max(record.window for record in answer.rounds) <= 5
        answer = device.generate(PROMPT, protocol="tree", expansion=(2, 2, 2), max_tokens=9)
        assert max(record.window for record in answer.rounds) == 1


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"protocol": "telepathy"}, "coupled"),
        ({"protocol": "greedy", "temperature": 1.0}, "use coupled"),
        ({"protocol": "greedy", "draft_temperature": 1.0}, "temperature 0"),
        ({"protocol": "tslt", "expansion": [2, 2]}, "can only be used with tree"),
        ({"protocol": "stream", "expansion": [2]}, "can only be used with tree"),
        ({"protocol": "stream", "draft_top_k": 5}, "nothing is drafted"),
        ({"protocol": "local", "draft_temperature": 1.0}, "nothing is drafted"),
        ({"protocol": "tree", "expansion": [0]}, "numbers of 1 or more"),
        ({"protocol": "tree", "expansion": []}, "numbers of 1 or more"),
        ({"protocol": "tree", "expansion": [100, 100]}, "nodes"),
        ({"protocol": "tree", "expansion": [2, 2], "window": 3}, "give no window"),
        ({"protocol": "coupled", "window": -1}, "window"),
        ({"protocol": "coupled", "window": "wide"}, "'auto'"),
        ({"protocol": "tslt", "draft_top_k": -1}, "draft_top_k"),
        ({"protocol": "tslt", "draft_top_p": 0.0}, "draft_top_p"),
    ],
)
def test_impossible_combinations_are_refused_with_what_is_possible(device, wrong, words):
    with pytest.raises(PilotfishError, match=words):
        device.generate(PROMPT, **wrong)
    assert device.generate(PROMPT, protocol="greedy", max_tokens=2).tokens


def test_the_targets_kv_follow_the_accepted_path(tmp_path):
    """What a tree leaves in the caches is what the accepted text alone would: the greedy text."""
    target = tiny_artifact(tmp_path / "target", vocab=VOCAB, seed=3, context=128).path
    draft = tiny_artifact(tmp_path / "draft", vocab=VOCAB, seed=4, context=128).path
    with EdgeServer(target, threads=1) as edge, Device(draft, edge.endpoint, threads=1) as device:
        got = device.generate(
            PROMPT,
            protocol="tree",
            expansion=(3, 2, 2),
            draft_temperature=1.0,
            max_tokens=30,
            seed=1,
        ).tokens
    decoder = Decoder(target)
    wanted: list[int] = []
    while len(wanted) < len(got):
        decoder.rollback(0, 0)
        tokens = np.array([*PROMPT, *wanted], dtype=np.int64)
        wanted.append(int(prefill(decoder, 0, tokens).logits[0].argmax()))
    assert got == wanted
