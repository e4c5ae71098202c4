"""Read files that others made, which may be anything: damaged, of another kind, endless.

`reading` is the one place that knows what reading and decoding such a file can raise, and makes one
typed error of it. `content` and `text` read a file as a whole, if it is one: a pipe in its place
would be waited for, and an endless one fills the memory. `naming` is for files that are written.
Standard library only.
"""

import codecs
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_BYTES = 1 << 30  # of a file that is read as a whole
_LEAST_READ = 1 << 16  # also of files whose size the kernel does not tell


@contextmanager
def reading_file(make_error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``told(problem)`` for whatever is wrong with a file that is read or decoded here.

    told: makes the error of half a sentence, such as "Permission denied". A file that is not there
    is such a problem, too: catch `FileNotFoundError` inside where it has words of its own. What has
    the right form and wrong values is the caller's to check.
    """
    try:
        yield
    except OSError as error:
        raise make_error(error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise make_error(
            f"it is not UTF-8 text, by its byte {error.start}, 0x{byte:02x}"
        ) from error
    except RecursionError as error:
        raise make_error("what it holds is nested too deeply") from error
    except MemoryError as error:
        raise make_error("it is too large for this machine's memory") from error
    except ValueError as error:  # json's, msgspec's and tomllib's, and int's for endless digits
        problem = str(error).partition("; use sys.set_int_max_str_digits")[0]
        raise make_error(problem) from error


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Put a file's name into an `OSError` that lacks it, as that of a full disk does."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_content(path: Path, most: int = MOST_BYTES) -> bytes:
    """Read a file's bytes; `OSError` says why not, `ValueError` for what is no file or too large.

    To be called within `reading`.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, f"{os.strerror(errno.EISDIR)}, no file")
        raise ValueError("it is no file")
    parts, left = [], most + 1
    step = min(most, max(status.st_size, _LEAST_READ)) + 1  # what is asked for is allocated at once
    with os.fdopen(descriptor, "rb") as file:
        while left > 0 and (part := file.read(min(left, step))):
            parts.append(part)
            left -= len(part)
    if left <= 0:
        raise ValueError(
            f"it is too large, larger than the {most:,} bytes that such a file may have"
        )
    return parts[0] if len(parts) == 1 else b"".join(parts)


def utf8_path(path: Path) -> str:
    """Return a path as the string whose UTF-8 bytes name the file.

    Libraries in C++ encode a string so, whatever Python decodes file names by in this locale.
    `UnicodeDecodeError` for a name that is not UTF-8.
    """
    return os.fsencode(path).decode("utf-8")


def without_bom(data: bytes) -> bytes:
    """Return UTF-8 text without the byte order mark that some editors and shells put first."""
    return data.removeprefix(codecs.BOM_UTF8)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Read a file of UTF-8 text, whose lines end in ``\\n`` whatever they end in there.

    A byte order mark, which some editors put first, is no part of the text.

    To be called within `reading`; errors are those of `content`, and `UnicodeDecodeError`.
    """
    return (
        without_bom(read_content(path, most))
        .decode("utf-8")
        .replace("\r\n", "\n")
        .replace("\r", "\n")
    )
