"""Steps with logits options that no edge sends: a worker refuses them, then answers others."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any

import numpy as np

from pilotfish.speculation.logits_options import LogitsOptions
from pilotfish.speculation.masks import Masks
from pilotfish.wire.codecs.masks import encode_masks
from pilotfish.wire.messages import encode
from pilotfish.wire.nodes import ItemOptions, Step
from tests.conftest import VOCAB
from tests.support.federating import Cast, WorkerThread
from tests.support.raw_edge import RawEdge, Tenant, expected_of, ids, item, parents


def test_every_logits_option_reaches_a_worker() -> None:
    """As a field of the same name; biases and masks travel in frames."""
    fields = {*LogitsOptions.__dataclass_fields__} - {"logit_bias", "grammar"}
    assert fields <= {*ItemOptions.__struct_fields__}, (
        "A logits option does not reach a federation's workers: see docs/adding.md."
    )


def options_step(tenant: Tenant, options: Sequence[ItemOptions | None], *frames: bytes) -> Any:
    """Send a step of one item with three tokens and two rows."""
    tenant.number += 1
    step = Step(
        incarnation=tenant.incarnation,
        number=tenant.number,
        items=[item(size=3, rows=2)],
        options=list(options),
    )
    return tenant.edge.order(step, ids(5, 6, 7), b"", *frames)


BIAS = np.array([(3, 1.0)], [("token", "<u4"), ("bias", "<f4")]).tobytes()
MASKS = encode_masks(Masks.unrestricted(2, VOCAB))
EMPTY = encode_masks(Masks.pack(np.zeros((2, VOCAB), bool)))
BAD: dict[str, tuple[str, list[ItemOptions | None], list[bytes]]] = {
    "frames missing": ("malformed", [ItemOptions(since=1)], []),
    "a frame too many": ("malformed", [ItemOptions(since=1)], [b"", b"", b""]),
    "no options": ("malformed", [], [b"", b""]),
    "options for two": ("malformed", [None, None], [b"", b""]),
    "a prompt beyond the text": ("malformed", [ItemOptions(since=3)], [b"", b""]),
    "no biases": ("malformed", [ItemOptions(since=1, biases=1)], [b"", b""]),
    "half a bias": ("malformed", [ItemOptions(since=1, biases=1)], [BIAS[:5], b""]),
    "biases of none": ("malformed", [ItemOptions(since=1)], [BIAS, b""]),
    "a bias of no token": (
        "token-out-of-range", [ItemOptions(since=1, biases=1)], [ids(VOCAB) + BIAS[4:], b""],
    ),
    "a huge bias": (
        "malformed", [ItemOptions(since=1, biases=1)], [ids(1) + np.float32(1e9).tobytes(), b""],
    ),
    "NaN": ("malformed", [ItemOptions(since=1, presence_penalty=float("nan"))], [b"", b""]),
    "no factor": ("malformed", [ItemOptions(since=1, repetition_penalty=0.0)], [b"", b""]),
    "no masks": ("malformed", [ItemOptions(since=1, masked=True)], [b"", b""]),
    "masks of none": ("malformed", [ItemOptions(since=1)], [b"", MASKS]),
    "half the masks": ("malformed", [ItemOptions(since=1, masked=True)], [b"", MASKS[:-3]]),
    "masks of one row": (
        "malformed", [ItemOptions(since=1, masked=True)],
        [b"", encode_masks(Masks.unrestricted(1, VOCAB))],
    ),
    "a bomb": (
        "malformed", [ItemOptions(since=1, masked=True)],
        [b"", encode_masks(Masks.unrestricted(100_000, VOCAB))],
    ),
    "nothing allowed": ("malformed", [ItemOptions(since=1, masked=True)], [b"", EMPTY]),
    "noise": ("malformed", [ItemOptions(since=1, masked=True)], [b"", secrets.token_bytes(99)]),
}  # fmt: skip


def test_options_that_make_no_sense_are_refused(cast: Cast) -> None:
    """The refusal ends the attachment; the worker then answers as if nothing had been."""
    expected = expected_of(cast.a)
    with WorkerThread(cast.a) as held, RawEdge(held.endpoint) as edge:
        tenant = Tenant(edge)
        for name, (code, options, frames) in BAD.items():
            reply, _ = options_step(tenant, options, *frames)
            assert getattr(reply, "code", "") == code, (name, reply)
            tenant.attach()
            tenant.proves(expected)
            tenant.attach()
        reply, _ = options_step(tenant, [ItemOptions(since=2, masked=True, biases=1)], BIAS, MASKS)
        assert type(reply).__name__ == "Scored"
        assert len(encode(reply)) < 60


def test_a_tree_whose_rows_are_not_its_nodes_has_no_options(cast: Cast) -> None:
    """Options need the path of each row, and a row's path is its node's."""
    expected = expected_of(cast.a)
    with WorkerThread(cast.a) as held, RawEdge(held.endpoint) as edge:
        tenant = Tenant(edge)
        for rows, nodes in ((3, 1), (1, 2), (1, 1)):
            tenant.number += 1
            step = Step(
                incarnation=tenant.incarnation,
                number=tenant.number,
                items=[item(size=3, rows=rows, nodes=nodes)],
                options=[ItemOptions(since=1, presence_penalty=1.0)],
            )
            reply, _ = tenant.edge.order(
                step, ids(5, 6, 7), parents(*range(-1, nodes - 1)), b"", b""
            )
            assert getattr(reply, "code", "") == "malformed", (rows, nodes, reply)
            tenant.attach()
            tenant.proves(expected)
            tenant.attach()
