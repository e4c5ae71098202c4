"""The files of a decision head: saved whole, found by name, and refused when damaged."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from pilotfish.base.errors import HeadError, PilotfishError, from_code
from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.head_file import (
    CARD_BYTES,
    HIDDEN_WIDTH,
    WEIGHTS_BYTES,
    CurvePoint,
    LinkScale,
    ModelIdentity,
    Training,
)
from pilotfish.speculation.channel import FEATURES, Channel
from pilotfish.wire.codecs.hidden import HIDDEN_FORMATS, HiddenFormat
from tests.support.small_heads import LINK, Arrays, D, H, T, card, head, mismatches, weights

POOR = Channel(rtt_s=0.09, up_bps=1.1e7, down_bps=2e7, loss=0.08)


@pytest.mark.parametrize("dtype", ["f4", "f2"])
@pytest.mark.parametrize("features", ["states", "tokens"])
@pytest.mark.parametrize("link", [LINK, None])
def test_saved_head_is_the_head(
    tmp_path: Path, features: str, link: LinkScale | None, dtype: str
) -> None:
    saved = head(dtype=dtype, features=features, link=link)
    path = saved.save(tmp_path / "new")
    assert path == tmp_path / "new" / "tiny.json"
    assert sorted(os.listdir(path.parent)) == ["tiny.json", "tiny.safetensors"]
    case = mismatches(10)
    for name in (path, path.with_suffix("")):
        loaded = DecisionHead.load(str(name))
        assert loaded.card == saved.card
        assert saved.card == card(features=features, link=link, sha256=saved.card.sha256)
        assert loaded.tensors.keys() == saved.tensors.keys()
        for tensor in saved.tensors:
            assert loaded.tensors[tensor].dtype == saved.tensors[tensor].dtype
            assert np.array_equal(loaded.tensors[tensor], saved.tensors[tensor])
        assert np.array_equal(loaded.logits(*case, POOR), saved.logits(*case, POOR))


def test_saving_again_replaces_the_older_head(tmp_path: Path) -> None:
    head(1).save(tmp_path)
    newer = head(2, threshold=0.7)
    path = newer.save(tmp_path)
    assert DecisionHead.load(str(path)).card == newer.card
    assert len(os.listdir(tmp_path)) == 2


def test_stopped_between_the_two_files_nothing_is_mixed(tmp_path: Path) -> None:
    """The card of the older head does not take the newer one's weights."""
    path = head(1).save(tmp_path / "a")
    newer = head(2).save(tmp_path / "b")
    newer.with_suffix(".safetensors").replace(path.with_suffix(".safetensors"))
    with pytest.raises(HeadError, match=r"does not belong to tiny\.json"):
        DecisionHead.load(str(path))


def test_what_cannot_be_written_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(HeadError, match="cannot be written"):
        head().save(tmp_path / "file")
    wide = card(drafter=ModelIdentity(model="m", origin="0" * 16, hidden=60_000, precision="fp32"))
    tensors = {**weights(wide), "w1": np.ones((17, 60_000 + T + 4), np.float32)}
    tensors |= {name: np.ones(17, np.float32) for name in ("b1", "w2")}
    with pytest.raises(HeadError, match="at most 4000000 are allowed"):
        DecisionHead(wide, tensors).save(tmp_path)
    long = {f"{at:0256}": "x" * 256 for at in range(64)}
    curve = [CurvePoint(threshold=at / 255, forgiven=1 / 3, accuracy=1 / 3) for at in range(256)]
    training = Training(questions=1, examples=1, task="t", seed=0, options=long)
    with pytest.raises(HeadError, match="at most 65536 are allowed"):
        head(training=training, curve=curve).save(tmp_path)
    assert os.listdir(tmp_path) == ["file"]


def test_largest_curve_fits(tmp_path: Path) -> None:
    points = [
        CurvePoint(
            threshold=at / 255, logit=-12.345678901234567, forgiven=1 / 3, accuracy=2 / 3,
            accepted_length=100 / 3,
        )
        for at in range(256)
    ]  # fmt: skip
    path = head(curve=points).save(tmp_path)
    assert DecisionHead.load(str(path)).card.curve == points


