"""From settings to a better drafter: ask, train, export, measure; nothing is made twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from pilotfish.device_runtime.device import Device
from pilotfish.distill import asking
from pilotfish.distill.answers import Lesson, LessonFile
from pilotfish.distill.generating import Asker
from pilotfish.distill.measuring import Measurer, measured
from pilotfish.distill.outcome import Distilled
from pilotfish.distill.rows import Agreement
from pilotfish.distill.run_folder import RunFolder
from pilotfish.distill.settings import DistillSettings
from pilotfish.edge_runtime.process import EdgeServer
from pilotfish.engines.artifact import Artifact
from pilotfish.engines.manifest import MANIFEST_NAME
from pilotfish.export.model import export_model
from pilotfish.wire.errors import UnsupportedError

Told = Callable[[str, int, int, float | None], None]
"""Called as told(what is done, steps done, steps in all, seconds left if that is known)."""

_ALIKE = 0.9  # of the places: where torch's model and the artifact must choose the same
_PROBES = 3  # answers to compare them on


def distill(told: DistillSettings, progress: Told) -> Distilled:
    """Make the drafter better; what a killed run has made is taken up."""
    if (told.edge is None) == (told.target is None):
        raise UnsupportedError("Name the target: --edge ADDRESS, or --target DIR.")
    selection, digest = told.prompting()
    with RunFolder.opened(told.folder) as folder:
        folder.expect(told.kept(digest), "settings")
        before = _exported(told.draft, folder.before, told, progress)
        answers, left_out = _answers(told, folder, before, selection, progress)
        held = [one for one in answers if one.held]
        context = max(len(one.row.ids) for one in answers) + 1
        shared = folder.shared()
        read = partial(_measured, told, context, shared, held, progress)
        if "before" not in folder.facts:
            folder.expect(read(before.path, "acceptance before"), "before")
        at_first = msgspec.convert(folder.facts["before"], dict[str, Agreement])
        learnt = _trained(told, folder, before, answers, shared, context, progress)
        trained = _trained_folder(folder, before)
        after = _exported(str(trained), told.out, told, progress, again=True)
        found = read(after.path, "acceptance after")
        return Distilled(
            drafter=before.manifest.model,
            target=folder.facts["pair"]["target"],
            artifact=str(told.out),
            learnt=sum(not one.held for one in answers),
            held=len(held),
            tokens=sum(len(one.answer) for one in answers),
            left_out=left_out,
            kinds=sorted({one.kind for one in answers if not one.held}),
            before=at_first,
            after=found,
            step=learnt["step"],
            steps=learnt["steps"],
            curve=folder.curve(learnt["steps"]),
        )


def _exported(
    source: str, out: Path, told: DistillSettings, progress: Told, *, again: bool = False
) -> Artifact:
    if not again and (out / MANIFEST_NAME).is_file():
        return Artifact.open(out)

    def at(label: str, done: int, total: int | None) -> None:
        if total:
            progress(f"export, {label}", done, total, None)

    precision: Any = told.precision
    return export_model(source, out, precision=precision, progress=at)


# Answers


def _answers(
    told: DistillSettings,
    folder: RunFolder,
    before: Artifact,
    selection: asking.Selection,
    progress: Told,
) -> tuple[list[Lesson], int]:
    """Ask what was not asked yet; returns the answers, and how many prompts had no room."""
    kept = LessonFile(folder.answers)
    known = folder.facts.get("answers")
    if known is None:
        with _device(told, before) as device:
            folder.expect(_pair(device, before), "pair")
            folder.share(device.pair.shared)
            asker = Asker(device, told.answering, told.sessions)
            at = partial(_at, progress, "answers")
            found, left_out = asker.ask(selection, kept, at)
            known = {"keys": [one.key for one in found], "left_out": left_out}
            folder.expect(known, "answers")
    missing = [key for key in known["keys"] if key not in kept.answers]
    if missing:
        raise UnsupportedError(
            f"{kept.path} lacks {len(missing)} answers: name another --run-folder."
        )
    return [kept.answers[key] for key in known["keys"]], known["left_out"]


def _at(progress: Told, label: str, done: int, total: int) -> None:
    progress(label, done, total, None)


@contextmanager
def _device(told: DistillSettings, before: Artifact) -> Iterator[Device]:
    """Open a device to the edge; an edge of one's own runs as long."""
    own: dict[str, Any] = {"sessions": told.sessions, "sessions_per_client": told.sessions}
    if told.threads is not None:
        own["threads"] = told.threads
    server = nullcontext() if told.target is None else EdgeServer(told.target, **own)
    with server as started:
        address = told.edge if started is None else started.endpoint
        # the drafter drafts nothing here: a thread is enough
        with Device(before.path, address, told.keys, lanes=told.sessions, threads=1) as device:
            yield device


def _pair(device: Device, before: Artifact) -> dict[str, str]:
    target = device.pair.target
    return {
        "drafter": before.manifest.model,
        "target": target.model,
        "vocabulary": target.fingerprint,
    }


# Training and measuring


def _measured(
    told: DistillSettings,
    context: int,
    shared: Any,
    held: Sequence[Lesson],
    progress: Told,
    artifact: Path,
    label: str,
) -> dict[str, Any]:
    measurer = Measurer(artifact, context, told, shared)
    return measured(measurer, held, lambda done: progress(label, done, len(held), None))


def _trained(
    told: DistillSettings,
    folder: RunFolder,
    before: Artifact,
    answers: Sequence[Lesson],
    shared: Any,
    context: int,
    progress: Told,
) -> dict[str, int]:
    """Train, and write the best weights as a Hugging Face folder."""
    known: dict[str, int] | None = folder.facts.get("learnt")
    if known is not None:
        return known
    from pilotfish.distill.weights import (
        TrainableDrafter,
    )  # torch takes seconds, and may not be there

    drafter = TrainableDrafter(
        told.draft, lambda label, done, total: progress(label, done, total or 1, None)
    )
    from pilotfish.distill.training import Trainer

    trainer = Trainer(
        drafter.model,
        folder,
        answers,
        shared,
        told.training,
        seed=told.answering.seed,
        threads=told.threads,
    )
    if not trainer.step:
        _expect_alike(trainer.agreed, Measurer(before.path, context, told, shared), answers)
    learnt = trainer.train(lambda done, total, left_s: progress("training", done, total, left_s))
    drafter.save(_trained_folder(folder, before))
    folder.expect({"step": learnt.step, "steps": learnt.steps}, "learnt")
    for _, path in folder.checkpoints():  # as large as three models
        path.unlink()
    return {"step": learnt.step, "steps": learnt.steps}


def _trained_folder(folder: RunFolder, before: Artifact) -> Path:
    """Name the folder of the trained weights, after which the artifact is called."""
    return folder.trained / f"{Path(before.manifest.model).name}-distilled"


def _expect_alike(agreed: Any, measurer: Measurer, answers: Sequence[Lesson]) -> None:
    """Raise `UnsupportedError` unless torch's model says what the artifact says."""
    rows = [one.row for one in answers[:_PROBES]]
    ours = np.concatenate([measurer.agreed(row) for row in rows])
    share = float(np.mean(ours == np.concatenate(list(agreed(rows)))))
    if share < _ALIKE:
        raise UnsupportedError(
            "transformers reads these weights otherwise than the artifact does: they agree at "
            f"{share:.0%} of the places, and training would make another model of it. Give the "
            "checkpoint's Hugging Face folder."
        )
