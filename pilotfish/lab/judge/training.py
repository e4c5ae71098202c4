"""Train a decision head on instances (WISV §V-A).

In:  the instances of `judge.instances`. Out: a `DecisionHead`, with a curve of 26 thresholds (the
     quantiles of its probabilities, as in AutoJudge) and one recommended threshold.

A share of the questions is for validation only. Their loss decides when training stops
(`judge.head_weights`), and the values in the head's card are measured on them.
"""

import math

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.edge_runtime.head import DecisionHead
from pilotfish.edge_runtime.head_file import HeadCard, LinkScale, ModelIdentity, Training, Value
from pilotfish.lab.judge.episodes import MiningRecord
from pilotfish.lab.judge.head_weights import Progress, fit
from pilotfish.lab.judge.instances import GOOD, POOR, InstanceOptions, Instances, split
from pilotfish.lab.judge.thresholds import auc, curve, recommend_threshold, share
from pilotfish.lab.judge.training_settings import TrainingOptions
from pilotfish.speculation.channel import FEATURES

CLIP = 3.0  # bound (standard deviations) at which a head clips a link feature


def train(
    name: str,
    mined: MiningRecord,
    instances: Instances,
    sampling: InstanceOptions,
    options: TrainingOptions,
    progress: Progress = lambda done, most: None,
) -> DecisionHead:
    """Train a head called ``name``.

    sampling: options of the instances, stored in the head's card. progress: callback after each
    epoch; arguments: number of finished epochs, maximum number of epochs. Raises `UnsupportedError`
    if there is too little data, and `EngineError` if torch is not installed.
    """
    training_keys, validation_keys = split(instances.keys, options.validation, options.seed)
    training, validation = instances.subset(training_keys), instances.subset(validation_keys)
    card = HeadCard(
        name=name,
        drafter=ModelIdentity(**mined.drafter),
        target=ModelIdentity(**mined.target),
        features="tokens" if options.tokens else "states",
        link=_link_scale(training) if options.link else None,
        hidden=sampling.form,
        threshold=0.0,
        training=Training(
            questions=len(instances.keys),
            examples=instances.rejected.size,
            task=mined.task,
            seed=options.seed,
        ),
    )
    tensors, epochs = fit(card, training, validation, options, progress)
    record: dict[str, Value] = {
        "slack": mined.slack,
        "right_only": mined.right_only,
        "epochs": epochs,
        "kept_out": len(validation_keys),
    }
    return _describe(DecisionHead(card, tensors), validation, sampling, options, record)


def _describe(
    head: DecisionHead,
    validation: Instances,
    sampling: InstanceOptions,
    options: TrainingOptions,
    record_so_far: dict[str, Value],
) -> DecisionHead:
    """Return the head with its validation curve, threshold and training record.

    record_so_far: the entries of the training record that are known already.
    """
    # logits: [n, K]; good, poor: [n]
    logits = np.stack(
        [_logits(head, validation, k) for k in range(validation.rejected.shape[1])], axis=1
    )
    good = head.logits(validation.drafter, validation.target, validation.tokens, GOOD)
    poor = head.logits(validation.drafter, validation.target, validation.tokens, POOR)
    points = curve(logits)
    chosen = recommend_threshold(points, good[validation.harmful], options.risk)
    bound = -math.inf if chosen is None else chosen.logit or 0.0
    record: dict[str, Value] = {
        **msgspec.structs.asdict(options),
        "channels": sampling.channels,
        "sampling_seed": sampling.seed,
        "relabelled": sampling.relabelling is not None,
        **(msgspec.structs.asdict(sampling.relabelling) if sampling.relabelling else {}),
        **record_so_far,
        "forgiven_good": share(good <= bound),
        "forgiven_poor": share(poor <= bound),
        "harmful_forgiven_good": share(good[validation.harmful] <= bound),
    }
    card = msgspec.structs.replace(
        head.card,
        threshold=0.0 if chosen is None else chosen.threshold,
        curve=points,
        training=msgspec.structs.replace(
            head.card.training, auc=auc(good, validation.harmful), options=record
        ),
    )
    return DecisionHead(card, head.tensors)


def _logits(head: DecisionHead, mismatches: Instances, k: int) -> NDArray[np.float32]:
    """Compute the head's logits z [n] under the k-th channel of each question."""
    logits = np.empty(len(mismatches), np.float32)
    for index, channels in enumerate(mismatches.channels):
        rows = mismatches.question == index
        logits[rows] = head.logits(
            mismatches.drafter[rows], mismatches.target[rows], mismatches.tokens[rows], channels[k]
        )
    return logits


def _link_scale(training_set: Instances) -> LinkScale:
    links = training_set.links.reshape(-1, len(FEATURES))
    return LinkScale(mean=links.mean(0).tolist(), std=links.std(0).tolist(), clip=CLIP)
