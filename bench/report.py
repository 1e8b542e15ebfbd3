"""Tables and plots from a file of results:  python -m bench.report bench/results/MACHINE.json"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from . import results, tables

READING = """\
*ns/param* is the median over the rounds, *speed* how many times as fast as torch's fused AdamW in the same round, again
the median; *IQR* is the interquartile range of each. *B/param* is what a step has to move at least, *limit* the speed
as a share of what the best memory bandwidth of the same rounds allows (only for sizes beyond the cache). *error* is the
relative distance of ten steps on small parameters from those of FP32 AdamW. What fails this check has no speed, nor has
a step of fused8 that does not give the bits of its reference.
"""


def as_rich(table: tables.Table) -> RichTable:
    rich = RichTable(
        title=escape(table.title), caption=escape(table.note) or None, box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for number, column in enumerate(table.columns):
        rich.add_column(column, justify="right" if number else "left", no_wrap=not number)
    for row in table.rows:
        rich.add_row(*map(escape, row))
    reasons = [f"{name}: {status}: {reason}" for name, status, reason in dict.fromkeys(table.missing)]
    rich.caption = escape("\n".join(filter(None, [table.note, *reasons]))) or None
    rich.caption_justify = "left"
    return rich


def as_markdown(table: tables.Table) -> str:
    def line(cells: Any) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|") for cell in cells) + " |"

    rule = ["---", *["---:"] * (len(table.columns) - 1)]
    lines = [f"### {table.title}", "", line(table.columns), line(rule), *map(line, table.rows)]
    for name, status, reason in dict.fromkeys(table.missing):
        lines.append(line([name, f"{status}: {reason}", *[""] * (len(table.columns) - 2)]))
    return "\n".join([*lines, "", table.note, ""] if table.note else [*lines, ""])


def markdown(content: dict[str, Any], plots: list[Path]) -> str:
    about = "\n".join(f"| {name} | {value} |" for name, value in content["machine"].items())
    parts = ["# Measurements", f"| | |\n|---|---|\n{about}", READING.strip()]
    if found := results.problems(content):
        parts.append("**What failed:**\n\n" + "\n".join(f"- {problem}" for problem in found))
    parts += [f"![{plot.stem.rpartition('-')[2]}]({plot.name})" for plot in plots]
    return "\n\n".join(parts + [as_markdown(table).strip() for table in tables.of_results(content)]) + "\n"


def show(content: dict[str, Any], console: Console | None = None) -> None:
    """Print the tables."""
    console = console or Console()
    for table in tables.of_results(content):
        console.print(as_rich(table))
    for problem in results.problems(content):
        console.print(f"[red]{escape(problem)}[/red]")


def make(file: Path, console: Console | None = None) -> None:
    """Print the tables, and write them and the plots beside the file of results."""
    from . import plots

    content = results.read(file)
    show(content, console)
    made = plots.draw(content, file)
    file.with_suffix(".md").write_text(markdown(content, made))
    (console or Console()).print(f"{file}, {file.with_suffix('.md').name} and {len(made)} plots")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.report", description=__doc__.split(":")[0])
    parser.add_argument("file", type=Path)
    options = parser.parse_args(arguments)
    make(options.file)
    return 1 if results.problems(results.read(options.file)) else 0


if __name__ == "__main__":
    sys.exit(main())