def test_a_name_with_dots_is_a_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As models have them."""
    head(1, name="a-1.5b").save(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert DecisionHead.load("a-1.5b").card == DecisionHead.load("a-1.5b.json").card
    with pytest.raises(HeadError, match=r"no decision head nothing.*: give the path"):
        DecisionHead.load("nothing")


@pytest.mark.parametrize("name", ["", "/", ".", "..", "missing/head", "x.safetensors", "a" * 5000])
def test_names_of_nothing_are_refused(name: str) -> None:
    with pytest.raises(HeadError):
        DecisionHead.load(name)


# Damage


def rewrite(path: Path, data: bytes) -> None:
    """Put these weights there, and their digest into the card."""
    path.with_suffix(".safetensors").write_bytes(data)
    payload = json.loads(path.read_bytes())
    path.write_text(json.dumps({**payload, "sha256": sha256(data).hexdigest()}))


def saved_weights(**change: Any) -> bytes:
    tensors = {**weights(card()), **change}
    selection = {name: array for name, array in tensors.items() if array is not None}
    return safetensors.numpy.save(selection)


def changed(name: str, at: int | tuple[int, ...], value: float) -> Arrays:
    tensor = weights(card())[name].copy()
    tensor[at] = value
    return {name: tensor}


def one_tensor(dtype: str, shape: list[int], size: int) -> bytes:
    encoded = json.dumps(
        {"w1": {"dtype": dtype, "shape": shape, "data_offsets": [0, size]}}
    ).encode()
    return len(encoded).to_bytes(8, "little") + encoded + bytes(size)


WHOLE = saved_weights()


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "safetensors"),
        (WHOLE[:4], "safetensors"),
        (WHOLE[:-1], "safetensors"),
        (WHOLE[:60], "safetensors"),
        (WHOLE + b"\0", "safetensors"),
        (b"\xff" * 7 + b"\x7f" + WHOLE[8:], "safetensors"),  # a header of 2⁶³ bytes
        ((10**9).to_bytes(8, "little") + WHOLE[8:], "safetensors"),
        (WHOLE.replace(b'"F32"', b'"F99"', 1), "safetensors"),
        (WHOLE.replace(b'"F32"', b'"F16"', 1), "safetensors"),
        (bytes(WEIGHTS_BYTES + 1), "too large"),
        (saved_weights(w2=None), "it has b1, b2, mean, std, w1 instead of the tensors"),
        (saved_weights(std=None), "instead of the tensors b1, b2, mean, std"),
        (saved_weights(extra=np.ones(1, np.float32)), "it has b1, b2, extra"),
        (safetensors.numpy.save({}), "it has nothing"),
        (saved_weights(w1=np.ones(H, np.float32)), r"w1 must be \[h, n\]"),
        (saved_weights(w1=np.ones((0, 19), np.float32)), r"w1 must be \[h, n\]"),
        (saved_weights(w1=np.ones((HIDDEN_WIDTH + 1, 1), np.float32)), r"h from 1 to 1024"),
        (
            saved_weights(w1=np.ones((H, 18), np.float32)),
            r"w1 has the shape \[5, 18\], not \[5, 19\]",
        ),
        (saved_weights(b1=np.ones(H + 1, np.float32)), r"b1 has the shape \[6\], not \[5\]"),
        (saved_weights(w2=np.ones((H, 1), np.float32)), r"w2 has the shape \[5, 1\], not \[5\]"),
        (saved_weights(b2=np.float32([1, 2])), r"b2 has the shape \[2\], not \[1\]"),
        (saved_weights(b2=np.array(1, np.float32)), r"b2 has the shape \[\], not \[1\]"),
        (saved_weights(mean=np.ones(D, np.float32)), r"mean has the shape \[6\], not \[15\]"),
        (
            saved_weights(std=np.ones(D + T + 4, np.float32)),
            r"std has the shape \[19\], not \[15\]",
        ),
        (saved_weights(b1=np.ones(H, np.float64)), "b1 has the type float64"),
        (saved_weights(b1=np.ones(H, np.int8)), "b1 has the type int8"),
        (saved_weights(**changed("w1", (2, 3), math.nan)), "w1 has a value that is not finite"),
        (saved_weights(**changed("b2", 0, -math.inf)), "b2 has a value that is not finite"),
        (saved_weights(**changed("mean", 1, math.inf)), "mean has a value that is not finite"),
        (saved_weights(**changed("std", 1, 0.0)), "std has a value that is not positive"),
        (saved_weights(**changed("std", 1, -1.0)), "std has a value that is not positive"),
        (saved_weights(**changed("std", 1, 1e-44)), "overflow"),
        (saved_weights(**changed("mean", 1, 3e38), **changed("std", 1, 1e-3)), "overflow"),
        (one_tensor("BF16", [2], 4), "safetensors"),
        (one_tensor("F32", [1] * 65, 4), "safetensors"),  # more dimensions than numpy has
    ],
)
def test_damaged_weights_are_refused(tmp_path: Path, data: bytes, named: str) -> None:
    path = head().save(tmp_path)
    rewrite(path, WHOLE)
    DecisionHead.load(str(path))
    rewrite(path, data)
    with pytest.raises(HeadError, match=named):
        DecisionHead.load(str(path))


def test_spoilt_weights_never_end_in_another_error(tmp_path: Path) -> None:
    """Bytes changed at random, with a digest that agrees: a head, or a `HeadError`."""
    path = head().save(tmp_path)

    @given(st.data())
    @settings(max_examples=200)
    def spoil(data: st.DataObject) -> None:
        spoilt = bytearray(WHOLE)
        for _ in range(data.draw(st.integers(1, 4))):
            spoilt[data.draw(st.integers(0, len(spoilt) - 1))] = data.draw(st.integers(0, 255))
        rewrite(path, bytes(spoilt[: data.draw(st.sampled_from([len(spoilt), 100, 300]))]))
        with suppress(HeadError):
            DecisionHead.load(str(path))

    spoil()


def test_digest_guards_the_weights(tmp_path: Path) -> None:
    path = head().save(tmp_path)
    file = path.with_suffix(".safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(HeadError, match="SHA-256 differs"):
        DecisionHead.load(str(path))
    file.unlink()
    with pytest.raises(HeadError, match="no file"):
        DecisionHead.load(str(path))
    file.mkdir()
    with pytest.raises(HeadError, match="not a file"):
        DecisionHead.load(str(path))


END = msgspec.to_builtins(card().drafter)
SCALE = msgspec.to_builtins(LINK)
POINT = {"threshold": 0.5, "forgiven": 0.5}


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"format": 2}, "format 2, but this version reads format 1"),
        ({"format": "1"}, "not valid"),
        ({"surprise": 1}, "unknown field `surprise`"),
        ({"drafter": {**END, "surprise": 1}}, "unknown field `surprise`"),
        ({"drafter": {**END, "hidden": 0}}, "drafter.hidden"),
        ({"drafter": {**END, "hidden": 65537}}, "drafter.hidden"),
        ({"drafter": {**END, "hidden": D + 1}}, "w1 has the shape"),
        ({"target": {**END, "origin": "g" * 16}}, "target.origin"),
        ({"target": {**END, "precision": "int3"}}, "target.precision"),
        ({"target": {**END, "model": "m" * 257}}, "target.model"),
        ({"name": "../x"}, "name"),
        ({"name": ""}, "name"),
        ({"features": "both"}, "features"),
        ({"features": "tokens"}, "instead of the tensors b1, b2, w1, w2"),
        ({"hidden": "int3"}, "hidden"),
        ({"threshold": 1.5}, "threshold"),
        ({"threshold": None}, "threshold"),
        ({"sha256": "0"}, "sha256"),
        ({"sha256": ""}, "SHA-256 differs"),
        ({"link": None}, r"w1 has the shape \[5, 19\], not \[5, 15\]"),
        ({"link": {**SCALE, "names": FEATURES[::-1]}}, "other link features"),
        ({"link": {**SCALE, "names": FEATURES[:3]}}, "link.names"),
        ({"link": {**SCALE, "mean": [1, 2, 3]}}, "link.mean"),
        ({"link": {**SCALE, "std": [1, 1, 1, 0]}}, "not positive"),
        ({"link": {**SCALE, "clip": 0}}, "link.clip"),
        ({"curve": [POINT] * 257}, "curve"),
        ({"curve": [{**POINT, "forgiven": 2}]}, "forgiven"),
        ({"curve": [{**POINT, "accuracy": -1}]}, "accuracy"),
        ({"training": {"task": "x"}}, "training"),
    ],
)
def test_damaged_cards_are_refused(tmp_path: Path, change: dict[str, Any], named: str) -> None:
    path = head().save(tmp_path)
    payload = json.loads(path.read_bytes())
    path.write_text(json.dumps({**payload, **change}))
    with pytest.raises(HeadError, match=named):
        DecisionHead.load(str(path))


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"", "not valid"),
        (b"{", "not valid"),
        (b"[]", "not valid"),
        (b"\xff\xfe", "not valid"),
        (b"[" * 60_000, "not valid"),
        (b'{"format": 1, "surprise": ' + b"[" * 60_000, "not valid"),
        (b'{"format": 1, "threshold": 1e999}', "not valid"),
        (b" " * (CARD_BYTES + 1), "too large"),
    ],
)
def test_what_is_no_card_is_refused(tmp_path: Path, data: bytes, named: str) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(data)
    with pytest.raises(HeadError, match=named):
        DecisionHead.load(str(path))


def test_a_pipe_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.json")
    with pytest.raises(HeadError, match="not a regular file"):
        DecisionHead.load(str(tmp_path / "x"))


def test_card_that_could_not_be_read_again_makes_no_head() -> None:
    for change in (
        {"threshold": math.nan},
        {"name": "a/b"},
        {"link": LinkScale(mean=[math.inf] * 4, std=[1.0] * 4, clip=1.0)},
        {"link": LinkScale(mean=[0.0] * 4, std=[1.0] * 4, clip=math.inf)},
    ):
        with pytest.raises(HeadError, match="not valid"):
            head(**change)
    with pytest.raises(HeadError, match="columns"):
        DecisionHead(
            card(features="tokens"),
            {**weights(card(features="tokens")), "w1": np.ones((H, 15), np.float32)},
        )


def test_error_has_its_code_and_exit() -> None:
    result = from_code("head", "x")
    assert isinstance(result, HeadError)
    assert isinstance(result, PilotfishError)
    assert result.exit_code == 66  # which systemd does not try again


def test_formats_are_those_of_the_codec() -> None:
    assert set(HiddenFormat.__args__) == set(HIDDEN_FORMATS)


def test_import_does_not_bring_in_safetensors() -> None:
    code = "import sys, pilotfish.edge_runtime.head; print('safetensors' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
