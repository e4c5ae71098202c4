"""The outputs that a federation should return, computed from local targets."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.targets.local import LocalTarget
from pilotfish.engines.engine import Work, open_engine
from pilotfish.engines.language_model import Output
from pilotfish.speculation.ensemble import (
    Scheme,
    TopRows,
    aggregate,
    as_logits,
    restrict,
    top_rows,
    top_rows_by_mass,
)
from pilotfish.speculation.masks import Masks
from pilotfish.wire.codecs.topk import decode_topk, encode_topk
from tests.conftest import CONTEXT, VOCAB
from tests.support.federating import SESSIONS, Cast, Opened, WorkerThread, opened, write_list


@dataclass
class Averaged:
    """The average of these models, each run as a local target.

    kept: K; None for all tokens, without a codec.
    """

    models: Sequence[Path]
    weights: Sequence[float]
    top_k: int | None = None
    values: str = "fp16"
    scheme: Scheme = "renormalise"
    mass: float = 0.0  # retained mass for which each row has its own K of at most top_k; 0: none
    targets: list[LocalTarget] = field(init=False)

    def __post_init__(self) -> None:
        self.targets = [
            LocalTarget(open_engine(model, slots=SESSIONS, context=CONTEXT, threads=1))
            for model in self.models
        ]

    def run(self, number: int, works: Sequence[Work]) -> list[NDArray[np.float32]]:
        """Compute each work's logits."""
        flown = [target.run(number, works) for target in self.targets]
        return [
            self.merged([outputs[i] for outputs in flown], work) for i, work in enumerate(works)
        ]

    def merged(self, outputs: Sequence[Output], work: Work) -> NDArray[np.float32]:
        if not work.rows:
            return np.empty((0, 0), np.float32)
        most, temperature = self.top_k or VOCAB, work.temperature
        masks = None
        if work.options is not None:
            masks = work.options.masks
            for each in outputs:
                work.options.process(each.logits, work.tokens, work.parents)
        if self.mass:
            cut = [top_rows_by_mass(each.logits, temperature, self.mass, most) for each in outputs]
            # each row alone, since K differs
            parts = [None if masks is None else masks[at : at + 1] for at in range(len(cut[0]))]
            return np.concatenate(
                [
                    self._average(rows, temperature, part)
                    for rows, part in zip(zip(*cut, strict=True), parts, strict=True)
                ]
            )
        info = [top_rows(each.logits, temperature, most) for each in outputs]
        if self.top_k is None:
            shares = np.array(self.weights) / sum(self.weights)
            total = sum(
                rows.values * np.float32(share) for rows, share in zip(info, shares, strict=True)
            )
            return as_logits(np.asarray(total), temperature)
        return self._average(info, temperature, masks)

    def _average(
        self, info: Sequence[TopRows], temperature: float, masks: Masks | None
    ) -> NDArray[np.float32]:
        """Average the workers' rows as an edge decodes them."""
        received = [
            decode_topk(encode_topk(rows, VOCAB, self.values), len(rows), rows.k, VOCAB)
            for rows in info
        ]
        if masks is not None:
            received = [restrict(rows, masks) for rows in received]
        total = aggregate(self.weights, received, VOCAB, self.scheme, masks)
        return as_logits(total, temperature)


def tokens_of(seed: int, count: int) -> NDArray[np.uint32]:
    return np.random.default_rng(seed).integers(0, VOCAB - 1, count).astype(np.uint32)


@contextmanager
def opened_and_expected(
    cast: Cast, path: Path, names: str, weights: Sequence[float], settings: dict[str, Any]
) -> Iterator[tuple[Opened, Averaged]]:
    """Open a federation of workers in this process, and the average that it should return.

    names: one letter for each worker, its model in the cast. settings: of the list of workers.
    """
    models = [getattr(cast, name) for name in names]
    auto, values = settings["kept"] == "auto", settings.get("values", "fp16")
    whole = not auto and settings["kept"] >= VOCAB and values == "fp32"
    most = settings.get("kept_limit", VOCAB) if auto else settings["kept"]
    expected = Averaged(
        models,
        weights,
        None if whole else most,
        values,
        settings.get("reconstruction", "renormalise"),
        settings["rho"] if auto else 0.0,
    )
    with ExitStack() as stack:
        workers = [stack.enter_context(WorkerThread(model)) for model in models]
        listed = [(name, each.endpoint) for name, each in zip(names, workers, strict=True)]
        write_list(path, listed, weights, **settings)
        yield stack.enter_context(opened(path, cast.a)), expected
