"""Run a worker of a federation, which sends the top K of each requested row (specfed §II-§III)."""

from collections.abc import Callable, Sequence

import numpy as np

from pilotfish.base.errors import MalformedError, TokenOutOfRangeError, UnsupportedError
from pilotfish.base.version import SOFTWARE
from pilotfish.edge_runtime.node.work import NodeWork
from pilotfish.edge_runtime.step_slots import ModelSlots, read_numbers
from pilotfish.engines.language_model import LanguageModel
from pilotfish.speculation.ensemble import TopRows, top_rows
from pilotfish.wire.codecs.topk import TOPK_FORMATS, encode_topk
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import VERSION, Attach, Ready, Step


class Worker(NodeWork):
    """Whole model that receives tokens and sends the top K of the requested rows.

    feed_watchdog: function to call during a long step.
    """

    def __init__(
        self, decoder: LanguageModel, feed_watchdog: Callable[[], None] = lambda: None
    ) -> None:
        manifest = decoder.artifact.manifest
        self._slots = ModelSlots(decoder, feed_watchdog)
        self._vocab = manifest.vocab_size
        self._k, self._values = 0, ""
        self.ready = Ready(
            version=VERSION,
            software=SOFTWARE,
            model=manifest.model,
            digest=manifest.digest,
            tokenizer=manifest.tokenizer_fingerprint,
            vocab_size=manifest.vocab_size,
            hidden_size=decoder.hidden_size,
            slots=decoder.slots,
            context=decoder.context,
        )

    def attach(self, attach: Attach) -> None:
        """Empty the slots, and set K and the format of the probabilities."""
        if attach.values not in TOPK_FORMATS or not attach.top_k:
            raise UnsupportedError(
                "This node is a worker of a federation: it sends the top K of its distributions, "
                f"with K of at least 1, in the formats {', '.join(TOPK_FORMATS)}."
            )
        self._slots.forget()
        self._k, self._values = attach.top_k, attach.values

    def run_step(self, step: Step, frames: Sequence[Buffer]) -> list[Buffer]:
        """Run a step; return one frame, the top K of each row in the order of the items."""
        if len(frames) != 2:
            raise MalformedError(f"A step has 2 frames, not {len(frames)}.")
        tokens = read_numbers(frames[0], "<u4")
        if len(tokens) and int(tokens.max()) >= self._vocab:
            raise TokenOutOfRangeError(f"This model has no token {tokens.max()}.")
        outputs = self._slots.run(step.items, tokens, frames[1])
        top = [
            top_rows(answer.logits, item.temperature, self._k)
            for item, answer in zip(step.items, outputs, strict=True)
            if item.rows
        ]
        if not top:
            return [b""]
        # [Σ rows, K]
        ids = np.concatenate([rows.ids for rows in top])
        values = np.concatenate([rows.values for rows in top])
        return [encode_topk(TopRows(ids, values), self._vocab, self._values)]
