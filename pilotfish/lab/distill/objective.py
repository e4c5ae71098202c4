"""Compute a drafter's training loss on the target's answers, and the drafter's choices.

The loss at a position is λ·(−ln q(t)) + (1 − λ)·H(p, q), where H is the cross-entropy:
- t is the target's token.
- p is the target's distribution. Of the target's K likeliest tokens it covers those that the
  drafter also has, renormalised.
- q is the drafter's distribution over the shared tokens (the tokens that both models have), from
  which it drafts.

Only positions of the answer have a loss. The first term is sequence-level distillation, the second
word-level distillation (Kim & Rush 2016; for drafters: DistillSpec, Zhou et al. 2023).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.lab.distill.training_rows import NOWHERE, TrainingRow

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_AT_ONCE = 8  # number of rows in one forward pass that computes choices


class Objective:
    """Computes the loss and the choices of ``model``.

    shared: the drafter's ids of the v shared tokens, ascending, i64 [v]. hard: λ. threads: number
    of threads that torch uses from now on, in the whole process; None: torch's default.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        shared: NDArray[np.int64],
        hard: float,
        threads: int | None = None,
    ) -> None:
        if threads is not None:
            torch.set_num_threads(threads)
        # The model stays in eval mode during training. With dropout, a resumed run could not repeat
        # a step, because the step would depend on the state of the random generator.
        self.model = model.eval()
        self._hard = hard
        size = model.get_output_embeddings().weight.shape[0]
        self._shared = torch.from_numpy(shared)
        self._place = np.full(size, NOWHERE)  # index in ``shared`` by the drafter's id, [V_d]
        self._place[shared] = np.arange(len(shared))

    def loss(self, rows: Sequence[TrainingRow]) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute two means over l positions (nats): the loss, and −ln q(t) alone."""
        places = [row.learnable for row in rows]
        # l positions of all rows, width d, vocabulary v: states [l, d], log-probabilities [l, v]
        states = torch.cat(
            [
                states[torch.from_numpy(row.places[positions])]
                for row, states, positions in zip(rows, self._states(rows), places, strict=True)
            ]
        )
        logs = torch.log_softmax(self._logits(states), -1)
        labels = np.concatenate(
            [np.array(row.labels)[positions] for row, positions in zip(rows, places, strict=True)]
        )
        hard = -logs[torch.arange(len(labels)), torch.from_numpy(self._place[labels])].mean()
        lines, columns, shares = self._likely_tokens(rows, places)
        if not lines or self._hard == 1.0:
            return hard, hard.detach()
        target_shares = torch.tensor(shares, dtype=torch.float32)
        soft = -(logs[torch.tensor(lines), torch.tensor(columns)] * target_shares).sum() / len(
            labels
        )
        return self._hard * hard + (1 - self._hard) * soft, hard.detach()

    def choices(self, rows: Sequence[TrainingRow]) -> Iterator[NDArray[np.int64]]:
        """Yield the model's choices for each row's n tokens, ids, i64 [n].

        A choice is NOWHERE if the row has no position for the token.
        """
        with torch.no_grad():
            for start in range(0, len(rows), _AT_ONCE):
                batch = rows[start : start + _AT_ONCE]
                for row, states in zip(batch, self._states(batch), strict=True):
                    logits = self._logits(states[torch.from_numpy(np.maximum(row.places, 0))])
                    choice = self._shared[logits.argmax(1)].numpy()
                    yield np.where(row.places >= 0, choice, NOWHERE)

    def _likely_tokens(
        self, rows: Sequence[TrainingRow], places: Sequence[NDArray[np.int64]]
    ) -> tuple[list[int], list[int], list[float]]:
        """List the target's likeliest tokens at all l positions, as three lists of equal length.

        The lists have each token's position (below l), its index in ``shared`` (below v), and p.
        """
        lines: list[int] = []
        columns: list[int] = []
        shares: list[float] = []
        pairs = [
            (row, place) for row, positions in zip(rows, places, strict=True) for place in positions
        ]
        for line, (row, place) in enumerate(pairs):
            weights = np.exp(np.array(row.weights[place], dtype=np.float64))
            lines += [line] * len(weights)
            columns += [int(self._place[id]) for id in row.likely[place]]
            shares += (weights / weights.sum()).tolist() if len(weights) else []
        return lines, columns, shares

    def _states(self, rows: Sequence[TrainingRow]) -> torch.Tensor:
        """Compute the last layer's states for b rows, [b, m, d]; m is the longest row's length.

        Shorter rows are padded at the end. Attention is causal, so the padding needs no mask.
        """
        ids = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.long)
        for index, row in enumerate(rows):
            ids[index, : len(row.ids)] = torch.tensor(row.ids)
        states: torch.Tensor = self.model.base_model(input_ids=ids, use_cache=False)[0]
        return states

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits over the shared tokens, [l, v], from states [l, d]."""
        head = self.model.get_output_embeddings()
        logits: torch.Tensor = states @ head.weight[self._shared].T
        if getattr(head, "bias", None) is not None:
            logits = logits + head.bias[self._shared]
        config = self.model.config
        cap = getattr(config, "final_logit_softcapping", None)
        logits = logits if not cap else cap * torch.tanh(logits / cap)
        # Cohere and Falcon-H1 multiply the logits by a factor; Granite divides them
        factor = getattr(config, "logit_scale", None) or 1.0
        factor *= getattr(config, "lm_head_multiplier", None) or 1.0
        divisor = getattr(config, "logits_scaling", None) or 1.0
        return logits * (factor / divisor)
