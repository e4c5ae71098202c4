"""Engine files: a line of JSON with the facts about an engine, then its plan.

    {"format": "pilotfish-engine", "version": 1, "key": {…}, "size": …, "sha256": "…"}\\n
    the plan: TensorRT's serialised engine, `size` bytes

The cache of this machine holds engine files, and so does the folder `engines` of an artifact. All
of this needs neither a GPU nor TensorRT.
"""

from __future__ import annotations

import hashlib
import stat
from pathlib import Path
from typing import Annotated, Literal

import msgspec

from pilotfish.engines.artifact import Artifact, sha256_of
from pilotfish.engines.cache import replace_file
from pilotfish.engines.cudart import Gpu
from pilotfish.engines.engine_errors import EngineFileError
from pilotfish.engines.manifest import Sha256, Size
from pilotfish.engines.tensorrt.edition import EDITIONS, RTX, Edition
from pilotfish.engines.tensorrt.profiles import Profiles
from pilotfish.engines.tensorrt.targets import INSTEAD, USUAL

SUFFIX = ".engine"
FOLDER = "engines"  # the folder within an artifact
HEAD = "-head"  # ends the name of a head's engine in its key
HEADER_LIMIT = 1 << 16  # bytes
VERSION = 1
LATER = "+"  # ends a compute capability that stands for all later ones, too
_COMPUTE = r"[0-9]{1,4}\.[0-9]{1,4}\+?"
# \Z, since $ lets a line feed pass
Word = Annotated[str, msgspec.Meta(pattern=r"^[0-9A-Za-z._+-]{1,64}\Z")]


