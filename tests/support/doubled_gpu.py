"""Doubles of NVIDIA's libraries in every process of a command, and a target that errs.

By ``PILOTFISH_PROTOCOLS=tests.support.doubled_gpu``, whose modules all processes import. In an edge
the last row of passes of several rows is wrong: `stream`, which asks for one at a time, never shows
it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import pytest

from pilotfish.engines.onnx_decoder import Decoder, Output, Pass
from tests.support import tensorrt_double

tensorrt_double.install(pytest.MonkeyPatch(), "10.16.2")


def _mirror_last_rows() -> None:
    forward = Decoder.forward

    def wrong(decoder: Decoder, passes: Sequence[Pass]) -> list[Output]:
        answers = forward(decoder, passes)
        for item, answer in zip(passes, answers, strict=True):
            if item.row_count > 1:
                answer.logits[-1] = answer.logits[-1, ::-1].copy()
        return answers

    Decoder.forward = wrong


if "edge" in sys.argv:
    _mirror_last_rows()
