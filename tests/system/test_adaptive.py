"""adaptive over a real link: a device, an edge, tiny models between them."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pilotfish import Device, EdgeServer
from pilotfish.base.errors import (
    UnsupportedError,
)
from pilotfish.cli import main
from pilotfish.cli.summary import summary
from pilotfish.device_runtime.plan import Auto
from pilotfish.device_runtime.record import Generation
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.onnx_decoder import Decoder, Pass
from pilotfish.speculation.distributions import Sampling, probabilities
from pilotfish.wire import messages as m
from pilotfish.wire.codecs.ids import decode_ids
from pilotfish.wire.codecs.sparse import decode_sparse
from pilotfish.wire.request import Options
from tests.conftest import VOCAB, Pair
from tests.device_runtime.test_choice_wisv import fresh, rounds
from tests.support import web
from tests.support.enumeration import distribution_of
from tests.support.exchanges import Exchange, exchanges
from tests.support.hostile import PROMPT
from tests.support.measuring import answers as recorded
from tests.support.measuring import measure
from tests.support.plans import alternatives, plan
from tests.support.thinned import thinned

assert exchanges  # a fixture
NONE_KEY = (1e6, 1.0, 0.0)
SOME_KEY = (1.02, 0.05, 0.6)
SAMPLED: dict[str, Any] = {"temperature": 1.0, "max_tokens": 40, "window": 4}
SHAPED = {"temperature": 0.8, "top_k": 12, "top_p": 0.95}
PROMPTS = [PROMPT, [9], [*range(30, 60)]]
WINDOWS = (0, 1, 4, "auto")
LAMBDAS = (None, NONE_KEY, SOME_KEY)
SHAPES: tuple[dict[str, Any], ...] = ({"draft_top_k": 6}, {"draft_top_p": 0.7}, SHAPED)


def decisions(answer: Generation) -> list[tuple[Any, ...]]:
    """Of each round."""
    return [(r.start, r.window, r.accepted, r.tokens) for r in answer.rounds]


def deviation(answers: Sequence[Generation]) -> float:
    """Of a position, in the mean."""
    rounds = [each for answer in answers for each in answer.rounds]
    return sum(each.notes["deviation"] for each in rounds) / sum(each.verified for each in rounds)


# What is committed


@pytest.mark.parametrize(
    ("window", "lambdas", "shape"),
    thinned(
        [*product(WINDOWS, LAMBDAS, SHAPES)],
        [*product((4,), LAMBDAS, SHAPES), *product(WINDOWS, (SOME_KEY,), (SHAPED,))],
    ),
)
def test_tau_0_is_tslt_token_for_token(
    device: Device, window: Any, lambdas: Any, shape: dict[str, Any]
) -> None:
    for seed, prompt in enumerate(PROMPTS):
        options = {**SAMPLED, **shape, "window": window, "seed": seed}
        strict = device.generate(prompt, protocol="tslt", **options)
        got = device.generate(prompt, protocol="adaptive", tau=0.0, lambdas=lambdas, **options)
        assert got.tokens == strict.tokens
        assert decisions(got) == decisions(strict)
        assert not got.notes["deviation"]


def test_all_tokens_key_is_tslt_too(device: Device) -> None:
    for seed in range(5):
        strict = device.generate(PROMPT, protocol="tslt", seed=seed, **SAMPLED)
        got = device.generate(
            PROMPT, protocol="adaptive", tau=0.9, lambdas=(0.0, 0.0, 1.0), seed=seed, **SAMPLED
        )
        assert got.tokens == strict.tokens


def test_acceptance_and_deviation_rise_with_tau(device: Device) -> None:
    accepted, deviated = [], []
    for tau in (0.0, 0.3, 0.6, 0.9):
        answers = [
            device.generate(
                PROMPT,
                protocol="adaptive",
                tau=tau,
                lambdas=NONE_KEY,
                seed=seed,
                draft_temperature=0.3,
                **SAMPLED,
            )
            for seed in range(12)
        ]
        rounds = [each for answer in answers for each in answer.rounds]
        accepted.append(sum(r.accepted for r in rounds) / sum(r.verified for r in rounds))
        deviated.append(deviation(answers))
    assert accepted == sorted(accepted)
    assert deviated == sorted(deviated)
    assert deviated[0] == 0.0
    # by as much as it strays, within the noise of a thousand positions
    assert accepted[-1] - accepted[0] == pytest.approx(deviated[-1], abs=0.06)
    assert deviated[-1] > 0.2


def test_a_seed_repeats_its_answer(device: Device) -> None:
    options = {**SAMPLED, "protocol": "adaptive", "tau": 0.5, "lambdas": NONE_KEY}
    texts = [device.generate(PROMPT, seed=seed, **options).tokens for seed in (1, 2, 1)]
    assert texts[0] == texts[2] != texts[1]


def test_what_the_target_excludes_never_comes(pair: Pair, device: Device) -> None:
    """Top-k of the request holds at τ = 1, too, whatever the drafter would rather say."""
    answer = device.generate(
        PROMPT, protocol="adaptive", tau=1.0, lambdas=NONE_KEY, seed=3, top_k=2, draft_top_k=20,
        draft_temperature=2.0, **SAMPLED,
    )  # fmt: skip
    logits = target_logits(pair, [*PROMPT, *answer.tokens])
    for at, token in enumerate(answer.tokens, len(PROMPT)):
        assert token in np.argsort(-logits[at - 1])[:2]
    assert sum(each.accepted for each in answer.rounds) > 0


# What is told


def target_logits(pair: Pair, tokens: Sequence[int]) -> np.ndarray:
    """The target's, after each of the tokens, f32 [n, V]."""
    decoder = Decoder(Artifact.open(pair.target))
    (output,) = decoder.forward([Pass(0, np.array(tokens), len(tokens))])
    return output.logits


