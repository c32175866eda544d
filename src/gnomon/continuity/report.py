"""The result of `inspect`: rows, flags and series, and the ways to show them."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from gnomon import report as drawing
from gnomon.anatomy import Part
from gnomon.continuity.summary import Heat
from gnomon.files import write_json
from gnomon.geometry.subspace import Singular

_COLUMNS = {
    "stack": "stack",
    "role": "role",
    "defined": "pairs",
    "v1_cos": "|cos v1|",
    "v1_z": "z",
    "u1_cos": "|cos u1|",
    "u1_z": "z ",
    "subspace_v": "subspace v",
    "subspace_u": "subspace u",
    "gap_min": "gap ≥",
}
_FULL_COLUMNS = {
    "weighted_v": "weighted v",
    "weighted_u": "weighted u",
    "gram_v": "Gram v",
    "gram_u": "Gram u",
}
_QUIET = ("note", "fragile", "unfolded")


@dataclass(frozen=True)
class Report:
    """What `inspect` found.

    Attributes:
        model, family: what was measured.
        settings: how: k, tier, fold_norms, lag …
        rows: one dict per pair of neighbouring layers; None stands for a number that does not exist.
        flags: remarks, each with `kind` and `message`.
        summary: one dict per stack and role.
        matrices: one dict per matrix: norm, sigma, gap, stable and effective rank.
        serial: what a layer writes against what the next reads.
        heads: head by head (when asked for).
        sharing: the price of one basis for two layers (full tier).
        heats: every layer against every other.
        leading, sigma: part -> leading vectors, and all singular values found; not in the JSON.
        other: the report of the model compared with.
    """

    model: str
    family: str
    settings: dict[str, Any]
    rows: list[dict[str, Any]]
    flags: list[dict[str, Any]] = field(default_factory=list)
    summary: list[dict[str, Any]] = field(default_factory=list)
    matrices: list[dict[str, Any]] = field(default_factory=list)
    serial: list[dict[str, Any]] = field(default_factory=list)
    heads: list[dict[str, Any]] = field(default_factory=list)
    sharing: list[dict[str, Any]] = field(default_factory=list)
    heats: list[Heat] = field(default_factory=list)
    leading: Mapping[Part, Singular] = field(default_factory=dict)
    sigma: Mapping[Part, Tensor] = field(default_factory=dict)
    other: Report | None = None

    def to_dict(self) -> dict[str, Any]:
        """Everything but vectors, ready for JSON."""
        keys = (
            "model",
            "family",
            "settings",
            "summary",
            "rows",
            "flags",
            "matrices",
            "serial",
            "heads",
            "sharing",
        )
        found = {key: getattr(self, key) for key in keys}
        found["heat"] = [
            {"stack": heat.stack, "role": heat.role, "layers": list(heat.layers)}
            | {key: [[round(x, 6) for x in line] for line in getattr(heat, key).tolist()] for key in ("v1", "u1")}
            for heat in self.heats
        ]
        if self.other:
            from gnomon.continuity import sidebyside

            found["compared_with"] = self.other.to_dict()
            found["comparison"] = sidebyside.summary(self, self.other)
            found["turned"] = sidebyside.turned(self, self.other)
        return found

    def to_json(self, path: str | os.PathLike) -> Path:
        """Write `to_dict()`, atomically."""
        write_json(path, self.to_dict())
        return Path(path)

    def to_csv(self, path: str | os.PathLike) -> Path:
        """Write the rows as CSV, one line per pair."""
        drawing.csv(path, self.rows)
        return Path(path)

    def to_html(self, path: str | os.PathLike, figures: bool = False) -> Path:
        """Write one self-contained page; with `figures` also PNG, SVG and CSV of each chart beside it.

        Raises:
            UserError: the extra `report` is not installed.
        """
        from gnomon.continuity.inspect_page import page

        return page(self).write(path, figures=figures)

    def table(self) -> str:
        """The summary as text: one line per role, bars against the null level, then what to watch for."""
        from rich.console import Console

        console = Console(file=(text := io.StringIO()), width=10_000)
        self.show(console)
        return "\n".join(line.rstrip() for line in text.getvalue().splitlines())

    def show(self, console: Any = None) -> None:
        """Print the table, in colour on a terminal."""
        from rich.console import Console

        console = console or Console()
        folded = "folded in" if self.settings["fold_norms"] else "not folded (raw)"
        how = f"{self.settings['tier']}, norms {folded}"

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        say(f"{self.model}  ·  {self.family}  ·  {how}, lag {self.settings['lag']}")
        if self.summary:
            columns, formats = summary_columns(self)
            drawing.show(self.summary, columns, formats=formats, console=console)
            say("│ marks the null level: what unrelated directions of the same dimension give")
        if self.other:
            from gnomon.continuity import sidebyside

            lines = sidebyside.summary(self, self.other)
            title, formats = f"against {self.other.model}", sidebyside.FORMATS
            drawing.show(lines, sidebyside.COLUMNS, title=title, formats=formats, console=console)
        for line in remarks(self.flags):
            say(line)


def summary_columns(report: Report) -> tuple[dict[str, str], dict[str, Any]]:
    """Columns of the summary table and their formats; those without a value are left out."""
    wanted = _COLUMNS | (_FULL_COLUMNS if report.settings["tier"] == "full" else {})
    columns = {key: head for key, head in wanted.items() if any(line.get(key) is not None for line in report.summary)}
    if len({line["stack"] for line in report.summary}) == 1:
        columns.pop("stack", None)
    bars = {
        key: drawing.Bar(null=f"{key.removesuffix('_cos')}_null")
        for key in (
            "v1_cos",
            "u1_cos",
            "subspace_v",
            "subspace_u",
            "weighted_v",
            "weighted_u",
            "gram_v",
            "gram_u",
        )
    }
    return columns, bars | {"v1_z": "+.1f", "u1_z": "+.1f", "gap_min": ".3f"}


def remarks(flags: list[dict[str, Any]], limit: int = 8) -> list[str]:
    """Flags as lines: grave ones in full, many of a kind as one line and a count."""
    kinds: dict[str, list[str]] = {}
    for flag in flags:
        kinds.setdefault(flag["kind"], []).append(flag["message"])
    lines = []
    for kind, messages in sorted(kinds.items(), key=lambda item: item[0] in _QUIET):
        shown = messages[: 2 if kind in _QUIET[1:] else limit]
        lines += [f"{kind}: {message}" for message in shown]
        lines += [f"{kind}: … and {len(messages) - len(shown)} more"] * (len(messages) > len(shown))
    return lines
