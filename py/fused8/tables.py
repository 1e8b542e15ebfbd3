"""Tables as text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple


class Table(NamedTuple):
    """A table as text. Columns are flush right, except the first and those in `left`."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    left: Sequence[str] = ()

    def is_left(self, column: int) -> bool:
        return column == 0 or self.header[column] in self.left

    def __str__(self) -> str:
        lines = [self.header, *self.rows]
        widths = [max(len(line[i]) for line in lines) for i in range(len(self.header))]

        def text(line: Sequence[str]) -> str:
            cells = (
                cell.ljust(width) if self.is_left(i) else cell.rjust(width)
                for i, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            return "  ".join(cells).rstrip()

        rule = "  ".join("-" * width for width in widths)
        return "\n".join([self.title, "", text(self.header), rule, *map(text, self.rows)])


class Tabular:
    """What `print` shows as tables."""

    def tables(self) -> list[Table]:
        raise NotImplementedError

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.tables()))
