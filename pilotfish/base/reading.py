"""Read files from outside, which may be damaged, of another kind, or endless.

`reading_file` converts all errors of reading and decoding a file into one typed error.
`read_content` and `read_text` read a regular file as a whole; a pipe in its place would block, and
an endless file would fill the memory. `naming_file` adds a file's name to the errors of writing it.
The module needs the standard library only.
"""

import codecs
import errno
import os
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MOST_BYTES = 1 << 30  # maximum size (bytes) of a file that is read as a whole
# minimum size (bytes) of a read: the kernel reports size 0 for files of /proc
_LEAST_READ = 1 << 16


@contextmanager
def reading_file(make_error: Callable[[str], Exception]) -> Iterator[None]:
    """Raise ``make_error(problem)`` for any error in reading or decoding a file.

    problem: half a sentence, such as "Permission denied". A missing file is a problem, too; for
    another text, catch `FileNotFoundError` inside the block. The caller checks decoded values.
    """
    try:
        yield
    except OSError as error:
        raise make_error(error.strerror or str(error)) from error
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise make_error(f"it is not UTF-8 text: its byte {error.start} is 0x{byte:02x}") from error
    except RecursionError as error:
        raise make_error("its content is nested too deeply") from error
    except MemoryError as error:
        raise make_error("it is too large for this machine's memory") from error
    except ValueError as error:  # from json, msgspec, tomllib, and from `int` for too many digits
        problem = str(error).partition("; use sys.set_int_max_str_digits")[0]
        raise make_error(problem) from error


@contextmanager
def naming_file(path: Path) -> Iterator[None]:
    """Add the file's name to an `OSError` that lacks it, such as "No space left on device"."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = os.fspath(path)
        raise


def read_content(path: Path, most: int = MOST_BYTES) -> bytes:
    """Return a file's bytes; call it within `reading_file`.

    Raises `OSError`, and `ValueError` if it is not a regular file or has more than ``most`` bytes.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, f"{os.strerror(errno.EISDIR)}, not a file")
        raise ValueError("it is not a regular file")
    parts, left = [], most + 1
    # about the file's size, since `read` allocates as many bytes as it is called with
    step = min(most, max(status.st_size, _LEAST_READ)) + 1
    with os.fdopen(descriptor, "rb") as file:
        while left > 0 and (part := file.read(min(left, step))):
            parts.append(part)
            left -= len(part)
    if left <= 0:
        raise ValueError(f"it is too large: such a file may have at most {most:,} bytes")
    return parts[0] if len(parts) == 1 else b"".join(parts)


def utf8_path(path: Path) -> str:
    """Return a path as a string; its UTF-8 bytes are the file's name.

    C++ libraries encode strings as UTF-8, while Python decodes file names by the locale. Raises
    `UnicodeDecodeError` for a name that is not UTF-8.
    """
    return os.fsencode(path).decode("utf-8")


def without_bom(data: bytes) -> bytes:
    """Remove the byte order mark that some editors and shells put before UTF-8 text."""
    return data.removeprefix(codecs.BOM_UTF8)


def read_text(path: Path, most: int = MOST_BYTES) -> str:
    """Return a UTF-8 file's text without a byte order mark; call it within `reading_file`.

    All line ends become ``\\n``. Raises the errors of `read_content`, and `UnicodeDecodeError`.
    """
    return (
        without_bom(read_content(path, most))
        .decode("utf-8")
        .replace("\r\n", "\n")
        .replace("\r", "\n")
    )