@pytest.mark.parametrize("lambdas", [NONE_KEY, SOME_KEY])
def test_the_deviation_is_that_of_the_logits(
    pair: Pair, device: Device, exchanges: list[Exchange], lambdas: tuple[float, float, float]
) -> None:
    """Worked out again from what was sent and from the target, straight from docs/wire.md."""
    tau, spared = 0.4, 0
    marked: list[int] = []
    answer = device.generate(
        PROMPT, protocol="adaptive", tau=tau, lambdas=lambdas, seed=7, draft_top_k=12, **SAMPLED
    )
    tokens = [*PROMPT, *answer.tokens]
    p = probabilities(target_logits(pair, tokens).astype(np.float64), Sampling(temperature=1.0))
    assert len(exchanges) == len(answer.rounds)
    for sent, round_ in zip(exchanges, answer.rounds, strict=True):
        verdict = sent.answer.reply
        assert isinstance(verdict, m.Verdict)
        ids = decode_ids(sent.frames[0], VOCAB)
        q = decode_sparse(sent.frames[1], len(ids), VOCAB)
        expected, key = 0.0, []
        for at in range(min(len(ids), verdict.accepted + 1)):
            result, marks = position(
                p[round_.start + at - 1], distribution_of(q.row(at), VOCAB), tau, lambdas
            )
            expected, spared = expected + result, spared + (result > 0)
            key += [at] if marks[ids[at]] else []
        assert verdict.notes[0] == pytest.approx(expected, abs=1e-4)
        assert round_.notes["deviation"] == verdict.notes[0]
        assert list(round_.key) == key
        assert round_.notes["key"] == verdict.notes[1] == len(key)
        marked += [round_.start - len(PROMPT) + at for at in key]
    assert spared > 10
    assert bool(marked) == (lambdas == SOME_KEY)
    assert answer.key_positions == [at for at in marked if at < len(answer.tokens)]
    assert summary(answer)["key_positions"] == answer.key_positions
    assert summary(answer)["key"] == len(marked)
    assert answer.notes["deviation"] == pytest.approx(deviation([answer]))


def position(
    p: np.ndarray, q: np.ndarray, tau: float, lambdas: tuple[float, float, float]
) -> tuple[float, np.ndarray]:
    """The deviation of one position, and whether each token is key."""
    first, second, third = lambdas
    entropies = [-sum(x * np.log(x) for x in law[law > 0]) for law in (q, p)]
    tops = [{*np.flatnonzero(law >= max(np.sort(law)[-10], 1e-300))} for law in (q, p)]
    overlap = len(tops[0] & tops[1]) / min(map(len, tops))
    soft = np.where(q > 0, p ** (1 - tau) * q**tau, 0.0)
    soft *= p[q > 0].sum() ** (1 - tau) / soft.sum()
    key = (np.abs(p - q) > second) | (entropies[0] / max(entropies[1], 0.01) > first)
    key |= overlap < third
    beyond = ~key & (q > p)
    return float((np.minimum(q, soft) - p)[beyond].sum()), key


def test_it_is_told_wherever_a_round_is(device: Device, tmp_path: Path) -> None:
    answer = device.generate(PROMPT, protocol="adaptive", tau=0.5, lambdas=NONE_KEY, **SAMPLED)
    assert answer.notes["deviation"] is not None
    assert summary(answer)["deviation"] == pytest.approx(answer.notes["deviation"], abs=1e-6)
    strict = device.generate(PROMPT, protocol="greedy", max_tokens=10)
    assert summary(strict)["deviation"] == 0.0
    assert summary(strict)["key_positions"] == strict.key_positions == []


def test_the_pieces_of_a_stream_are_key_or_not(device: Device) -> None:
    options = {
        **SAMPLED,
        "protocol": "adaptive",
        "tau": 0.5,
        "lambdas": SOME_KEY,
        "seed": 7,
        "draft_top_k": 12,
    }
    at, key = 0, []
    for piece in device.stream(PROMPT, **options):
        key += [*range(at, at + len(piece.tokens))] if piece.key else []
        at += len(piece.tokens)
    assert device.last is not None
    assert key == device.last.key_positions
    assert 0 < len(key) < at


