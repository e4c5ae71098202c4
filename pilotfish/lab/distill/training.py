"""Train a drafter on the target's answers, so that it chooses the target's tokens.

In:  rows of answers (`distill.training_rows`). Out: the weights with the highest agreement with the
    held-out answers.

A step's number alone determines its rows and its learning rate. So a killed run resumes from its
last checkpoint and reaches the same result.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from pilotfish.base.errors import RunFileError, UnsupportedError
from pilotfish.lab.distill.answers import TrainingExample
from pilotfish.lab.distill.checkpoints import restore, restore_facts, store
from pilotfish.lab.distill.measuring import ALL, agreement_by_kind
from pilotfish.lab.distill.objective import Objective
from pilotfish.lab.distill.run_folder import RunFolder
from pilotfish.lab.distill.schedule import rate_at, rows_at, steps_of_epoch
from pilotfish.lab.distill.stages import StageReport
from pilotfish.lab.distill.training_choices import TrainingChoices
from pilotfish.lab.distill.training_rows import TrainingRow

_TIMED = range(3, 9)  # numbers of the steps that are timed; the first steps are slow
_LAYER = re.compile(r"\.(\d+)\.")  # the first number in a weight's name is its layer
_CLIP = 1.0  # maximum norm of the gradient
_BETAS = (0.9, 0.95)
_PACE_LEFT = 0.85  # share of the time limit for steps; evaluations and checkpoints take the rest
_MOST_VALIDATION = 32  # maximum number of answers in an evaluation, which keeps evaluations short


class Best(NamedTuple):
    """The best weights so far. step: their step. alpha: their α on held-out prompts."""

    step: int
    alpha: float


class Learnt(NamedTuple):
    """The result of training. step: step of the best weights. steps: number of steps made."""

    step: int
    steps: int


class Trainer:
    """Trains the model of an objective on answers; stores its state in a run's folder.

    The best weights have the highest α on held-out prompts. Only prompts of kinds that are in
    training count.
    """

    def __init__(
        self,
        objective: Objective,
        folder: RunFolder,
        answers: Sequence[TrainingExample],
        choices: TrainingChoices,
        *,
        seed: int,
    ) -> None:
        self._objective, self._model = objective, objective.model
        self._folder, self._choices, self._seed = folder, choices, seed
        self._learnt = [
            example for example in answers if not example.held and len(example.row.learnable)
        ]
        held = [example for example in answers if example.held]
        kinds = {example.kind for example in self._learnt}
        self._validation = ([example for example in held if example.kind in kinds] or held)[
            :_MOST_VALIDATION
        ]
        if not self._learnt or not held:
            raise UnsupportedError("There is no answer to learn from: give more prompts.")
        self._rows = [example.row for example in self._learnt]
        self._optimizer = self._adamw()
        self._step, self._total = 0, self._most_steps
        self._best = Best(0, -1.0)
        self._looks_since_best = 0  # number of evaluations since the best weights
        self._resume()

    # Steps

    @property
    def _most_steps(self) -> int:
        return max(
            1, round(steps_of_epoch(len(self._learnt), self._choices.batch) * self._choices.epochs)
        )

    def train(self, report: StageReport) -> Learnt:
        """Train to the last step, or until α stops rising; load the best weights at the end."""
        if self._step == 0:
            self._evaluate(report)
        saved_s = began_s = time.monotonic()
        first = self._step
        timed: list[float] = []
        while self._step < self._total and not self._stuck:
            at_s = time.monotonic()
            loss, hard = self._learn(
                rows_at(self._step, self._rows, self._choices.batch, self._seed)
            )
            self._step += 1
            now_s = time.monotonic()
            if self._step in _TIMED:
                timed.append(now_s - at_s)
                if self._step == _TIMED[-1]:
                    self._limit_steps(timed)
            self._folder.add_to_curve({"step": self._step, "loss": loss, "hard": hard})
            if self._step % self._choices.every == 0 or self._step == self._total:
                self._evaluate(report)
            if now_s - saved_s >= self._choices.checkpoint_s or self._step == self._total:
                self._save()
                saved_s = time.monotonic()
            timed_steps = self._step - first - 1  # the first step is not counted, since it is slow
            if not timed_steps:
                began_s = time.monotonic()
            left_s = self._left_s(time.monotonic() - began_s, timed_steps)
            report("training", self._step, self._total, left_s)
        self._load_best()
        return Learnt(self._best.step, self._step)

    @property
    def _stuck(self) -> bool:
        return 0 < self._choices.patience <= self._looks_since_best

    def _left_s(self, took_s: float, steps: int) -> float | None:
        """Estimate the remaining seconds of training; None if no step has been timed.

        took_s: seconds that the last ``steps`` steps took.
        """
        if not steps:
            return None
        left_s = took_s / steps * (self._total - self._step)
        if self._choices.minutes is None or self._step >= _TIMED[-1]:
            return left_s
        # before `_limit_steps` has run, the steps may take longer than the time limit
        return min(left_s, 60 * self._choices.minutes)

    def _limit_steps(self, timed: Sequence[float]) -> None:
        """Reduce the number of steps so that they fit the time limit.

        Timed: seconds of the first steps.
        """
        if self._choices.minutes is None:
            return
        limit = int(self._choices.minutes * 60 * _PACE_LEFT / (sum(timed) / len(timed)))
        self._total = max(_TIMED[-1] + 1, min(self._total, limit))

    def _learn(self, rows: Sequence[TrainingRow]) -> tuple[float, float]:
        """Make one step; return both values of `Objective.loss` (nats)."""
        rate = self._choices.rate * rate_at(self._step, self._total, self._most_steps)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        self._optimizer.zero_grad()
        loss, hard = self._objective.loss(rows)
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP)
        self._optimizer.step()
        if not math.isfinite(loss.item()):
            first = "delete checkpoint-* in that folder, and " if self._folder.checkpoints() else ""
            raise UnsupportedError(
                f"The loss is {loss.item()} at step {self._step} in {self._folder.path}: {first}"
                "give the command again with a lower --rate; the answers stay."
            )
        return loss.item(), hard.item()

    def _adamw(self) -> torch.optim.AdamW:
        kinds: tuple[list[Any], list[Any]] = ([], [])
        for name, weight in self._model.named_parameters():
            number = _LAYER.search(name)
            weight.requires_grad_(number is None or int(number[1]) >= self._choices.frozen)
            if weight.requires_grad:
                kinds[weight.dim() < 2].append(weight)
        groups = [
            {"params": kinds[0], "weight_decay": self._choices.decay},
            {"params": kinds[1], "weight_decay": 0.0},
        ]
        return torch.optim.AdamW(groups, lr=self._choices.rate, betas=_BETAS)

    # Held-out prompts

    def _evaluate(self, report: StageReport) -> None:
        """Measure α on the held-out prompts; store the weights if α is the highest so far."""
        report("evaluating on held-out answers", 0, len(self._validation), None)
        all_choices = self._objective.choices([example.row for example in self._validation])
        agreed = {}
        for number, (example, choices) in enumerate(
            zip(self._validation, all_choices, strict=True), 1
        ):
            agreed[example.key] = example.row.compare_choices(choices)
            report("evaluating on held-out answers", number, len(self._validation), None)
        kinds = agreement_by_kind(self._validation, agreed)
        alpha = kinds[ALL].alpha
        self._folder.add_to_curve(
            {
                "step": self._step,
                "alpha": alpha,
                "kinds": {kind: agreement.alpha for kind, agreement in kinds.items()},
            }
        )
        self._looks_since_best += 1
        if alpha > self._best.alpha:
            self._best, self._looks_since_best = Best(self._step, alpha), 0
            store(self._folder.best, self._weights(), {"step": self._step, "alpha": alpha})

    def _load_best(self) -> None:
        tensors, facts = restore(self._folder.best)
        if facts["step"] != self._best.step:
            raise RunFileError(
                f"{self._folder.best} does not belong to this run: name another --run-folder."
            )
        self._set_weights(tensors)

    # Checkpoints

    def _weights(self) -> dict[str, torch.Tensor]:
        return {
            f"weight.{name}": weight.detach() for name, weight in self._model.named_parameters()
        }

    def _set_weights(self, tensors: dict[str, torch.Tensor]) -> None:
        with torch.no_grad():
            for name, weight in self._model.named_parameters():
                weight.copy_(tensors[f"weight.{name}"])

    def _save(self) -> None:
        """Write a checkpoint, then remove the older checkpoints."""
        older = self._folder.checkpoints()
        tensors = self._weights()
        for number, state in self._optimizer.state_dict()["state"].items():
            tensors |= {f"moment.{number}.{name}": value for name, value in state.items()}
        facts = {
            "step": self._step,
            "total": self._total,
            "best": self._best.step,
            "alpha": self._best.alpha,
            "behind": self._looks_since_best,
        }
        path = self._folder.checkpoint(self._step)
        store(path, tensors, facts)
        for _, old in older:
            if old != path:
                old.unlink(missing_ok=True)

    def _resume(self) -> None:
        """Load the newest checkpoint, if there is one."""
        checkpoints = self._folder.checkpoints()
        self._folder.curve(checkpoints[0][0] if checkpoints else -1)
        if not checkpoints:
            return
        tensors, facts = restore(checkpoints[0][1])
        try:
            self._set_weights(tensors)
            self._set_moments(tensors)
        except (KeyError, RuntimeError) as error:
            raise RunFileError(
                f"The checkpoint {checkpoints[0][1]} belongs to another drafter: name another "
                "--run-folder."
            ) from error
        self._step, self._total = int(facts["step"]), int(facts["total"])
        self._best = Best(int(facts["best"]), float(facts["alpha"]))
        self._looks_since_best = int(facts["behind"])
        if restore_facts(self._folder.best)["step"] != self._best.step:
            # The run was killed between a better evaluation and the next checkpoint. The evaluation
            # will be repeated, and must again count as better.
            self._best = self._best._replace(alpha=-1.0)

    def _set_moments(self, tensors: dict[str, torch.Tensor]) -> None:
        state: dict[int, dict[str, torch.Tensor]] = {}
        for name, value in tensors.items():
            kind, _, rest = name.partition(".")
            if kind == "moment":
                number, _, what = rest.partition(".")
                state.setdefault(int(number), {})[what] = value
        current = self._optimizer.state_dict()
        self._optimizer.load_state_dict({**current, "state": state})
