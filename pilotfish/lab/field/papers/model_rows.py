"""The distributions of several models along the same answers.

The target answers each prompt alone, and then every model reads the answer. So the models' logits
at each position follow the same text. What a round commits follows the target's law, so this is
the text in which drafts are made and verified.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pilotfish.device_runtime.device import Device
from pilotfish.engines.engine import Work, open_engine
from pilotfish.lab.field.papers.figure import Bench
from pilotfish.speculation.distributions import Sampling, probabilities


@dataclass(frozen=True, eq=False)
class ModelRows:
    """The models' logits at the n tokens of one answer.

    prompt: index of the prompt. logits: for each model, f32 [n, V].
    """

    prompt: int
    logits: Sequence[NDArray[np.float32]]

    def __len__(self) -> int:
        return len(self.logits[0])

    def distribution(
        self, model: int, position: int, temperature: float = 1.0
    ) -> NDArray[np.float64]:
        """Return a model's distribution at one position, f64 [V]."""
        # float64, so that rounding does not exceed the papers' bounds
        row = self.logits[model][position].astype(np.float64)[None]
        exact: NDArray[np.float64] = probabilities(row, Sampling(temperature=temperature))[0]
        return exact


def model_rows(
    bench: Bench, *, tokens: int, temperature: float = 1.0, models: Sequence[Path] | None = None
) -> Iterator[ModelRows]:
    """Answer each prompt with ``tokens`` tokens of the target; yield the models' logits along it.

    models: the artifacts that read the answers, all with the target's vocabulary; None: the target,
    then the drafter.
    """
    bench.expect_common_vocabulary()
    draft, target = bench.pair.paths
    read_by = (target, draft) if models is None else models
    engines = [open_engine(path, threads=bench.threads) for path in read_by]
    with Device(target, threads=bench.threads) as author:
        for prompt, text in enumerate(bench.prompts):
            bench.report("answering prompts", prompt, len(bench.prompts))
            begin = author.prompt(text).ids
            answer = author.generate(
                text,
                protocol="local",
                temperature=temperature,
                seed=bench.seed + prompt,
                max_tokens=tokens,
            ).tokens
            whole = np.concatenate([begin, np.array(answer[:-1], dtype=begin.dtype)])
            work = Work(0, whole, len(answer))
            logits = [engine.run([work])[0].logits.copy() for engine in engines]
            yield ModelRows(prompt, logits)
    bench.report("answering prompts", len(bench.prompts), len(bench.prompts))
