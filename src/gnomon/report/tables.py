"""Tables from rows (lists of dicts): on the terminal, as Markdown, as CSV. A page draws the same cells."""

from __future__ import annotations

import csv as csv_format
import json
import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any

from gnomon.errors import printable
from gnomon.files import atomic

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MISSING = "–"


@dataclass(frozen=True)
class Bar:
    """A column format: the number and a bar for it, with a tick where chance alone would put it.

    Args:
        null: the null level: a number, or the name of the column that holds it row by row; None for no tick.
        low, high: values at the two ends of the bar; numbers outside are clipped to them.
        width: length of the bar in characters (terminal and Markdown).
        spec: format specification of the number.
    """

    null: float | str | None = None
    low: float = 0.0
    high: float = 1.0
    width: int = 12
    spec: str = ".3f"

    def share(self, value: Any) -> float | None:
        """Where `value` lies between `low` (0) and `high` (1); None when it is not a finite number."""
        if not is_number(value) or not math.isfinite(value):
            return None
        return min(max((value - self.low) / (self.high - self.low), 0.0), 1.0)


Format = str | Bar | Callable[[Any], str]
Columns = Sequence[str] | Mapping[str, str] | None


@dataclass(frozen=True)
class Cell:
    """What one place of a table shows. `share` and `null` are fractions of a bar's length, or None."""

    text: str
    right: bool = False
    share: float | None = None
    null: float | None = None
    width: int = 0


def is_number(value: Any) -> bool:
    """Python's and numpy's numbers; not True and False."""
    return isinstance(value, Real) and not isinstance(value, bool)


def number(value: float) -> str:
    """Four significant digits, integers in full: `0.1235`, `12.30`, `123,457`, `1.235e-05`."""
    if isinstance(value, Integral):
        return f"{value:,}"
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    if 1e4 <= abs(value) < 1e9:
        return f"{value:,.0f}"
    if not 1e-4 <= abs(value) < 1e4:
        return f"{value:.3e}"
    return f"{value:#.4g}".rstrip(".")


def headers(rows: Iterable[Mapping[str, Any]], columns: Columns = None) -> dict[str, str]:
    """Key -> header. A sequence of keys gets its headers from the keys; None means every key that occurs."""
    if isinstance(columns, Mapping):
        return dict(columns)
    keys = columns if columns is not None else dict.fromkeys(key for row in rows for key in row)
    return {key: key.replace("_", " ") for key in keys}


def cells(rows: Sequence[Mapping[str, Any]], keys: Iterable[str],
          formats: Mapping[str, Format] | None = None) -> list[list[Cell]]:
    """The cells of every row; a key that a row lacks shows as a dash."""
    keys, formats = list(keys), formats or {}
    return [[_cell(row, key, formats.get(key)) for key in keys] for row in rows]


def rights(body: Sequence[Sequence[Cell]], count: int) -> list[bool]:
    """Which of `count` columns are numbers throughout (missing ones aside), to be aligned on the right."""
    columns = [[line[place] for line in body] for place in range(count)]
    return [any(cell.right for cell in column)
            and all(cell.right or cell.text == MISSING for cell in column) for column in columns]


def table(rows: Sequence[Mapping[str, Any]], columns: Columns = None, title: str | None = None,
          formats: Mapping[str, Format] | None = None) -> Table:
    """A rich table.

    Args:
        rows: one dict a row; values may be numbers, strings, None or anything with a `str`.
        columns: keys to show in this order, or a dict key -> header (put units there: `"loss (nats)"`).
        title: shown above.
        formats: key -> format specification (`".2f"`), `Bar`, or function from value to string.
    """
    from rich.table import Table
    from rich.text import Text

    head = headers(rows, columns)
    body = cells(rows, head, formats)
    # rich reads "[red]" in a plain string as a style, so every text of the user's goes in as Text.
    result = Table(title=Text(printable(title)) if title else None, title_justify="left", title_style="bold",
                   header_style="bold", box=_box(), pad_edge=False)
    for header, right in zip(head.values(), rights(body, len(head))):
        result.add_column(Text(header), justify="right" if right else "left", no_wrap=right)
    for line in body:
        result.add_row(*(_rich(cell) for cell in line))
    return result


def show(rows: Sequence[Mapping[str, Any]], columns: Columns = None, title: str | None = None,
         formats: Mapping[str, Format] | None = None, console: Console | None = None) -> None:
    """Print `table(...)`; into a file or a pipe it is never cut to the width of a screen."""
    from rich.console import Console
    from rich.measure import Measurement

    console = console or Console()
    drawn = table(rows, columns, title, formats)
    if not console.is_terminal:
        wide = console.options.update(width=10_000)
        console = Console(file=console.file, width=Measurement.get(console, wide, drawn).maximum)
    console.print(drawn)


def markdown(rows: Sequence[Mapping[str, Any]], columns: Columns = None,
             formats: Mapping[str, Format] | None = None) -> str:
    """The table in Markdown, with a final newline."""
    head = headers(rows, columns)
    body = cells(rows, head, formats)
    lines = [[_escape(header) for header in head.values()],
             ["---:" if right else "---" for right in rights(body, len(head))]]
    lines += [[_escape(f"{cell.text} {_blocks(cell)}".rstrip()) for cell in line] for line in body]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, Any]], columns: Columns = None) -> None:
    """Write the rows, unformatted, as CSV with one header line, atomically; lists and dicts become JSON."""
    head = headers(rows, columns)
    with atomic(path, "w") as file:
        writer = csv_format.writer(file, lineterminator="\n")
        writer.writerow(head)
        for row in rows:
            writer.writerow([_plain(row.get(key)) for key in head])


def _cell(row: Mapping[str, Any], key: str, form: Format | None) -> Cell:
    value = row.get(key)
    right = is_number(value)
    if value is None:
        return Cell(MISSING)
    if isinstance(form, Bar):
        share = form.share(value)
        if share is None:
            return Cell(_text(value), right)
        null = form.share(row.get(form.null) if isinstance(form.null, str) else form.null)
        return Cell(format(value, form.spec), right, share, null, form.width)
    if callable(form):
        return Cell(form(value), right)
    if form and right and math.isfinite(value):
        return Cell(format(value, form), right)
    return Cell(_text(value), right)


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if is_number(value):
        return number(value)
    if isinstance(value, (list, tuple)):
        return ", ".join(_text(item) for item in value)
    return printable(str(value))


def _blocks(cell: Cell) -> str:
    """The bar in eighths of a character, with a thin line at the null level."""
    if cell.share is None:
        return ""
    whole, eighths = divmod(round(cell.share * cell.width * 8), 8)
    bar = ("█" * whole + " ▏▎▍▌▋▊▉"[eighths]).ljust(cell.width)[: cell.width]
    if cell.null is not None:
        place = min(int(cell.null * cell.width), cell.width - 1)
        bar = bar[:place] + "│" + bar[place + 1 :]
    return bar


def _rich(cell: Cell) -> Any:
    from rich.text import Text

    if cell.share is None:
        return Text(cell.text, style="dim" if cell.text == MISSING else "")
    text = Text(cell.text + " ")
    for character in _blocks(cell):
        text.append(character, "yellow" if character == "│" else "cyan")
    return text


def _box() -> Any:
    from rich import box

    return box.SIMPLE_HEAD


def _escape(text: str) -> str:
    return " ".join(text.replace("\\", "\\\\").replace("|", "\\|").replace("<", "&lt;").split("\n"))


def _plain(value: Any) -> Any:
    return json.dumps(value) if isinstance(value, (list, tuple, dict)) else value
