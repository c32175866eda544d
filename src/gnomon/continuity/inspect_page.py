"""The HTML page of a report: words and tables first, then pictures, then every number."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from gnomon import report as drawing
from gnomon.continuity import advice, sidebyside
from gnomon.continuity.measurements import Measurements
from gnomon.continuity.summary import columns_and_formats
from gnomon.geometry.subspace import cosine_null

_ROW_COLUMNS = {"stack": "stack", "role": "role", "layer": "layer", "next_layer": "next"}
_ROW_COLUMNS |= {"v1_cos": "|cos v1|", "v1_z": "z", "u1_cos": "|cos u1|", "u1_z": "z "}
_ROW_COLUMNS |= {"subspace_v": "subspace v", "subspace_u": "subspace u", "gap": "gap", "reason": "not defined because"}
_MAX_ROWS = 2000
_INNER = (
    "|cos| on the other side: heads and MLP neurons. They may be renumbered from layer to layer without "
    "changing the model, so chance is expected here."
)
_SUBSPACE = "Mean squared cosine of the principal angles between the k leading directions."


def page(report: Measurements) -> Any:
    """A `gnomon.report.Page` of the whole report."""
    folded = "norm gains folded in" if report.settings["fold_norms"] else "raw weights, norm gains not folded in"
    sheet = drawing.Page(f"Continuity of {report.model}", f"{report.family} · {report.settings['tier']} · {folded}")
    fill(sheet, report)
    return sheet


def fill(sheet: Any, report: Measurements) -> None:
    """Add everything to a page that is there already, such as the report of a run."""
    sheet.flags(advice.remarks(report.flags), title="Before you believe a number")
    if not report.rows:
        sheet.text("There is nothing to compare: see the remarks above.").facts(report.settings, "Settings")
        return
    _in_short(sheet, report)
    if report.other:
        _compared(sheet, report, report.other)
    _over_depth(sheet, report)
    _maps(sheet, report)
    _spectra(sheet, report)
    _serial(sheet, report)
    _heads(sheet, report)
    _all_numbers(sheet, report)


def _in_short(sheet: Any, report: Measurements) -> None:
    columns, formats = columns_and_formats(report.summary)
    sheet.section("In short").table(report.summary, columns, formats=formats)
    sheet.text(
        "A bar is the mean over neighbouring layers; the tick on it is the null level, what unrelated directions of the "
        "same dimension give. z counts null standard deviations above it. `v` is the input side of a matrix, `u` its "
        "output side."
    )
    if found := advice.findings(report):
        sheet.text("\n".join(f"- {line}" for line in found))
    sheet.section("What it means for pruning and sharing").text(advice.advice(report))
    if report.sharing:
        sheet.table(
            advice.sharing_means(report.sharing),
            {"stack": "stack", "role": "role", "pairs": "pairs", "private": "private SVD"}
            | {"input": "shared input basis", "output": "shared output basis"},
            title=f"Relative squared error with {report.sharing[0]['keep']:.0%} of the parameters",
            formats=dict.fromkeys(("private", "input", "output"), ".4f"),
        )


def _compared(sheet: Any, report: Measurements, other: Measurements) -> None:
    sheet.section(f"Against {other.model}")
    sheet.table(sidebyside.summary(report, other), sidebyside.COLUMNS, formats=sidebyside.FORMATS)
    turned = [row for row in sidebyside.turned(report, other) if row["defined"]]
    if turned:
        points = _stream_side(turned, "turned_v", "turned_u")
        title = "How far the leading direction of each matrix has turned"
        chart = drawing.profile(points, "layer", drawing.Axis("value", "degrees"), "role", title)
        sheet.chart(chart, "The side of the residual stream: v1 of readers, u1 of writers.", name="turned")


def _over_depth(sheet: Any, report: Measurements) -> None:
    usable = [row for row in report.rows if row["defined"] and not row["missing"]]
    for stack in dict.fromkeys(row["stack"] for row in usable):
        rows = [row for row in usable if row["stack"] == stack]
        stream = _stream_side(rows, "v1_cos", "u1_cos")
        if not stream:
            continue
        sheet.section("Over depth" if len({row["stack"] for row in usable}) == 1 else f"Over depth: {stack}")
        depth = drawing.Axis("layer", "layer (against the next)")
        cosine = drawing.Axis("value", "|cos|", reference={"chance": cosine_null(_stream_dim(rows)).mean})
        chart = drawing.profile(_mean_by_layer(stream), depth, cosine, "role", "Leading direction, stream side")
        caption = "v1 of matrices that read the residual stream, u1 of those that write it."
        sheet.chart(chart, caption, name=f"{stack}-stream")
        for name, title, keys, caption in (
            ("inner", "Leading direction, inner side", ("u1_cos", "v1_cos"), _INNER),
            ("subspace", "Leading subspace, stream side", ("subspace_v", "subspace_u"), _SUBSPACE),
        ):
            points = _mean_by_layer(_stream_side(rows, *keys))
            if not points:
                continue  # layers of different widths have no inner side to compare
            chart = drawing.profile(points, "layer", "value", "role", title, size=(330, 260))
            sheet.chart(chart, caption, name=f"{stack}-{name}", width=1 / 2)


def _maps(sheet: Any, report: Measurements) -> None:
    sides = {"reads": "v1", "writes": "u1"}
    maps = [heat for heat in report.heats if heat.stream and getattr(heat, sides[heat.stream]) is not None]
    if not maps:
        return
    sheet.section("Every layer against every other").text(
        "Each cell is |cos| of the leading direction of one layer with that of another, on the side of the residual "
        "stream. A bright band along the diagonal is continuity; a bright block is a direction many layers share; "
        "colour all over is a direction of the whole model."
    )
    several = len({heat.stack for heat in maps}) > 1
    for heat in maps:
        side = sides[heat.stream]
        values = getattr(heat, side).tolist()
        cells = [
            {"layer": a, "other layer": b, "|cos|": values[i][j]}
            for i, a in enumerate(heat.layers)
            for j, b in enumerate(heat.layers)
        ]
        name = f"{heat.stack}: {heat.role}" if several else heat.role
        chart = drawing.heatmap(cells, "layer", "other layer", "|cos|", f"{name}, {side}", (0, 1), width=300)
        sheet.chart(chart, name=f"heat-{heat.stack}-{heat.role}", width=1 / 2)


def _spectra(sheet: Any, report: Measurements) -> None:
    groups: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for part, sigma in report.sigma.items():
        if part.expert is None and float(sigma[0]) > 0:
            groups.setdefault((part.stack, part.role), []).append((int(part.layer or 0), sigma))
    if not groups:
        return
    full = report.settings["tier"] == "full"
    sheet.section("Spectra").text(
        "Each outline is the spectrum of one layer: how many singular values lie where, on a logarithmic scale, in units "
        "of their root mean square. A spike on the right is a direction far above the rest."
        if full
        else "Each outline holds the leading singular values of one layer, relative to the largest. A steep start is a "
        "direction far above the rest; a flat one means that v1 is hardly told from v2."
    )
    several = len({stack for stack, _ in groups}) > 1
    for (stack, role), members in groups.items():
        points: list[dict[str, Any]] = []
        for layer, sigma in sorted(members, key=lambda one: one[0]):
            points += _outline(layer, sigma, full)
        name = f"{stack}: {role}" if several else role
        unit = "singular value / root mean square" if full else "number of the singular value"
        chart = drawing.ridgeline(points, "layer", drawing.Axis("x", unit, log=full), "height", name, width=300)
        sheet.chart(chart, name=f"spectrum-{stack}-{role}", width=1 / 2)


def _outline(layer: int, sigma: torch.Tensor, full: bool) -> list[dict[str, Any]]:
    if not full:
        return [{"layer": layer, "x": i + 1, "height": float(s / sigma[0])} for i, s in enumerate(sigma)]
    unit = sigma[sigma > 0] / sigma.square().mean().sqrt()
    edges = torch.logspace(-2, 1.5, 71, dtype=torch.float64)
    counts = torch.histogram(unit.double(), edges).hist / len(unit)
    middle = (edges[1:] * edges[:-1]).sqrt()
    # The square root lets single spikes be seen beside the bulk.
    return [{"layer": layer, "x": float(x), "height": float(c) ** 0.5} for x, c in zip(middle, counts)]


def _serial(sheet: Any, report: Measurements) -> None:
    usable = [row | {"pair": f"{row['role']} → {row['next_role']}"} for row in report.serial if row["defined"]]
    if not usable:
        return
    sheet.section("What is written, and what the next sublayer reads").text(
        "|cos| of u1 of a writer with v1 of a reader of the next sublayer (serial alignment, arXiv:1810.02032). It is "
        "another question than continuity."
    )
    cosine = drawing.Axis("uv_cos", "|cos|", reference={"chance": usable[0]["uv_null"]})
    sheet.chart(drawing.profile(usable, "layer", cosine, "pair", "Serial alignment"), name="serial")


def _heads(sheet: Any, report: Measurements) -> None:
    if not report.heads:
        return
    sheet.section("Head by head").text(
        "Heads have no order, so each is held against its best partner in the next layer; chance is the best of as many "
        "random directions."
    )
    for role in dict.fromkeys(row["role"] for row in report.heads):
        rows = [row for row in report.heads if row["role"] == role]
        cells = [{"layer": row["layer"], "head": row["head"], "best |cos|": row["best_cos"]} for row in rows]
        chart = drawing.heatmap(
            cells, "layer", "head", "best |cos|", f"{role} (chance {rows[0]['best_null']:.2f})", (0, 1)
        )
        sheet.chart(chart, name=f"heads-{role}", width=1 / 2)


def _all_numbers(sheet: Any, report: Measurements) -> None:
    sheet.section("All numbers").facts(report.settings, "Settings")
    more = f", the first {_MAX_ROWS} of {len(report.rows)}" if len(report.rows) > _MAX_ROWS else ""
    sheet.table(report.rows[:_MAX_ROWS], _ROW_COLUMNS, title=f"Pairs{more}", folded=True)
    columns = "stack role layer tensor shape dtype norm gap stable_rank effective_rank".split()
    sheet.table(report.matrices[:_MAX_ROWS], columns, title="Matrices", folded=True)


def _stream_side(rows: Sequence[dict[str, Any]], readers: str, writers: str) -> list[dict[str, Any]]:
    """Rows with `value` taken from one key for readers of the stream and from another for writers."""
    sides = {"v": readers, "u": writers}
    keyed = [(row, sides.get(advice.stream_side(row) or "")) for row in rows]
    return [{**row, "value": row[key]} for row, key in keyed if key and row[key] is not None]


def _mean_by_layer(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One point per role and layer: experts are averaged."""
    groups: dict[tuple[str, int], list[float]] = {}
    for row in rows:
        groups.setdefault((row["role"], row["layer"]), []).append(row["value"])
    return [{"role": role, "layer": layer, "value": sum(v) / len(v)} for (role, layer), v in groups.items()]


def _stream_dim(rows: Sequence[dict[str, Any]]) -> int:
    for row in rows:
        side = advice.stream_side(row)
        if side:
            return row["shape"][1 if side == "v" else 0]
    raise AssertionError("no row touches the stream")
