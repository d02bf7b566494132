"""Read the tables of an Nsight Systems SQLite export as data, without executing anything in the file.

Columns: "SQLite Schema Reference" of the Nsight Systems Analysis Guide (schema 3.28, release 2026.4). An export has a
table only if there is something to put in it, and columns differ between releases. Therefore all tables and columns may
be missing, except those that the callers require.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from sim.core.errors import InputError
from sim.core.outputs import refuse_output

MAX_ROWS = 5_000_000  # of one table
MAX_TEXT, MAX_VALUE_BYTES = 4000, 1 << 26
HOW = "record with `nsys profile --trace=cuda,nvtx`, export with `nsys export --type sqlite`"
HINTS = {  # how to record the tables that HOW does not fill
    "CUPTI_ACTIVITY_KIND_CUDA_EVENT": "record with `nsys profile --cuda-event-trace=true`",
}


class Tables:
    """Open an export for reading; a context manager.

    Views, virtual tables and generated columns count as missing, because reading them executes expressions of the file.
    """

    def __init__(self, path: str | Path) -> None:
        refuse_output(path)
        self.path = path
        try:
            self._db = sqlite3.connect(Path(path).resolve().as_uri() + "?mode=ro&immutable=1", uri=True)
        except (sqlite3.Error, OSError, ValueError) as error:
            raise InputError(f"{path}: cannot be read: {error}") from None
        self._db.text_factory = lambda raw: raw.decode("utf-8", "replace")
        self._db.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, MAX_VALUE_BYTES)
        try:
            list(self._query("PRAGMA trusted_schema=OFF"))
            self._names = {
                name for (name,) in self._query("SELECT name FROM sqlite_master WHERE type='table' AND rootpage>0")
            }
        except InputError:
            self._db.close()
            raise

    def __enter__(self) -> Tables:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    def has(self, table: str) -> bool:
        """Tell whether the export has this table."""
        return table in self._names

    def rows(
        self, table: str, numbers: Sequence[str], maybe: Sequence[str] = (), texts: Sequence[str] = ()
    ) -> Iterator[tuple[Any, ...]]:
        """Yield a table's rows: the columns `numbers`, `maybe` and `texts`.

        `numbers`: whole numbers that must be there. `maybe`: whole numbers that may be None or have no column. `texts`:
        texts that may be None or have no column.

        Raises:
            InputError: if the table, a column of `numbers` or one of its values is missing, or the file is damaged.
        """
        if table not in self._names:
            raise InputError(f"{self.path}: {table}: the table is missing; {HINTS.get(table, HOW)}")
        there = {row[1] for row in self._query(f'PRAGMA table_info("{table}")')}
        for column in numbers:
            if column not in there:
                raise InputError(f"{self.path}: {table}.{column}: the column is missing; {HINTS.get(table, HOW)}")
        wanted = [f'"{c}"' if c in there else "NULL" for c in (*numbers, *maybe)]
        wanted += [f'substr("{c}", 1, {MAX_TEXT})' if c in there else "NULL" for c in texts]
        for count, row in enumerate(self._query(f'SELECT {", ".join(wanted)} FROM "{table}"')):
            if count >= MAX_ROWS:
                raise InputError(f"{self.path}: {table}: holds more than {MAX_ROWS} rows; record fewer steps")
            self._check(table, numbers, maybe, row)
            known = len(numbers) + len(maybe)
            yield (*row[:known], *(text if isinstance(text, str) else None for text in row[known:]))

    def _check(self, table: str, numbers: Sequence[str], maybe: Sequence[str], row: tuple[Any, ...]) -> None:
        for at, column in enumerate((*numbers, *maybe)):
            value = row[at]
            if type(value) is not int and (value is not None or at < len(numbers)):
                shown = "nothing" if value is None else repr(value)[:40]
                raise InputError(f"{self.path}: {table}.{column}: found {shown}; must be a whole number")

    def _query(self, sql: str) -> Iterator[tuple[Any, ...]]:
        try:
            yield from self._db.execute(sql)
        except (sqlite3.Error, OverflowError, UnicodeError) as error:
            raise InputError(f"{self.path}: is no whole SQLite file: {error}") from None