def test_run_files_and_their_tables_have_it(
    pair: Pair, edge: EdgeServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "walk.pilotfish"
    options = ["--protocols", "tslt,adaptive", "--windows", "4", "--repeat", "1", "--warm-up", "0"]
    sampled = ["--temperature", "1", "--tau", "0.9", "--max-tokens", "12"]
    assert measure(pair, edge.endpoint, out, *options, *sampled, "--json", "-") == 0
    info = {load["protocol"]: load for load in json.loads(capsys.readouterr().out)}
    rounds = {
        name: [r for a in recorded(out) if a.protocol == name for r in a.rounds] for name in info
    }
    assert info["tslt"]["deviation"] is None
    deviated = sum(r.notes["deviation"] for r in rounds["adaptive"])
    verified = sum(r.verified for r in rounds["adaptive"])
    assert info["adaptive"]["deviation"] == pytest.approx(deviated / verified)
    assert not any(r.notes for r in rounds["tslt"])


# Commands, and the service


def test_the_command_takes_tau_and_tells_the_deviation(
    pair: Pair, edge: EdgeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = ["--draft", str(pair.draft), "--edge", edge.endpoint, "--threads", "1"]
    run = ["device", "run", "abc", *ends, "--temperature", "1", "--max-tokens", "30", "--seed", "1"]
    relaxed = ["--protocol", "adaptive", "--tau", "0.9", "--lambdas", "1e6,1,0", "--stats"]
    assert main([*run, *relaxed]) == 0
    assert "deviation a position" in capsys.readouterr().err
    assert main([*run, "--protocol", "tslt", "--stats"]) == 0
    assert "deviation" not in capsys.readouterr().err
    for wrong in (["--protocol", "tslt", "--tau", "0.2"], ["--lambdas", "1,2,3,4"]):
        code = main([*run, "--protocol", "adaptive", *wrong])
        assert code == UnsupportedError.exit_code
    assert "--protocol adaptive" in capsys.readouterr().err


def test_auto_may_take_it_where_lossy_ones_are_allowed(device: Device) -> None:
    assert device.welcome is not None
    offered = [*device.welcome.protocols, "local"]
    free = Auto(lossy=True)

    def names(auto: Auto, **options: Any) -> set[str]:
        result = alternatives(auto, Options(**options), offered=offered)
        return {alternative.protocol for alternative in result}

    assert "adaptive" in names(free, temperature=1.0)
    assert "adaptive" not in names(Auto(), temperature=1.0)
    assert "adaptive" not in names(free)
    info = {
        alternative.protocol: alternative.exchange and alternative.exchange.options.to_dict()
        for alternative in alternatives(free, {"temperature": 1.0, "tau": 0.3}, offered=offered)
    }
    assert info["adaptive"] == {"tau": 0.3}
    assert info["tslt"] == {}


def test_the_service_takes_tau_and_tells_the_deviation(service: Any) -> None:
    fields = {"messages": [{"role": "user", "content": "abc"}], "temperature": 1.0, "seed": 1}
    wanted = {"protocol": "adaptive", "tau": 0.9, "lambdas": [1e6, 1.0, 0.0]}
    url = f"{service.url}/v1/chat/completions"
    answered = web.post(url, json={**fields, "max_tokens": 30, "pilotfish": wanted}, timeout=60.0)
    info = answered.json()["pilotfish"]
    assert info["protocol"] == "adaptive"
    assert 0.0 < info["deviation"] <= 1.0
    assert info["key"] == len(info["key_positions"]) == 0
    assert service.get("/status").json()["last"]["deviation"] == pytest.approx(
        info["deviation"], abs=1e-6
    )
    assert service.metric("pilotfish_spec_decode_deviation_total") > 0.0
    for wrong in (
        {"protocol": "tslt", "tau": 0.2},
        {"protocol": "adaptive", "tau": 1.2},
        {"protocol": "adaptive", "lambdas": [1, 2]},
    ):
        assert web.post(url, json={**fields, "pilotfish": wrong}).status_code == 400


def test_deviating_tokens_make_no_other_protocol_look_better() -> None:
    """Half of what was accepted the target would not have said."""
    adaptive, tslt = (
        plan(protocol=name, window=8, temperature=1.0, seed=1) for name in ("adaptive", "tslt")
    )
    seen, strict = fresh(), fresh()
    strict.add(adaptive, rounds(adaptive, 8, count=300))
    seen.add(
        adaptive,
        [replace(item, notes={"deviation": 4.0}) for item in rounds(adaptive, 8, count=300)],
    )
    assert seen.tokens(adaptive) == pytest.approx(strict.tokens(adaptive), rel=0.1)
    assert seen.acceptance_by_depth(tslt)[0] == pytest.approx(0.5, abs=0.05)
    assert strict.acceptance_by_depth(tslt)[0] > 0.9
    # untried, it is expected to accept a little more than tslt
    known = fresh()
    known.add(tslt, rounds(tslt, 3, count=40))
    assert known.tokens(tslt) < known.tokens(adaptive) < 1.5 * known.tokens(tslt)
