"""Export the artifacts that the self-test checks, when each is first needed."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from pilotfish.engines.engine_errors import EngineError
from pilotfish.engines.manifest import OPSET24
from pilotfish.engines.runtime import OPSET24_SINCE, runtime_version
from pilotfish.engines.stage import PROVIDERS as STAGED
from pilotfish.engines.tensorrt.gates import BITS
from pilotfish.lab.selftest.models import (
    BOTH_ENDS,
    KINDS,
    LINEAR,
    TARGET,
    WITHOUT_STAGES,
    drafter_of,
    tiny_models,
)
from pilotfish.lab.selftest.providers import (
    BUILDING,
    CHECKED,
    QUANTISED_REFERENCE,
    REFERENCE,
    TIMED,
    VARIANTS,
    Variant,
)
from pilotfish.lab.selftest.worker import ProviderJob

Show = Callable[[str, int, "int | None"], None]

DEFAULT = "default"
# disk space in bytes that the default model takes in all formats of a provider
DEFAULT_BYTES = 2_000_000_000
STAGES = 3


class CheckArtifacts:
    """Exports artifacts into a folder; `show(label, done, total)` reports the progress.

    Attributes:
        missing: reason why the default model is not available; None while it is.
    """

    def __init__(self, folder: Path, show: Show) -> None:
        self._folder, self._show = folder, show
        self._sources = tiny_models(folder / "sources") | {DEFAULT: DEFAULT}
        self.missing: str | None = None

    def jobs(self, provider: str, *, quick: bool) -> list[ProviderJob]:
        """List the jobs for this provider; the tiny models come first."""
        jobs = []
        for model in KINDS:
            variants = [each for each in VARIANTS[provider] if each.every or model == TARGET]
            if model in LINEAR:
                variants = [
                    each._replace(dialect=_linear_dialect(each.dialect)) for each in variants
                ]
            main = _main_variant(variants)
            jobs += [
                self._tiny_job(provider, model, variant, main=variant == main)
                for variant in dict.fromkeys(variants)
            ]
        return jobs if quick else jobs + self._default_jobs(provider)

    def _tiny_job(self, provider: str, model: str, variant: Variant, *, main: bool) -> ProviderJob:
        """Make a job; in a model's `main` variant, stages and protocols are checked, too."""
        whole = main and model == TARGET
        all_cut = provider in STAGED and provider not in BUILDING
        cut = whole or (main and all_cut and model not in WITHOUT_STAGES)
        both_ends = main and model in BOTH_ENDS
        return self._job(
            model,
            variant,
            reference=self.artifact(model, _reference_variant(model, variant)),
            cut=self.stages(model, variant) if cut else None,
            drafter=self.artifact(drafter_of(model), variant) if both_ends else None,
            timed=whole,
        )

    def _default_jobs(self, provider: str) -> list[ProviderJob]:
        """List the default model's jobs; if it is not available, set `missing` and return []."""
        free = shutil.disk_usage(self._folder).free
        if free < DEFAULT_BYTES:
            self.missing = (
                f"the folder {self._folder.parent} has {free / 1e9:.1f} GB of free space, but "
                f"the default model takes {DEFAULT_BYTES / 1e9:g} GB: set TMPDIR to another "
                "folder"
            )
            return []
        checked = CHECKED[provider]
        if provider == "cpu" and runtime_version() < OPSET24_SINCE:
            checked = checked._replace(dialect=REFERENCE)
        try:
            reference = self.artifact(DEFAULT, Variant(REFERENCE, checked.precision))
        except EngineError as error:
            self.missing = str(error)
            return []
        timed = [self._job(DEFAULT, each, timed=True) for each in TIMED.get(provider, ())]
        return [*timed, self._job(DEFAULT, checked, reference=reference, timed=True)]

    def _job(
        self,
        model: str,
        variant: Variant,
        *,
        reference: Path | None = None,
        cut: Path | None = None,
        drafter: Path | None = None,
        timed: bool,
    ) -> ProviderJob:
        return ProviderJob(
            model=model,
            dialect=variant.dialect,
            precision=variant.precision,
            artifact=str(self.artifact(model, variant)),
            reference=_path_text(reference),
            cut=_path_text(cut),
            drafter=_path_text(drafter),
            timed=timed,
            threads=None if model == DEFAULT else 1,
        )

    def artifact(self, model: str, variant: Variant) -> Path:
        """Return the artifact's folder; export the artifact first if it does not exist.

        Raises:
            EngineError: if the export fails, or the default model cannot be downloaded.
        """
        from pilotfish.export.model import export_model

        path = self._folder / f"{model}-{variant.dialect}-{variant.precision}"
        if not path.exists():
            large = model == DEFAULT
            label = f"the default model as {variant.precision} in {variant.dialect}"
            export_model(
                self._sources[model],
                path,
                precision=variant.precision,
                dialect=variant.dialect,
                progress=(lambda _, done, total: self._show(label, done, total)) if large else None,
            )
        return path

    def stages(self, model: str, variant: Variant) -> Path:
        """Return the folder of the model's stages; split the model first if it is not split."""
        from pilotfish.export.split import split_artifact

        path = self._folder / f"{model}-{variant.dialect}-{variant.precision}-stages"
        if not path.exists():
            split_artifact(self.artifact(model, variant), path, stages=STAGES)
        return path


def _main_variant(variants: Sequence[Variant]) -> Variant:
    """Return the first variant that the installed ONNX Runtime runs, or else the first."""
    from pilotfish.export.dialects import DIALECTS

    new = runtime_version() >= OPSET24_SINCE
    able = (each for each in variants if new or DIALECTS[each.dialect].opset < OPSET24)
    return next(able, variants[0])


def _reference_variant(model: str, variant: Variant) -> Variant:
    """Return the variant that gives the reference for a tiny model's answers."""
    if variant.precision in BITS:
        return Variant(QUANTISED_REFERENCE, variant.precision)
    if model not in LINEAR:
        return Variant(REFERENCE, variant.precision)
    other = "contrib" if variant == Variant("opset24", "fp32") else "opset24"
    return Variant(other, variant.precision)


def _linear_dialect(dialect: str) -> str:
    """Return a dialect that has linear attention, to be used instead of this dialect."""
    return "opset24" if dialect == REFERENCE else dialect


def _path_text(path: Path | None) -> str | None:
    return None if path is None else str(path)
