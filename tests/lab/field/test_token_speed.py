"""tokens/s in `field measure`, `replay` and `compare`: one pair, one link, one number."""

from __future__ import annotations

import json

import pytest

from pilotfish import EdgeServer
from pilotfish.cli import main
from tests.conftest import Pair
from tests.support.measuring import measure
from tests.support.tiny import tiny_artifact

RTT_MS = 150
WINDOW = 4
TOKENS = 24
PROMPTS = "abc\nbcd ef\nfed\n"
# passes of some milliseconds, beside which the overhead of a token is small
WIDE = {"hidden": 512, "intermediate": 2048, "layers": 3, "heads": 8, "kv_heads": 8, "head_dim": 64}
TOLERANCE = 0.35
ATTEMPTS = 4  # the commands run one after the other, and the machine may do other things meanwhile


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wide")
    sizes = {"vocab": 64, "padded_vocab": 72, "context": 256, "seed": 1, **WIDE}
    pair = Pair(folder / "draft", folder / "target")
    tiny_artifact(pair.draft, sharpness=0.9, **sizes)
    tiny_artifact(pair.target, sharpness=0.7, **sizes)
    return pair


def speeds(pair, address, folder):
    """What each command has in its JSON, over a link of `RTT_MS`."""
    folder.mkdir()
    prompts, run = folder / "prompts.txt", folder / "run.pilotfish"
    prompts.write_text(PROMPTS)
    paths = [folder / f"{name}.json" for name in ("measured", "replayed", "compared")]
    answering = ["--prompts", prompts, "--max-tokens", TOKENS]
    options = ["--protocols", "greedy,stream", "--windows", WINDOW, "--repeat", 1]
    options += ["--rtt", RTT_MS, "--json", paths[0]]
    assert measure(pair, address, run, *answering, *options) == 0
    replaying = [str(run), "--link", f"rtt={RTT_MS}ms", "--json", str(paths[1])]
    assert main(["field", "replay", *replaying]) == 0
    options = [pair.draft, "--target", address, "--threads", 1, "--rtt", f"{RTT_MS}ms"]
    options += [*answering, "--json", paths[2]]
    assert main(["field", "compare", *map(str, options)]) == 0
    return [json.loads(path.read_text()) for path in paths]


def unmodelled_ms(row):
    """The ms a token on the link, beyond the RTT of each round."""
    on_link_ms = row["stages_ms"]["uplink"] + row["stages_ms"]["downlink"]
    return on_link_ms - (RTT_MS / row["tokens_per_round"] if row["protocol"] != "stream" else 0.0)


def agree(a, b):
    return abs(a / b - 1.0) <= TOLERANCE


@pytest.mark.timing
def test_a_measured_a_replayed_and_a_compared_speed_agree(wide, tmp_path):
    """Within 35 %, which is what the models leave out, and what the machine's other work changes.

    A replay leaves out the time on the link beyond its RTT, such as 1 to 2 ms a round trip for the
    emulator; the measured stages tell it, so it is added here. A comparison leaves out this,
    queue and settling, too, counts all tokens at once instead of the median answer's, and takes the
    times of passes and drafts at another moment. The tokens/s of whole answers would be further
    away: while `stream` waits for its first token, it could write some twenty more.
    """
    with EdgeServer(wide.target, threads=1, max_window=WINDOW) as edge:
        for attempt in range(ATTEMPTS):
            rows, replayed, compared = speeds(wide, edge.endpoint, tmp_path / str(attempt))
            measured = {row["protocol"]: row for row in rows}
            speed = {protocol: row["tokens_per_s"] for protocol, row in measured.items()}
            modelled = {
                row["protocol"]: row["modelled_tokens_per_s"][0] for row in replayed["figures"]
            }
            (expected,) = compared["drafters"][0]["expected"]
            others = {"greedy": expected["rounds_per_s"], "stream": compared["streamed_per_s"]}
            assert measured["greedy"]["speedup"] == speed["greedy"] / speed["stream"]
            assert min(row["first_token_ms"]["median"] for row in rows) > RTT_MS
            first_s = measured["stream"]["first_token_ms"]["median"] * 1e-3
            whole = TOKENS / (first_s + (TOKENS - 1) / speed["stream"])
            explained = {
                name: 1e3 / (1e3 / modelled[name] + unmodelled_ms(measured[name])) for name in speed
            }
            if all(
                agree(each[name], speed[name]) for each in (explained, others) for name in speed
            ):
                assert not agree(whole, speed["stream"])
                return
    pytest.fail(f"measured {speed}, replayed {modelled}, compared {others}")
