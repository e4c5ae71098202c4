"""Run a worker of a federation, which sends the top K of each requested row (specfed §II-§III)."""

from collections.abc import Callable, Sequence

import numpy as np

from pilotfish.base.errors import MalformedError, UnsupportedError
from pilotfish.edge_runtime.node.work import NodeWork, make_ready
from pilotfish.edge_runtime.step_options import decode_options
from pilotfish.edge_runtime.steps import WorkFrames, decode_works, engine_refusals
from pilotfish.engines.engine import Engine
from pilotfish.speculation.ensemble import TopRows, top_rows, top_rows_by_mass
from pilotfish.wire.codecs.topk import TOPK_FORMATS, encode_topk, encode_topk_each
from pilotfish.wire.messages import Buffer
from pilotfish.wire.nodes import Attach, Step


class Worker(NodeWork):
    """Whole model that receives tokens and sends the top K of the requested rows.

    feed_watchdog: function to call before each pass of a step.
    """

    def __init__(self, engine: Engine, feed_watchdog: Callable[[], None] = lambda: None) -> None:
        self._engine = engine
        self._feed_watchdog = feed_watchdog
        self._vocab = engine.model.vocab_size
        self._k, self._values = 0, ""
        self._mass: float | None = None  # retained mass for which the worker chooses K
        self.ready = make_ready(engine.model, engine.model.hidden_size)

    def attach(self, attach: Attach) -> None:
        """Empty the slots, and set K and the format of the probabilities."""
        if attach.values not in TOPK_FORMATS or not attach.top_k:
            raise UnsupportedError(
                "This node is a worker of a federation: it sends the top K of its distributions, "
                f"with K of at least 1, in the formats {', '.join(TOPK_FORMATS)}."
            )
        self._engine.clear_all()
        self._k, self._values, self._mass = attach.top_k, attach.values, attach.mass

    def run_step(self, step: Step, frames: Sequence[Buffer]) -> list[Buffer]:
        """Run a step; return one frame, the top K of each row in the order of the items."""
        expected = 2 if step.options is None else 4
        if len(frames) != expected:
            raise MalformedError(f"This step needs {expected} frames, not {len(frames)}.")
        works = decode_works(WorkFrames(step.items, *frames[:2]), self._engine, self._vocab)
        if step.options is not None:
            works = decode_options(step.options, frames[2:], works, self._vocab)
        with engine_refusals():
            outputs = self._engine.run(works, self._feed_watchdog)
        for work, output in zip(works, outputs, strict=True):
            if work.options is not None:
                work.options.process(output.logits, work.tokens, work.parents)
        if self._mass is not None:
            each = [
                rows
                for work, output in zip(works, outputs, strict=True)
                if work.rows
                for rows in top_rows_by_mass(output.logits, work.temperature, self._mass, self._k)
            ]
            return [encode_topk_each(each, self._vocab, self._values)]
        top = [
            top_rows(output.logits, work.temperature, self._k)
            for work, output in zip(works, outputs, strict=True)
            if work.rows
        ]
        if not top:
            return [b""]
        # [Σ rows, K]
        ids = np.concatenate([rows.ids for rows in top])
        values = np.concatenate([rows.values for rows in top])
        return [encode_topk(TopRows(ids, values), self._vocab, self._values)]