class EngineKey(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The facts that an engine depends on; if any field differs, another engine is needed.

    `provider` names the edition, `tensorrt` is its version. `gpu` is the name of the GPU; "" of an
    engine for every GPU of its compute capabilities. `compute` lists these, as in
    "8.0,8.6,8.9,12.0+". `artifact` is the artifact's digest, and ends with "-head" for the engine
    of a head. `profiles` is the digest of all shapes; `slots` and `context` are the numbers for
    which the profiles were made.
    """

    provider: Word
    tensorrt: Word
    gpu: Annotated[str, msgspec.Meta(pattern=r"^[ -~]{0,256}\Z")]
    compute: Annotated[str, msgspec.Meta(pattern=rf"^{_COMPUTE}(,{_COMPUTE}){{0,99}}\Z")]
    artifact: Word
    dialect: Word
    precision: Word
    slots: Size
    context: Size
    profiles: Word

    @property
    def name(self) -> str:
        """The file's name: the provider, and a hash of the key of 32 hex digits."""
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()[:32]
        return f"{self.provider}-{digest}{SUFFIX}"

    def runs_on(self, gpu: Gpu) -> bool:
        """Whether the engine is for this GPU."""
        if self.gpu and self.gpu != gpu.name:
            return False
        return any(_covers(each, gpu.compute) for each in self.compute.split(","))


class Header(msgspec.Struct, frozen=True, kw_only=True):
    """The first line of an engine file; `size` is the plan's length in bytes."""

    format: Literal["pilotfish-engine"] = "pilotfish-engine"
    version: int = VERSION
    key: EngineKey
    size: Annotated[int, msgspec.Meta(ge=1)]
    sha256: Sha256


class _NewerFileError(EngineFileError):
    """An engine file of a version that only a newer Pilotfish reads."""


class _AnyHeader(msgspec.Struct):
    """What the headers of all versions have."""

    format: Literal["pilotfish-engine"]
    version: int


def engine_name(artifact: Artifact, *, head: bool = False) -> str:
    """Return the name of an artifact's engines in their keys, or that of its head's engines."""
    return artifact.manifest.digest + HEAD * head


def shipped_path(artifact: Artifact, key: EngineKey) -> Path:
    """Return the path of an engine's file in the artifact's folder."""
    return artifact.path / FOLDER / key.name


def engine_files(artifact: Artifact) -> list[Path]:
    """List all engine files in the artifact's folder."""
    return sorted((artifact.path / FOLDER).glob(f"*{SUFFIX}"))


def shipped_engines(artifact: Artifact, provider: str, *, head: bool = False) -> list[Path]:
    """List a provider's engine files in the artifact's folder; none that are the other kind's.

    head: whether engines of the artifact's head are wanted, or the artifact's own. A file whose
    kind cannot be read is listed.
    """
    other = engine_name(artifact, head=not head)
    return [
        path
        for path in engine_files(artifact)
        if _edition_by_name(path).provider == provider and _artifact_of(path) != other
    ]


def _artifact_of(path: Path) -> str | None:
    """Return the name of the artifact that an engine was built from; None if it is not readable."""
    try:
        return read_header(path).key.artifact
    except EngineFileError:
        return None


def write_engine(path: Path, key: EngineKey, plan: bytes | memoryview) -> None:
    """Write an engine file atomically."""
    header = Header(key=key, size=len(plan), sha256=hashlib.sha256(plan).hexdigest())
    replace_file(path, msgspec.json.encode(header) + b"\n", plan)


def read_header(path: Path) -> Header:
    """Read the header of an engine file, and compare the file's length with it.

    Raises:
        EngineFileError: if it is no engine file, was written by a newer Pilotfish, or is truncated.
    """
    try:
        status = path.stat()
        if not stat.S_ISREG(status.st_mode):  # to open a pipe would wait for its writer
            raise EngineFileError(f"{path} is not a file")
        with path.open("rb") as file:
            line = file.readline(HEADER_LIMIT)
    except OSError as error:
        raise _unreadable_error(path, error) from None
    whole = status.st_size
    try:
        version = msgspec.json.decode(line, type=_AnyHeader).version
        if version > VERSION:
            raise _NewerFileError(
                f"{path} was written by a newer Pilotfish (version {version} of the file; this "
                f"Pilotfish reads {VERSION})"
            )
        header = msgspec.json.decode(line, type=Header)
    except (ValueError, RecursionError):  # ValueError: msgspec's, or invalid UTF-8
        problem = "is not an engine file" if whole else "is empty"
        raise EngineFileError(f"{path} {problem}") from None
    if whole - len(line) != header.size:
        raise EngineFileError(
            f"{path} holds {whole - len(line):,} of the {header.size:,} bytes of its engine"
        )
    return header


def read_plan(path: Path, header: Header) -> bytes:
    """Read the plan of an engine file.

    Raises:
        EngineFileError: if it differs from the header's SHA-256, or cannot be read.
    """
    try:
        with path.open("rb") as file:
            file.readline(HEADER_LIMIT)
            plan = file.read(header.size)
    except OSError as error:
        raise _unreadable_error(path, error) from None
    if hashlib.sha256(plan).hexdigest() != header.sha256:
        raise _damaged_error(path)
    return plan


def check_engine(
    path: Path,
    artifact: Artifact,
    *,
    tensorrt: str | None = None,
    gpu: Gpu | None = None,
    slots: int = 1,
    context: int = 1,
    head: bool | None = None,
    whole: bool = True,
) -> Header:
    """Check that an engine file can serve an artifact; return its header. This needs no GPU.

    Args:
        tensorrt: version of the TensorRT that shall run the engine; None: any.
        gpu: GPU that shall run the engine; None: any.
        slots: required number of slots.
        context: required number of positions per slot.
        head: whether the engine must be that of the artifact's head, or must not; None: either.
        whole: whether to read the plan, too, and compare its SHA-256.

    Raises:
        EngineFileError: if it cannot; the message is one sentence with the command that mends it.
    """
    edition = _edition_by_name(path)
    wanted, compute = _sizes(slots, context), USUAL

    def unfit(problem: str, mend: str = "build it again") -> EngineFileError:
        command = build_command(edition, artifact.path, slots, context, compute)
        return EngineFileError(f"{problem}: {mend}: {command}")

    try:
        header = read_header(path)
        key = header.key
        slots, context, compute = max(slots, key.slots), max(context, key.context), key.compute
        if whole:
            _check_plan(path, header)
    except _NewerFileError as error:
        raise unfit(str(error), "update Pilotfish, or build it again") from None
    except EngineFileError as error:
        raise unfit(str(error), "copy the file again, or build it again") from None
    if key.provider != edition.provider:
        raise unfit(f"{path} is named as an engine of {edition.provider}, but is not")
    names = [engine_name(artifact, head=each) for each in (False, True) if head in {None, each}]
    if key.artifact not in names:
        raise unfit(
            f"{path} was built from another artifact (digest {key.artifact}; this artifact's is "
            f"{names[0]})"
        )
    if tensorrt is not None and key.tensorrt != tensorrt:
        raise unfit(
            f"{path} was built by {edition.title} {key.tensorrt}, which is not the installed "
            f"version {tensorrt}",
            "build it again with the installed version",
        )
    if gpu is not None and not key.runs_on(gpu):
        compute = gpu.compute
        target = f"{key.gpu}, " * bool(key.gpu) + f"compute capability {key.compute}"
        problem = (
            f"{path} was built for GPUs of {target}, and this machine's GPU, {gpu.name}, has "
            f"{compute}"
        )
        if edition.any_gpu and compute in INSTEAD:
            raise EngineFileError(f"{problem}: {INSTEAD[compute]}")
        raise unfit(problem)
    if key.slots < slots or key.context < context:
        raise unfit(
            f"{path} was built for {_sizes(key.slots, key.context)}, and {wanted} are wanted",
            "build a larger one",
        )
    is_head = key.artifact != engine_name(artifact)
    profiles = Profiles.for_engine(artifact, key.slots, key.context, head=is_head)
    if key.profiles != profiles.digest:
        raise unfit(f"{path} was built by a Pilotfish that ran other shapes")
    return header


def build_command(edition: Edition, folder: Path, slots: int, context: int, compute: str) -> str:
    """Return the command that builds such an engine of the artifact in a folder.

    The smallest and usual values are left out.
    """
    return (
        edition.command(folder)
        + f" --slots {slots}" * (slots > 1)
        + f" --context {context}" * (context > 1)
        + f" --compute {compute}" * (edition.any_gpu and compute != USUAL)
    )


def _edition_by_name(path: Path) -> Edition:
    """Return the edition that a file's name begins with; names are `EngineKey.name`."""
    fitting = [each for each in EDITIONS if path.name.startswith(f"{each.provider}-")]
    return max(fitting, key=lambda each: len(each.provider), default=RTX)


def _check_plan(path: Path, header: Header) -> None:
    """Compare the plan's SHA-256 with the header's, without holding the plan in memory."""
    try:
        with path.open("rb", buffering=0) as file:
            file.seek(-header.size, 2)
            digest = sha256_of(file)
    except OSError as error:  # the file has changed since its header was read
        raise _unreadable_error(path, error) from None
    if digest != header.sha256:
        raise _damaged_error(path)


def _unreadable_error(path: Path, error: OSError) -> EngineFileError:
    return EngineFileError(f"{path} cannot be read: {error.strerror}")


def _damaged_error(path: Path) -> EngineFileError:
    return EngineFileError(f"{path} is damaged, because its SHA-256 differs from its first line's")


def _sizes(slots: int, context: int) -> str:
    number = "1 slot" if slots == 1 else f"{slots} slots"
    return number + f" of {context} tokens" * (context > 1)


def _covers(listed: str, compute: str) -> bool:
    """Whether a listed compute capability, such as "8.9" or "12.0+", covers that of a GPU."""
    if not listed.endswith(LATER):
        return listed == compute
    least, wanted = (
        tuple(map(int, each.split("."))) for each in (listed.removesuffix(LATER), compute)
    )
    return wanted >= least
