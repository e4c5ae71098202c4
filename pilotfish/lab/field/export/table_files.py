"""Write tables into a folder as CSV or Parquet files, a part of the rows at a time.

The files are private, since they hold what run files hold. They get their names when all are
complete, so a command that is killed leaves no table.
"""

import csv
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from datetime import datetime
from io import TextIOWrapper
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Protocol, TypeAlias

from pilotfish.base.errors import UnsupportedError
from pilotfish.base.extras import install_command
from pilotfish.base.files import PRIVATE, move_into_place, partial_path, private_folder
from pilotfish.lab.field.export.columns import TABLES, Column
from pilotfish.lab.field.export.rows import Row

if TYPE_CHECKING:
    from pyarrow import DataType

_ROWS = 10_000  # rows of a table that wait in memory to be written together
_FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # a cell that begins so is one to a spreadsheet


class TableFile(Protocol):
    """A file of one table that is being written."""

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows."""

    def close(self) -> None:
        """Complete the file."""


Opener: TypeAlias = Callable[[IO[bytes], Sequence[Column]], TableFile]


class CsvFile:
    """A table in CSV: UTF-8 with a byte order mark, which spreadsheets need; commas; a heading.

    Lines end in CR and LF (RFC 4180). A text that a spreadsheet would compute has a ``'`` in
    front, and a NUL is written as U+FFFD.
    """

    def __init__(self, file: IO[bytes], columns: Sequence[Column]) -> None:
        self._text = TextIOWrapper(file, encoding="utf-8-sig", newline="")
        # the writer quotes a CR in a text only if lines end in it
        self._writer = csv.writer(self._text, lineterminator="\r\n")
        self._columns = columns
        self._writer.writerow([column.name for column in columns])

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows; a missing value is an empty cell."""
        for row in rows:
            self._writer.writerow([_csv_value(row.get(column.name)) for column in self._columns])

    def close(self) -> None:
        """Complete the file."""
        self._text.flush()
        self._text.detach()


def _csv_value(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, datetime):
        return value.isoformat(sep=" ", timespec="milliseconds")
    if isinstance(value, str):
        text = value.replace(
            "\0", "\ufffd"
        )  # Python 3.10 cannot write it, and others do not read it
        return f"'{text}" if text.startswith(_FORMULA) else text
    return value


class ParquetFile:
    """A table in Apache Parquet; needs the extra ``table``, or raises `UnsupportedError`."""

    def __init__(self, file: IO[bytes], columns: Sequence[Column]) -> None:
        expect_parquet()
        import pyarrow
        from pyarrow import parquet

        kinds: dict[str, DataType] = {
            "text": pyarrow.string(),
            "integer": pyarrow.int64(),
            "number": pyarrow.float64(),
            "boolean": pyarrow.bool_(),
            "time": pyarrow.timestamp("ms"),
        }
        self._columns = columns
        self._schema = pyarrow.schema([(column.name, kinds[column.kind]) for column in columns])
        self._writer = parquet.ParquetWriter(file, self._schema)
        self._table_of = pyarrow.Table.from_pydict

    def write(self, rows: Sequence[Row]) -> None:
        """Append rows as a group."""
        values = {
            column.name: [_parquet_value(row.get(column.name)) for row in rows]
            for column in self._columns
        }
        self._writer.write_table(self._table_of(values, schema=self._schema))

    def close(self) -> None:
        """Complete the file."""
        self._writer.close()


def _parquet_value(value: Any) -> Any:
    return None if value == "" else value


def expect_parquet() -> None:
    """Raise `UnsupportedError`, which has the command to install it, if pyarrow is missing."""
    try:
        import pyarrow  # noqa: F401  # only whether it is installed
    except ModuleNotFoundError as error:
        raise UnsupportedError(
            f"Parquet needs pyarrow, which is not installed: {install_command('table')}. Or export "
            "by --csv."
        ) from error


FORMATS: dict[str, Opener] = {"csv": CsvFile, "parquet": ParquetFile}
"""What opens a file, by the end of its name."""


@contextmanager
def tables(folder: Path, ending: str) -> Iterator[Callable[[str, Row], None]]:
    """Yield a function that adds a row to a table; on exit, give the files their names.

    Raises `UnsupportedError` if the folder has one of the files already, and `OSError`.
    """
    paths = {name: folder / f"{name}.{ending}" for name in TABLES}
    for path in paths.values():
        if path.exists():
            raise UnsupportedError(f"{path} exists: name another folder, or remove its tables.")
    private_folder(folder)
    partials = {name: partial_path(path) for name, path in paths.items()}
    try:
        with ExitStack() as stack:
            opened = {}
            waiting: dict[str, list[Row]] = {name: [] for name in TABLES}
            for name, partial in partials.items():
                file = stack.enter_context(_new_private_file(partial))
                opened[name] = FORMATS[ending](file, TABLES[name])
                stack.enter_context(closing(opened[name]))

            def add(table: str, row: Row) -> None:
                rows = waiting[table]
                rows.append(row)
                if len(rows) >= _ROWS:
                    opened[table].write(rows)
                    rows.clear()

            yield add
            for name, file_ in opened.items():
                if waiting[name]:
                    file_.write(waiting[name])
        for name, partial in partials.items():
            move_into_place(partial, paths[name])
    except BaseException:
        for partial in partials.values():
            partial.unlink(missing_ok=True)
        raise


@contextmanager
def _new_private_file(path: Path) -> Iterator[IO[bytes]]:
    """Open a new private file; on exit, wait until the disk has it."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE)
    with os.fdopen(descriptor, "wb") as file:
        yield file
        file.flush()
        os.fsync(descriptor)
