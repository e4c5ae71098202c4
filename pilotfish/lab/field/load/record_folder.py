"""The record in a load's folder: made once, by one device, and read again when a load resumes.

In:  a device at the edge, and a drafter. Out: a `Record`; the target's answers are in a file, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.progress import ProgressDisplay
from pilotfish.device_runtime.device import Device
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.engines.vocabulary import Vocabulary
from pilotfish.lab.field.load.record import Record, record, record_without_drafter
from pilotfish.lab.field.opened_drafters import open_contenders
from pilotfish.lab.field.target_answers import AnswerFile, AnswerHeader, TargetAnswer, answer_all

ANSWERS, DRAFTS = "answers.jsonl", "drafts.npz"


def read_or_record(
    folder: Path,
    device: Device,
    header: AnswerHeader,
    drafter: str | None,
    engine: EngineSettings,
    *,
    draft_ms: float | None,
    resume: bool,
    display: ProgressDisplay,
) -> Record:
    """Load the folder's record, or record the target's answers and the drafts if it has none.

    drafter: the folder of its artifact; None: the record has no drafts. draft_ms: the time of a
    draft in the record; None: as measured here. Raises `UnsupportedError` if no answer can be
    recorded.
    """
    path = folder / DRAFTS
    answers = _answers(folder, device, header, resume=resume, display=display)
    if not path.exists():
        if drafter is None:
            prompts = [device.prompt(header.prompts[answer.prompt]).ids for answer in answers]
            recording = record_without_drafter(prompts, answers)
        else:
            recording = _read_drafts(drafter, engine, header, answers, device.vocabulary, display)
        _with_draft_time(recording, draft_ms).save(path)
    return Record.load(path)


def _answers(
    folder: Path, device: Device, header: AnswerHeader, *, resume: bool, display: ProgressDisplay
) -> list[TargetAnswer]:
    """Return the target's answers: those in the folder, and new ones to the other prompts."""
    with AnswerFile(folder / ANSWERS, header, device.vocabulary.vocab_size, resume=resume) as file:
        missing = len(header.prompts) - len(file.answers)
        report = display.counter("the target answers, prompts", missing)
        for number, answer in enumerate(answer_all(device, header, dict(file.answers)), 1):
            file.add(answer)
            report(number)
        answers = [file.answers[prompt] for prompt in sorted(file.answers)]
    answers = [answer for answer in answers if answer.tokens]
    if not answers:
        raise UnsupportedError("The target answered no prompt: all are too long for it.")
    return answers


def _read_drafts(
    drafter: str,
    engine: EngineSettings,
    header: AnswerHeader,
    answers: Sequence[TargetAnswer],
    vocabulary: Vocabulary,
    display: ProgressDisplay,
) -> Record:
    """Read the answers with the drafter, and time it."""
    display.show("opening the drafter", 0, None)
    (contender,) = open_contenders([drafter], vocabulary, engine)
    report = display.counter("the drafter reads, answers", len(answers))
    recording = record(contender, header, answers, report)
    contender.drafter.release()
    return recording


def _with_draft_time(recording: Record, draft_ms: float | None) -> Record:
    """Set the time of a draft, and that of a prompt's token in proportion."""
    if draft_ms is None or not recording.draft_s:
        return recording
    draft_s = draft_ms * 1e-3
    return Record(
        recording.answers,
        recording.drafter,
        draft_s,
        recording.read_s * draft_s / recording.draft_s,
    )
