"""Logits options of a step: the edge's half states them, a worker's half applies them.

In:  works with `RowOptions`. Out: the options and frames of a `Step`; at the worker, the same works
     with the same options.

A worker processes its logits before it takes the likeliest tokens: otherwise these might all be
tokens that the request's grammar forbids. Bias and penalties travel as the request states them, and
the worker counts the tokens of the sequence itself. A grammar travels as masks of its rows. So only
the edge compiles grammars and bounds their cost, and all workers forbid the same tokens.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import MalformedError, TokenOutOfRangeError
from pilotfish.engines.engine import Work
from pilotfish.speculation.logits_options import LogitsOptions, RowOptions
from pilotfish.speculation.masks import Masks
from pilotfish.wire.codecs.masks import decode_masks, encode_masks
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import ItemOptions

_BIASES = np.dtype([("token", "<u4"), ("bias", "<f4")])


class OptionFrames(NamedTuple):
    """The options of a step's items, in order, and two frames: biases, and compressed masks."""

    items: list[ItemOptions | None]
    biases: bytes
    masks: bytes


class StatedWorks(NamedTuple):
    """The works of a pass, with what is the same for all workers, so that it is made only once.

    options: None if no work has any. masks: the masks of all requested rows; None if no row is
    masked.
    """

    works: Sequence[Work]
    options: OptionFrames | None
    masks: Masks | None


# The edge's half


def state_works(works: Sequence[Work], vocab: int) -> StatedWorks:
    """Encode the options of a pass's works."""
    return StatedWorks(works, _encode_options(works), _masks_of(works, vocab))


def _encode_options(works: Sequence[Work]) -> OptionFrames | None:
    """Make the options of works; None if no work has any."""
    if all(work.options is None for work in works):
        return None
    stated = [work.options for work in works if work.options is not None]
    biases = [item for each in stated for item in each.options.logit_bias.items()]
    masks = [each.masks for each in stated if each.masks is not None]
    return OptionFrames(
        [None if work.options is None else _item_options(work.options) for work in works],
        np.array(biases, _BIASES).tobytes(),
        encode_masks(Masks.join(masks)) if masks else b"",
    )


def _item_options(stated: RowOptions) -> ItemOptions:
    options = stated.options
    return ItemOptions(
        since=stated.prompt_length,
        biases=len(options.logit_bias),
        repetition_penalty=options.repetition_penalty,
        frequency_penalty=options.frequency_penalty,
        presence_penalty=options.presence_penalty,
        masked=stated.masks is not None,
    )


def _masks_of(works: Sequence[Work], vocab: int) -> Masks | None:
    """Return the masks of all requested rows of a pass; None if no row is masked."""
    masks = [None if work.options is None else work.options.masks for work in works]
    if all(each is None for each in masks):
        return None
    return Masks.join(
        [
            Masks.unrestricted(work.rows, vocab) if each is None else each
            for work, each in zip(works, masks, strict=True)
        ]
    )


# The worker's half


def decode_options(
    options: Sequence[ItemOptions | None],
    frames: Sequence[Buffer],
    works: Sequence[Work],
    vocab: int,
) -> list[Work]:
    """Return a step's works with their options. frames: biases, and masks.

    Raises:
        MalformedError: if options, frames and works contradict each other.
        TokenOutOfRangeError: if a biased token is not valid.
    """
    if len(options) != len(works):
        raise MalformedError("A step does not have options for each of its items.")
    pairs = [*zip(works, options, strict=True)]
    if len(frames[0]) != _BIASES.itemsize * sum(each.biases for _, each in pairs if each):
        raise MalformedError("The biases of a step do not belong to its items.")
    biases = np.frombuffer(frames[0], _BIASES)
    if len(biases) and int(biases["token"].max()) >= vocab:
        raise TokenOutOfRangeError(f"This model has no token {biases['token'].max()}.")
    rows = sum(work.rows for work, each in pairs if each and each.masked)
    if not rows and len(frames[1]):
        raise MalformedError("A step has masks, but no item has masked rows.")
    masks = decode_masks(frames[1], rows, vocab) if rows else None
    decoded, bias_end, row_end = [], 0, 0
    for work, each in pairs:
        if each is None:
            decoded.append(work)
            continue
        if not work.rows or each.since > len(work.tokens) - work.rows + 1:
            raise MalformedError("An item of a step has options, but no rows after its prompt.")
        if work.nodes and work.nodes != work.rows - 1:
            raise MalformedError("A tree with options needs a row for its root and for each node.")
        bias_begin, bias_end = bias_end, bias_end + each.biases
        part = None
        if each.masked and masks is not None:
            row_begin, row_end = row_end, row_end + work.rows
            part = masks[row_begin:row_end]
        stated = _logits_options(each, biases[bias_begin:bias_end])
        decoded.append(work._replace(options=RowOptions(stated, each.since, part)))
    return decoded


def _logits_options(stated: ItemOptions, biases: NDArray[np.void]) -> LogitsOptions:
    try:
        return LogitsOptions(
            logit_bias=dict(biases.tolist()),
            repetition_penalty=stated.repetition_penalty,
            frequency_penalty=stated.frequency_penalty,
            presence_penalty=stated.presence_penalty,
        )
    except ValueError as error:
        raise MalformedError(f"A step is not valid: {error}.") from error
