"""The options of ``pilotfish distill``; a resumed run must repeat some of them."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Annotated, Any

import msgspec

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.settings import setting
from pilotfish.engines.engine_settings import EngineSettings
from pilotfish.lab.distill import prompt_selection
from pilotfish.lab.distill.training_choices import TrainingChoices
from pilotfish.wire.messages import MAX_LOGPROBS

_PRECISIONS = ("fp32", "fp16", "int8", "int4")


class AnswerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options that determine the target's answers."""

    tokens: Annotated[int, setting("maximum number of tokens of an answer", ge=2, le=8192)] = 160
    temperature: Annotated[
        float, setting("temperature of the target's sampling", ge=0.0, le=10.0)
    ] = 0.0
    top: Annotated[
        int,
        setting(
            "number of the target's likeliest tokens at each position whose probabilities are "
            "used for training, besides the token in the answer; 0: none",
            ge=0,
            le=MAX_LOGPROBS,
        ),
    ] = 16
    seed: Annotated[int, setting("seed of all random choices", ge=0)] = 0


class DistillSettings(EngineSettings, frozen=True, kw_only=True):
    """Options of ``pilotfish distill``."""

    draft: Annotated[
        str,
        setting(
            "the drafter's weights: 'default', a GGUF file, a Hugging Face folder or hub id",
            metavar="SOURCE",
        ),
    ]
    out: Annotated[Path, setting("folder for the trained drafter's artifact", metavar="DIR")]
    edge: (
        Annotated[
            str,
            setting(
                "the address of an edge that serves the target", metavar="ADDRESS", exclusive="t"
            ),
        ]
        | None
    ) = None
    target: (
        Annotated[
            Path,
            setting(
                "the target, as for `edge serve`; this command serves it on this machine",
                metavar="MODEL",
                exclusive="target",
            ),
        ]
        | None
    ) = None
    keys: (
        Annotated[Path, setting("folder with device.key and edge.pub", form="keys", metavar="DIR")]
        | None
    ) = None
    run_folder: (
        Annotated[Path, setting("the run's folder (default: OUT-run)", metavar="DIR")] | None
    ) = None
    prompts: Annotated[
        tuple[Path, ...],
        setting(
            "a file of prompts: one per line, or JSON lines with prompt, question or messages; "
            "may be repeated",
            metavar="FILE",
            repeat=True,
        ),
    ] = ()
    count: Annotated[int, setting("maximum number of prompts from the files", ge=0)] = 400
    measure: Annotated[
        tuple[Path, ...],
        setting(
            "a file of prompts that are used only for measuring; may be repeated",
            metavar="FILE",
            repeat=True,
        ),
    ] = ()
    built_in: (
        Annotated[
            int,
            setting(
                "maximum number of built-in prompts to add, so that the drafter does not "
                "forget; 0: none (default: 100 with files, else all)",
                ge=0,
            ),
        ]
        | None
    ) = None
    held: Annotated[
        float,
        setting("share of the prompts to hold out for measuring", form="share", metavar="SHARE"),
    ] = 0.12
    sessions: Annotated[
        int, setting("number of simultaneous sessions with the edge", ge=1, le=256)
    ] = 8
    precision: Annotated[str, setting("precision of the artifact", choices=_PRECISIONS)] = "int8"
    answering: Annotated[AnswerOptions, setting("", title="answers")] = AnswerOptions()
    training: Annotated[TrainingChoices, setting("", title="training")] = TrainingChoices()

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.run_folder or self.out.with_name(f"{self.out.name}-run")

    def select_prompts(self) -> tuple[prompt_selection.Selection, str]:
        """Read and select the prompts; return the selection and the prompts' digest."""
        file_prompts = [
            prompt for path in self.prompts for prompt in prompt_selection.read_prompts(path)
        ]
        most_built_in = self.built_in
        if most_built_in is None:
            most_built_in = 100 if file_prompts else len(prompt_selection.built_in())
        if not file_prompts and not most_built_in:
            raise UnsupportedError("There are no prompts: give --prompts, or --built-in.")
        selection = prompt_selection.select(
            file_prompts,
            prompt_selection.built_in(),
            most_from_files=self.count,
            most_built_in=most_built_in,
            held=self.held,
            measure_only=[
                prompt for path in self.measure for prompt in prompt_selection.read_prompts(path)
            ],
        )
        keys = [prompt.key for prompt in [*selection.learnt, *selection.held]]
        return selection, hashlib.sha256("".join(keys).encode()).hexdigest()

    def answer_facts(self, prompts_digest: str) -> dict[str, Any]:
        """Return the options that determine a run's answers; a resumed run must repeat them."""
        answer_options: dict[str, Any] = msgspec.to_builtins(self.answering)
        return {
            **answer_options,
            "draft": self.draft,
            "precision": self.precision,
            "prompts": prompts_digest,
        }

    def training_facts(self) -> dict[str, Any]:
        """Return the further options that determine a run's training."""
        training_options: dict[str, Any] = msgspec.to_builtins(self.training)
        training_options.pop("checkpoint_s")
        return training_options
