"""Begin the run file of a watch, or continue it.

In: the settings of a watch. Out: its file, open for writing, and how far the watch had come. A file
of another watch is refused.
"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from msgspec import structs

from pilotfish.base.errors import ConfigError, RunFileError
from pilotfish.base.version import SOFTWARE
from pilotfish.device_runtime import energy
from pilotfish.drafting.text_drafter import TEXT
from pilotfish.engines.artifact import Artifact
from pilotfish.lab import host
from pilotfish.lab.field.matrix_settings import MatrixSettings
from pilotfish.lab.field.recording import Recorder
from pilotfish.lab.field.run import Run
from pilotfish.lab.field.run_clock import begin
from pilotfish.lab.field.run_facts import Facts, Model, Start
from pilotfish.lab.field.watch.clock import Clock
from pilotfish.lab.field.watch.watch_settings import WatchSettings
from pilotfish.lab.field.writable_run_file import has_begun
from pilotfish.lab.runs import changes

_MOST_STARTS = 1_000  # starts that a file keeps: the first one and the newest ones


@dataclass(frozen=True, kw_only=True)
class WatchFile:
    """The file of a watch. last: number of the last round in it; -1: none. off_s: seconds before a
    continued watch's start in which nothing tells that it ran; 0 for a new one.
    """

    recorder: Recorder
    facts: Facts
    last: int = -1
    off_s: float = 0.0


def open_watch(settings: WatchSettings, matrix: MatrixSettings, clock: Clock) -> WatchFile:
    """Create the run file of a watch, or continue the watch in it.

    Nobody knows whether the edge was away while the watch was off. So an outage without an end gets
    the last moment at which the watch is known to have run.

    Raises `ConfigError` if the file has another watch or run, `RunFileError` if it is damaged or
    another command writes it, and OSError if it cannot be written.
    """
    now = _facts(settings, matrix, clock)
    if not has_begun(settings.out):
        return WatchFile(recorder=Recorder.create(settings.out, now), facts=now)
    with Run.open(settings.out) as run:
        before, newest = run.facts, run.last_moment()
    _expect_same(settings.out, before, now)
    moment = begin(newest, unix_s=clock.unix_s(), now_boot_s=clock.boot_s())
    off_s = moment.clock_s - newest.clock_s
    start = Start(host=now.host, off_s=off_s, **vars(moment))
    facts = replace(
        before,
        starts=(before.starts[0], *before.starts[1:][-(_MOST_STARTS - 2) :], start),
        **_changeable(now),
    )
    recorder = Recorder.resume(settings.out)
    try:
        with recorder.together():
            recorder.end_outages(newest.unix_s, newest.clock_s)
            recorder.change_facts(starts=facts.starts, **_changeable(now))
        probed_s = recorder.last_probe_s()
    except BaseException:
        recorder.close()
        raise
    return WatchFile(
        recorder=recorder,
        facts=facts,
        last=-1 if probed_s is None else settings.schedule.number_at(probed_s),
        off_s=off_s,
    )


def reopen(path: Path, facts: Facts) -> Recorder:
    """Open the file of a watch again after a write has failed; create it if it is gone.

    Raises `RunFileError` if it is the file of another run, and OSError if it cannot be opened.
    """
    if not has_begun(path):
        return Recorder.create(path, facts)
    with Run.open(path) as run:
        if run.facts.starts[0] != facts.starts[0]:
            raise RunFileError(f"{path} has another run: move this file away.")
    return Recorder.resume(path)


def _facts(settings: WatchSettings, matrix: MatrixSettings, clock: Clock) -> Facts:
    moment = begin(unix_s=clock.unix_s(), now_boot_s=clock.boot_s())
    is_text = str(settings.draft) == TEXT
    return Facts(
        software=SOFTWARE,
        settings=matrix,
        starts=(Start(host=host.facts(), **vars(moment)),),
        drafter=_drafter(settings.draft),
        target=None,  # known when the edge has been reached
        edge=settings.edge,
        edge_software=None,
        draft_path=TEXT if is_text else str(settings.draft.resolve()),
        keys_path=None if settings.keys is None else str(settings.keys.resolve()),
        note=(settings.note or "").encode(errors="replace").decode(),
        energy=energy.source(energy.rails()),
        device=(settings.name or host.name()).encode(errors="replace").decode(),
        watch=settings.watch,
    )


def _drafter(draft: Path) -> Model:
    if str(draft) == TEXT:
        return Model(TEXT)
    manifest = Artifact.open(draft).manifest
    return Model(manifest.model, manifest.precision, manifest.digest)


def _changeable(facts: Facts) -> dict[str, Any]:
    """Return the facts that a later start may change."""
    return {
        name: getattr(facts, name)
        for name in ("watch", "note", "device", "draft_path", "keys_path", "energy", "software")
    }


def _expect_same(path: Path, before: Facts, now: Facts) -> None:
    """Raise `ConfigError` if the file has another run than the watch that shall begin."""
    if before.watch is None:
        raise ConfigError(f"{path} has a run of `field measure`: name another file by --out.")
    for change in changes(_identity(before), _identity(now)):
        difference = "with other prompts" if change.name == "prompts" else f"with {change}"
        flag = "" if change.name == "prompts" else f"{change.flag.removesuffix('-s')} "
        words = difference.replace("with ", f"with {flag}", 1)
        raise ConfigError(f"The watch in {path} was begun {words}: name another file by --out.")


def _identity(facts: Facts) -> dict[str, Any]:
    """Return what may not change in a watch, by the names of the flags."""
    assert facts.watch is not None
    drafter = " ".join(filter(None, vars(facts.drafter).values()))
    settings = structs.asdict(facts.settings)
    return {
        "edge": facts.edge,
        "every_s": facts.watch.every_s,
        "draft": drafter,
        **{name: settings[name] for name in settings if name not in ("options", "link", "varied")},
    }
