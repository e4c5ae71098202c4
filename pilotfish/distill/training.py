"""Train a drafter on a target's answers, so that it says what the target says.

In:  rows of answers (`distill.rows`). Out: the weights that agreed most on the held-out ones.

The loss at a place is λ·(−ln q(t)) + (1 − λ)·H(p, q): t is the target's token, p the target's
distribution over its K likeliest tokens that the drafter has, renormalised, and q the drafter's
over the shared tokens, which is what it drafts from. (Sequence-level and word-level distillation,
Kim & Rush 2016; for drafters: DistillSpec, Zhou et al. 2023.) Only the answer's tokens count.

A step is settled by its number alone: which rows, at which rate. So a run that is killed goes on
from its last checkpoint as if nothing had happened.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pilotfish.distill.answers import Lesson
from pilotfish.distill.checkpoints import restore, restore_facts, store
from pilotfish.distill.measuring import ALL, by_kind
from pilotfish.distill.rows import TrainingRow
from pilotfish.distill.run_folder import RunFolder
from pilotfish.distill.schedule import rate_at, rows_at, steps_of_epoch
from pilotfish.distill.training_choices import TrainingChoices
from pilotfish.wire.errors import RunFileError, UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_TIMED = range(3, 9)  # steps by which the pace is measured; the first ones are slow
_CLIP = 1.0  # norm of a gradient
_BETAS = (0.9, 0.95)
_AT_ONCE = 8  # rows of an evaluation
_PACE_LEFT = 0.85  # of the minutes are for steps; the rest is for looks and checkpoints
_MOST_LOOKED = 32  # answers of a look, which takes as long as some steps


class Best(NamedTuple):
    """The step whose weights agreed most with the target on held-out prompts, and how much."""

    step: int
    alpha: float


class Learnt(NamedTuple):
    """What came of it. step: the one whose weights are the best. steps: made in all."""

    step: int
    steps: int
    alpha: float


Steps = Callable[[int, int, float], None]
"""Called as told(steps done, steps in all, seconds left)."""


class Trainer:
    """Trains ``model`` on answers, in a run's folder.

    shared: the drafter's ids [v], ascending, that the target has too. kinds: those that are learnt,
    by whose held-out prompts the best weights are chosen.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        folder: RunFolder,
        answers: Sequence[Lesson],
        shared: NDArray[np.int64] | None,
        choices: TrainingChoices,
        *,
        seed: int,
        threads: int | None,
    ) -> None:
        self._model, self._folder, self._choices, self._seed = model, folder, choices, seed
        if threads is not None:
            torch.set_num_threads(threads)
        self._learnt = [one for one in answers if not one.held and len(one.row.learnable)]
        held = [one for one in answers if one.held]
        kinds = {one.kind for one in self._learnt}
        self._looked = ([one for one in held if one.kind in kinds] or held)[:_MOST_LOOKED]
        if not self._learnt or not held:
            raise UnsupportedError("There is nothing to learn from: give more prompts.")
        size = model.get_output_embeddings().weight.shape[0]
        found = np.arange(size) if shared is None else shared
        self._shared = torch.from_numpy(found)
        self._place = np.full(size, -1)  # [V_d] → [v]
        self._place[found] = np.arange(len(found))
        self._lessons = [one.row for one in self._learnt]
        self._optimizer = self._adamw()
        self._step, self._total = 0, self._most_steps
        self._best = Best(0, -1.0)
        self._behind = 0  # looks since the best one
        self._resume()

    # Steps

    @property
    def step(self) -> int:
        """The steps that are made."""
        return self._step

    @property
    def _most_steps(self) -> int:
        return max(
            1, round(steps_of_epoch(len(self._learnt), self._choices.batch) * self._choices.epochs)
        )

    def train(self, told: Steps) -> Learnt:
        """Go on to the last step, or until it gets no better; the model holds the best weights."""
        if self._step == 0:
            self._look()
        saved_s = began_s = time.monotonic()
        first = self._step
        timed: list[float] = []
        while self._step < self._total and not self._stuck:
            at_s = time.monotonic()
            loss, hard = self._learn(
                rows_at(self._step, self._lessons, self._choices.batch, self._seed)
            )
            self._step += 1
            now_s = time.monotonic()
            if self._step in _TIMED:
                timed.append(now_s - at_s)
                if self._step == _TIMED[-1]:
                    self._settle(timed)
            self._folder.note({"step": self._step, "loss": loss, "hard": hard})
            if self._step % self._choices.every == 0 or self._step == self._total:
                self._look()
            if now_s - saved_s >= self._choices.checkpoint_s or self._step == self._total:
                self._save()
                saved_s = time.monotonic()
            pace_s = (time.monotonic() - began_s) / (self._step - first)
            told(self._step, self._total, pace_s * (self._total - self._step))
        self._take_best()
        return Learnt(self._best.step, self._step, self._best.alpha)

    @property
    def _stuck(self) -> bool:
        return 0 < self._choices.patience <= self._behind

    def _settle(self, timed: Sequence[float]) -> None:
        """Make so many steps as the minutes allow, by the pace of the first ones."""
        if self._choices.minutes is None:
            return
        limit = int(self._choices.minutes * 60 * _PACE_LEFT / (sum(timed) / len(timed)))
        self._total = max(_TIMED[-1] + 1, min(self._total, limit))

    def _learn(self, rows: Sequence[TrainingRow]) -> tuple[float, float]:
        """Make one step; returns the loss, and its part on the target's tokens (nats)."""
        self._model.train()
        rate = self._choices.rate * rate_at(self._step, self._total, self._most_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        loss, hard = self._loss(rows)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP)
        self._optimizer.step()
        if not math.isfinite(loss.item()):
            raise UnsupportedError(
                f"The loss is {loss.item()} at step {self._step}: train with a lower --rate."
            )
        return loss.item(), hard.item()

    def _loss(self, rows: Sequence[TrainingRow]) -> tuple[torch.Tensor, torch.Tensor]:
        places = [row.learnable for row in rows]
        # [l, d] of all rows together, [l, v]
        states = torch.cat(
            [
                states[torch.tensor(np.array(row.at)[found])]
                for row, states, found in zip(rows, self._states(rows), places, strict=True)
            ]
        )
        logs = torch.log_softmax(self._logits(states), -1)
        wanted: list[int] = []  # [l]
        # of each likely token of each place: the place, the shared token, its probability
        lines: list[int] = []
        columns: list[int] = []
        shares: list[float] = []
        for row, found in zip(rows, places, strict=True):
            for place in found:
                weights = np.exp(np.array(row.weights[place], dtype=np.float64))
                lines += [len(wanted)] * len(weights)
                columns += [int(self._place[id]) for id in row.likely[place]]
                shares += (weights / weights.sum()).tolist() if len(weights) else []
                wanted.append(int(self._place[row.labels[place]]))
        hard = -logs[torch.arange(len(wanted)), torch.tensor(wanted)].mean()
        if not lines or self._choices.hard == 1.0:
            return hard, hard.detach()
        told = torch.tensor(shares, dtype=torch.float32)
        soft = -(logs[torch.tensor(lines), torch.tensor(columns)] * told).sum() / len(wanted)
        share = self._choices.hard
        return share * hard + (1 - share) * soft, hard.detach()

    def _states(self, rows: Sequence[TrainingRow]) -> torch.Tensor:
        """Compute the last layer's states, [b, m, d]; what follows a row's end is padding.

        No token sees what is behind it, so padding there needs no mask.
        """
        ids = torch.zeros(len(rows), max(len(row.ids) for row in rows), dtype=torch.long)
        for at, row in enumerate(rows):
            ids[at, : len(row.ids)] = torch.tensor(row.ids)
        found: torch.Tensor = self._model.base_model(input_ids=ids, use_cache=False)[0]
        return found

    def _logits(self, states: torch.Tensor) -> torch.Tensor:
        """Compute logits over the shared tokens, [l, v]."""
        head = self._model.get_output_embeddings()
        logits: torch.Tensor = states @ head.weight[self._shared].T
        if getattr(head, "bias", None) is not None:
            logits = logits + head.bias[self._shared]
        config = self._model.config
        cap = getattr(config, "final_logit_softcapping", None)
        logits = logits if not cap else cap * torch.tanh(logits / cap)
        factor = getattr(config, "logit_scale", None) or 1.0  # Cohere's; Granite's divides
        divisor = getattr(config, "logits_scaling", None) or 1.0
        return logits * (factor / divisor)

    def _adamw(self) -> torch.optim.AdamW:
        frozen = [f"layers.{layer}." for layer in range(self._choices.frozen)]
        kinds: tuple[list[Any], list[Any]] = ([], [])
        for name, weight in self._model.named_parameters():
            weight.requires_grad_(not any(part in name for part in frozen))
            if weight.requires_grad:
                kinds[weight.dim() < 2].append(weight)
        groups = [
            {"params": kinds[0], "weight_decay": self._choices.decay},
            {"params": kinds[1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self._choices.rate, betas=_BETAS)

    # Held-out prompts

    def agreed(self, rows: Sequence[TrainingRow]) -> Iterator[NDArray[np.bool_]]:
        """Find where the model says the target's tokens, bool [n] a row."""
        self._model.eval()
        with torch.no_grad():
            for start in range(0, len(rows), _AT_ONCE):
                some = rows[start : start + _AT_ONCE]
                for row, states in zip(some, self._states(some), strict=True):
                    at = np.array(row.at)
                    logits = self._logits(states[torch.from_numpy(np.maximum(at, 0))])
                    choice = self._shared[logits.argmax(1)].numpy()
                    yield np.where(at >= 0, choice == np.array(row.labels), False)

    def _look(self) -> None:
        """Measure on the held-out prompts, and keep the weights if they are the best so far."""
        found = self.agreed([one.row for one in self._looked])
        agreed = {one.key: hits for one, hits in zip(self._looked, found, strict=True)}
        kinds = by_kind(self._looked, agreed)
        alpha = kinds[ALL].alpha
        self._folder.note(
            {
                "step": self._step,
                "alpha": alpha,
                "kinds": {kind: one.alpha for kind, one in kinds.items()},
            }
        )
        self._behind += 1
        if alpha > self._best.alpha:
            self._best, self._behind = Best(self._step, alpha), 0
            store(self._folder.best, self._weights(), {"step": self._step, "alpha": alpha})

    def _take_best(self) -> None:
        tensors, facts = restore(self._folder.best)
        if facts["step"] != self._best.step:
            raise RunFileError(f"{self._folder.best} is not this run's: name another --run-folder.")
        self._set_weights(tensors)

    # Checkpoints

    def _weights(self) -> dict[str, torch.Tensor]:
        return {f"weight.{name}": one.detach() for name, one in self._model.named_parameters()}

    def _set_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self._model.named_parameters():
                weight.copy_(tensors[f"weight.{name}"])

    def _save(self) -> None:
        """Write a checkpoint, and only then remove the one before."""
        older = self._folder.checkpoints()
        tensors = self._weights()
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"moment.{number}.{name}": value for name, value in state.items()}
        facts = {
            "step": self._step,
            "total": self._total,
            "best": self._best.step,
            "alpha": self._best.alpha,
            "behind": self._behind,
        }
        path = self._folder.checkpoint(self._step)
        store(path, tensors, facts)
        for _, old in older:
            if old != path:
                old.unlink(missing_ok=True)

    def _resume(self) -> None:
        """Go on from the newest checkpoint."""
        there = self._folder.checkpoints()
        self._folder.curve(there[0][0] if there else -1)
        if not there:
            return
        tensors, facts = restore(there[0][1])
        try:
            self._set_weights(tensors)
            self._set_moments(tensors)
        except (KeyError, RuntimeError) as error:
            raise RunFileError(
                f"{there[0][1]} does not fit this drafter: name another --run-folder."
            ) from error
        self._step, self._total = int(facts["step"]), int(facts["total"])
        self._best = Best(int(facts["best"]), float(facts["alpha"]))
        self._behind = int(facts["behind"])
        if restore_facts(self._folder.best)["step"] != self._best.step:
            # killed between a better look and the checkpoint behind it: that look comes again
            self._best = self._best._replace(alpha=-1.0)

    def _set_moments(self, tensors: dict[str, torch.Tensor]) -> None:
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "moment":
                number, _, what = rest.partition(".")
                state.setdefault(int(number), {})[what] = value
        own = self._optimizer.state_dict()
        self._optimizer.load_state_dict({**own, "state": state})
