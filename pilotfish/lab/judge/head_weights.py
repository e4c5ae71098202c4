"""Fit the weights of a decision head (WISV §V-A, equation 26).

The loss is binary cross-entropy; both classes have equal weight.

In: instances for training and for validation. Out: the tensors of a `DecisionHead`, from the epoch
with the least validation loss. In this package only this module needs torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.extras import install_command
from pilotfish.edge_runtime.head import token_buckets
from pilotfish.edge_runtime.head_file import HeadCard, Tensors
from pilotfish.engines.engine_errors import EngineError
from pilotfish.lab.judge.instances import Instances
from pilotfish.lab.judge.model_passes import Floats
from pilotfish.lab.judge.training_settings import TrainingOptions

if TYPE_CHECKING:
    import torch

# factor by which the learning rate is multiplied with token ids: each id is rare in the data
_TOKENS_PACE = 10.0
_THREADS = 1  # torch threads: a step is small, and more threads change the order of sums
_LEAST_SPREAD = 0.01  # lower bound of a state's deviation, as a share of the mean deviation

Progress = Callable[[int, int], None]


@dataclass(frozen=True, eq=False)
class _Data:
    """n mismatches of q questions, each question under K channels, as tensors.

    inputs: standardised states, f32 [n, d]; with token ids, indices of w1's rows, i64 [n, 2].
    question: index of each mismatch's question, i64 [n]. links: standardised features of the
    channels, f32 [q, K, 4]; [q, 1, 0] if the head reads no link. rejected: labels, f32 [n, K].
    """

    inputs: torch.Tensor
    question: torch.Tensor
    links: torch.Tensor
    rejected: torch.Tensor


@dataclass(frozen=True, eq=False)
class _Layers:
    """The weights of a head: z = w2·dropout(ReLU(w1·[u, c] + b1)) + b2 (WISV, equation 25).

    u are states or token ids, c is the channel. w1: weights of u, [d, h]. link: weights of c,
    [4, h]; [0, h] if the head reads no link. b1, w2: [h]. b2: [1].
    """

    w1: torch.Tensor
    link: torch.Tensor
    b1: torch.Tensor
    w2: torch.Tensor
    b2: torch.Tensor

    @classmethod
    def draw(cls, inputs: int, links: int, width: int) -> _Layers:
        """Draw initial weights from ±1/√(number of a unit's inputs), uniformly, as torch does."""
        import torch

        def uniform(*shape: int, reads: int) -> torch.Tensor:
            return ((2 * torch.rand(*shape) - 1) / math.sqrt(reads)).requires_grad_()

        reads = inputs + links
        return cls(
            w1=uniform(inputs, width, reads=reads),
            link=uniform(links, width, reads=reads),
            b1=uniform(width, reads=reads),
            w2=uniform(width, reads=width),
            b2=uniform(1, reads=width),
        )

    def logits(self, data: _Data, rows: torch.Tensor, dropout: float) -> torch.Tensor:
        """Compute z of the mismatches ``rows`` [b], [b, K]; [b, 1] if the head reads no link."""
        from torch.nn import functional

        inputs = data.inputs[rows]
        # state_part: [b, h]; inner: [b, K, h]
        state_part = (
            inputs @ self.w1
            if inputs.is_floating_point()
            else functional.embedding_bag(inputs, self.w1, mode="sum")
        )
        inner = (state_part + self.b1)[:, None] + data.links[data.question[rows]] @ self.link
        logits: torch.Tensor = functional.dropout(inner.relu(), dropout) @ self.w2 + self.b2
        return logits

    def groups(self, options: TrainingOptions) -> list[dict[str, Any]]:
        """Group the weights for AdamW; link weights do not decay, and have a higher learning rate.

        At one learning rate AdamW moves all weights equally fast. Then the thousands of state
        weights memorise the data before the few link weights have learnt anything.
        """
        reads, links = (2 if options.tokens else len(self.w1)), max(len(self.link), 1)
        rate = options.learning_rate * (_TOKENS_PACE if options.tokens else 1.0)
        faster = max(1.0, math.sqrt(reads / links))
        return [
            {"params": [self.w1, self.w2], "lr": rate, "weight_decay": options.weight_decay},
            {"params": [self.b1, self.b2], "lr": rate, "weight_decay": 0.0},
            {"params": [self.link], "lr": rate * faster, "weight_decay": 0.0},
        ]

    def copy(self) -> _Layers:
        """Copy the weights."""
        return _Layers(*(tensor.detach().clone() for tensor in vars(self).values()))


def fit(
    card: HeadCard,
    training_set: Instances,
    validation_set: Instances,
    options: TrainingOptions,
    progress: Progress,
) -> tuple[Tensors, int]:
    """Train; return the tensors of the epoch with the least validation loss, and that epoch."""
    try:
        import torch
    except ModuleNotFoundError as error:
        raise EngineError(
            f"Training needs torch, which is not installed: {install_command('judge')}."
        ) from error
    scale = _state_scale(training_set) if card.features == "states" else None
    with _deterministic(options.seed):
        data, validation = (
            _data(card, part, scale, options) for part in (training_set, validation_set)
        )
        positive = _balance(data)
        inputs = data.inputs.shape[1] if scale else 2 * options.buckets
        layers = _Layers.draw(inputs, card.link_width, options.width)
        optimizer = torch.optim.AdamW(layers.groups(options))
        best, least, best_epoch = layers.copy(), math.inf, 0
        for epoch in range(1, options.epochs + 1):
            for rows in torch.split(torch.randperm(len(training_set)), options.batch):
                optimizer.zero_grad()
                torch.autograd.backward(_loss(layers, data, rows, positive, options.dropout))
                optimizer.step()
            with torch.no_grad():
                all_rows = torch.arange(len(validation_set))
                loss = float(_loss(layers, validation, all_rows, positive, 0.0))
            progress(epoch, options.epochs)
            if loss < least:
                best, least, best_epoch = layers.copy(), loss, epoch
            if epoch - best_epoch >= options.patience:
                break
    tensors = {
        "w1": torch.cat([best.w1, best.link]).T.numpy(),
        **{name: getattr(best, name).numpy() for name in ("b1", "w2", "b2")},
    }
    return (tensors | {"mean": scale[0], "std": scale[1]} if scale else tensors), best_epoch


def _loss(
    layers: _Layers, data: _Data, rows: torch.Tensor, positive: torch.Tensor, dropout: float
) -> torch.Tensor:
    """Compute the mean loss (WISV, equation 26); ``positive`` is the weight of label 1."""
    from torch.nn import functional

    labels = data.rejected[rows]
    logits = layers.logits(data, rows, dropout).expand_as(labels)
    loss: torch.Tensor = functional.binary_cross_entropy_with_logits(
        logits, labels, pos_weight=positive
    )
    return loss


def _balance(data: _Data) -> torch.Tensor:
    """Compute the weight of label 1 that balances the classes: labels of 0 per label of 1."""
    ones = data.rejected.mean()
    if not 0.0 < float(ones) < 1.0:
        raise UnsupportedError(
            "All mismatches to learn from have the same label: mine more questions, or check the "
            "task's outcomes."
        )
    balance: torch.Tensor = (1.0 - ones) / ones
    return balance


def _data(
    card: HeadCard,
    mismatches: Instances,
    scale: tuple[Floats, Floats] | None,
    options: TrainingOptions,
) -> _Data:
    import torch

    inputs: NDArray[Any]
    if scale is None:
        inputs = token_buckets(mismatches.tokens, options.buckets)
        inputs[:, 1] += options.buckets
    else:
        inputs = (
            np.concatenate([mismatches.drafter, mismatches.target], axis=1) - scale[0]
        ) / scale[1]
    links = (
        np.empty((len(mismatches.keys), 1, 0))
        if card.link is None
        else card.link.standardise(mismatches.links)
    )
    return _Data(
        inputs=torch.from_numpy(inputs),
        question=torch.from_numpy(mismatches.question),
        links=torch.from_numpy(links.astype(np.float32)),
        rejected=torch.from_numpy(mismatches.rejected.astype(np.float32)),
    )


def _state_scale(training_set: Instances) -> tuple[Floats, Floats]:
    """Compute mean and standard deviation of each state, over training; f32 [d_D + d_T] each."""
    pair = (training_set.drafter, training_set.target)
    mean = np.concatenate([states.mean(0, dtype=np.float64) for states in pair])
    std = np.concatenate([states.std(0, dtype=np.float64) for states in pair])
    # The lower bound keeps a state that hardly varies in training from dominating elsewhere.
    least = max(_LEAST_SPREAD * float(std.mean()), 1e-6)
    return mean.astype(np.float32), np.maximum(std, least).astype(np.float32)


@contextmanager
def _deterministic(seed: int) -> Iterator[None]:
    """Seed torch's generator and fix its thread count; restore both afterwards."""
    import torch

    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(_THREADS)
        try:
            yield
        finally:
            torch.set_num_threads(threads)
