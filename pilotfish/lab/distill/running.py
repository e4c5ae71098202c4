"""Run a distillation: collect answers, train, export, measure.

A resumed run skips the stages that are finished.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from pilotfish.base.errors import UnsupportedError
from pilotfish.device_runtime.device import Device
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import MANIFEST_NAME
from pilotfish.export.atomic import expect_replaceable
from pilotfish.export.model import export_model
from pilotfish.lab.distill import prompt_selection
from pilotfish.lab.distill.answer_collector import AnswerCollector
from pilotfish.lab.distill.answers import TrainingExample, TrainingExampleFile
from pilotfish.lab.distill.distill_settings import DistillSettings
from pilotfish.lab.distill.measuring import Measurer, measure_agreement
from pilotfish.lab.distill.outcome import Distilled
from pilotfish.lab.distill.run_folder import RunFolder
from pilotfish.lab.distill.stages import ANSWERS, StageReport
from pilotfish.lab.distill.trainable_drafter import TrainableDrafter, expect_torch
from pilotfish.lab.distill.training_rows import NOWHERE, Agreement, TrainingRow
from pilotfish.lab.pairs import serving

# Minimum share of positions at which torch's model and the artifact must choose the same token. A
# model with other weights or another forward pass has a share near 0. Quantisation to int4 changes
# only a minority of the choices.
_ALIKE = 0.5
_PROBES = 3  # number of answers on which torch's model and the artifact are compared


def distill(settings: DistillSettings, progress: StageReport) -> Distilled:
    """Distil a drafter; if an earlier run was killed, reuse its results."""
    _expect_possible(settings)
    selection, digest = settings.select_prompts()
    with RunFolder.open(settings.folder) as folder:
        folder.expect(settings.answer_facts(digest), "settings", binding=folder.has_begun)
        if settings.target is not None and "pair" in folder.facts:
            digests = {"target_digest": Artifact.open(settings.target).manifest.digest}
            folder.expect(digests, "pair", binding=folder.answers.exists())
        before = _export(settings.draft, folder.before, settings, progress)
        answers, left_out = _collect_answers(settings, folder, before, selection, progress)
        held_examples = [example for example in answers if example.held]
        context = max(len(example.row.ids) for example in answers)
        shared = folder.read_shared_ids()
        measure = partial(_measure, settings, context, shared, held_examples, progress)
        if "before" not in folder.facts:
            folder.expect(measure(before.path, "acceptance before"), "before")
        agreement_before = msgspec.convert(folder.facts["before"], dict[str, Agreement])
        training_facts = _train(settings, folder, before, answers, shared, context, progress)
        trained = _trained_folder(folder, before)
        after = _export(str(trained), settings.out, settings, progress, rebuild=True)
        agreement_after = measure(after.path, "acceptance after")
        return Distilled(
            drafter=before.manifest.model,
            target=folder.facts["pair"]["target"],
            artifact=str(settings.out),
            learnt=sum(not example.held for example in answers),
            held=len(held_examples),
            tokens=sum(len(example.answer) for example in answers),
            left_out=left_out,
            kinds=sorted({example.kind for example in answers if not example.held}),
            before=agreement_before,
            after=agreement_after,
            step=training_facts["step"],
            steps=training_facts["steps"],
            curve=folder.curve(training_facts["steps"]),
        )


def _expect_possible(settings: DistillSettings) -> None:
    """Check the settings before any long work; raise the error that would end the run later."""
    if (settings.edge is None) == (settings.target is None):
        raise UnsupportedError("Name the target: --edge ADDRESS, or --target DIR.")
    if not settings.answering.top and not settings.training.hard:
        raise UnsupportedError(
            "With --top 0 and --hard 0 there is nothing to learn from: "
            "raise one of these two values."
        )
    for flag, path in (("--target", settings.target), ("--run-folder", settings.folder)):
        if path is not None and path.resolve() == settings.out.resolve():
            raise UnsupportedError(f"--out names the same folder as {flag}: name another folder.")
    expect_replaceable(settings.out)
    expect_torch()


def _export(
    source: str,
    out: Path,
    settings: DistillSettings,
    progress: StageReport,
    *,
    rebuild: bool = False,
) -> Artifact:
    if not rebuild and (out / MANIFEST_NAME).is_file():
        return Artifact.open(out)

    def report(label: str, done: int, total: int | None) -> None:
        if total:
            progress(f"export, {label}", done, total)

    precision: Any = settings.precision
    return export_model(source, out, precision=precision, progress=report)


# Answers


def _collect_answers(
    settings: DistillSettings,
    folder: RunFolder,
    before: Artifact,
    selection: prompt_selection.Selection,
    progress: StageReport,
) -> tuple[list[TrainingExample], int]:
    """Collect the missing answers; return all answers, and the number of too long prompts."""
    examples = TrainingExampleFile(folder.answers)
    record = folder.facts.get("answers")
    if record is None or any(key not in examples.answers for key in record["keys"]):
        progress("opening the target", 0, None)
        with _device(settings, before) as device:
            folder.expect(_pair_facts(device, before), "pair", binding=bool(examples.answers))
            folder.write_shared_ids(device.pair.shared)
            collector = AnswerCollector(device, settings.answering, settings.sessions)
            collected, left_out = collector.collect(selection, examples, partial(progress, ANSWERS))
            record = {"keys": [example.key for example in collected], "left_out": left_out}
            folder.expect(record, "answers", binding=False)
    return [examples.answers[key] for key in record["keys"]], record["left_out"]


@contextmanager
def _device(settings: DistillSettings, before: Artifact) -> Iterator[Device]:
    """Open a device that is connected to the edge; without --edge, start an edge for it."""
    sessions = settings.sessions
    edge = (
        nullcontext(settings.edge)
        if settings.target is None
        else serving(
            settings.target,
            threads=settings.threads,
            sessions=sessions,
            sessions_per_client=sessions,
        )
    )
    # the device only streams the target's answers: one thread is enough for its drafter
    with (
        edge as address,
        Device(before.path, address, settings.keys, lanes=sessions, threads=1) as device,
    ):
        yield device


def _pair_facts(device: Device, before: Artifact) -> dict[str, str]:
    target, welcome = device.pair.target, device.welcome
    assert welcome is not None  # an open device has its edge's welcome
    return {
        "drafter": before.manifest.model,
        "target": target.model,
        "vocabulary": target.fingerprint,
        "target_digest": welcome.digest,
    }


# Training and measuring


def _measure(
    settings: DistillSettings,
    context: int,
    shared: Any,
    held: Sequence[TrainingExample],
    progress: StageReport,
    artifact: Path,
    label: str,
) -> dict[str, Any]:
    measurer = Measurer(artifact, context, settings, shared)
    return measure_agreement(measurer, held, lambda done: progress(label, done, len(held)))


def _train(
    settings: DistillSettings,
    folder: RunFolder,
    before: Artifact,
    answers: Sequence[TrainingExample],
    shared: Any,
    context: int,
    progress: StageReport,
) -> dict[str, int]:
    """Train the drafter, and write the best weights as a Hugging Face folder."""
    record: dict[str, int] | None = folder.facts.get("learnt")
    finished = record is not None and _trained_folder(folder, before).exists()
    folder.expect(
        settings.training_facts(), "training", binding=finished or bool(folder.checkpoints())
    )
    if record is not None and finished:
        return record
    progress("opening the drafter", 0, None)
    drafter = TrainableDrafter(settings.draft, progress)
    # imported here, because importing torch takes seconds
    from pilotfish.lab.distill.objective import Objective
    from pilotfish.lab.distill.training import Trainer

    progress("comparing the drafter in torch with its artifact", 0, None)
    # The output layer may have more rows than the vocabulary has ids. An artifact never chooses
    # these rows, so they stay out of training.
    draft_ids = np.arange(before.manifest.vocab_size) if shared is None else shared
    objective = Objective(drafter.model, draft_ids, settings.training.hard, settings.threads)
    _expect_alike(
        objective.choices, Measurer(before.path, context, settings, shared).choices, answers
    )
    trainer = Trainer(objective, folder, answers, settings.training, seed=settings.answering.seed)
    learnt = trainer.train(progress)
    progress("writing the weights", 0, None)
    drafter.save(_trained_folder(folder, before))
    folder.expect({"step": learnt.step, "steps": learnt.steps}, "learnt", binding=False)
    # delete all checkpoints, since each is as large as three models
    for _, path in folder.checkpoints():
        path.unlink()
    return {"step": learnt.step, "steps": learnt.steps}


def _trained_folder(folder: RunFolder, before: Artifact) -> Path:
    """Return the folder for the trained weights. Its name becomes the artifact's model name."""
    return folder.trained / f"{Path(before.manifest.model).name}-distilled"


def _expect_alike(
    trained: Callable[[list[TrainingRow]], Iterator[NDArray[np.int64]]],
    artifact: Callable[[TrainingRow], NDArray[np.int64]],
    answers: Sequence[TrainingExample],
) -> None:
    """Raise `UnsupportedError` unless torch's model and the artifact agree at enough positions.

    trained, artifact: functions that compute the choices of each. A resumed run is checked, too,
    because the drafter's files may have changed.
    """
    rows = [answer.row for answer in answers[:_PROBES]]
    model_choices, artifact_choices = (
        np.concatenate(list(trained(rows))),
        np.concatenate(list(map(artifact, rows))),
    )
    comparable = model_choices != NOWHERE
    agreement = (
        float(np.mean(model_choices[comparable] == artifact_choices[comparable]))
        if comparable.any()
        else 1.0
    )
    if agreement < _ALIKE:
        raise UnsupportedError(
            f"transformers computes other tokens with these weights than the artifact (both "
            f"agree at {agreement:.0%} of the positions). Either transformers interprets the "
            "weights differently, or the weights have changed since the run was begun. Give "
            "the checkpoint's Hugging Face folder; if the weights have changed, name another "
            "--run-folder."
        )
