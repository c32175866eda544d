"""The HTML page of a report: words and tables first, then pictures, then every number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from gnomon import report as drawing
from gnomon.continuity import advice, sidebyside
from gnomon.continuity.measurements import Measurements
from gnomon.continuity.summary import columns_and_formats, role_order
from gnomon.geometry.subspace import cosine_null

_ROW_COLUMNS = {"stack": "stack", "role": "role", "layer": "layer", "next_layer": "next"}
_ROW_COLUMNS |= {"v1_cos": "|cos v1|", "v1_z": "z", "u1_cos": "|cos u1|", "u1_z": "z "}
_ROW_COLUMNS |= {"subspace_v": "subspace v", "subspace_u": "subspace u", "gap": "gap", "reason": "not defined because"}
_HEADLINE = "stack role defined v1_cos v1_z u1_cos u1_z gap_min".split()
_MAX_ROWS = 2000
_HALF = (330, 260)
_ALPHA = (
    "The exponent α of a power law fitted to the eigenvalues of WᵀW, as WeightWatcher gives it. **What is known of its worth.** "
    "Averaged over the layers of whole models of one series it ranks them by test accuracy (arXiv:2002.06716), small being "
    "good; layer by layer it has been used to decide how much to prune where (arXiv:2410.10912). It depends on the shape of a matrix "
    "(arXiv:2506.06280) and every random matrix has one, so the exponent of Gaussian entries of the same shape stands beside it: an α that "
    "is near it says nothing. We have not tested what it predicts, and draw no conclusion from it."
)
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
    if len(report.flags) > 1:
        sheet.table(report.flags, ["kind", "message"], title=f"All {len(report.flags)} remarks", folded=True)
    if not report.rows:
        sheet.text("There is nothing to compare: see the remarks above.").facts(report.settings, "Settings")
        return
    _in_short(sheet, report)
    if report.other:
        _compared(sheet, report, report.other)
    _over_depth(sheet, report)
    _maps(sheet, report)
    _spectra(sheet, report)
    _quality(sheet, report)
    _serial(sheet, report)
    _heads(sheet, report)
    _all_numbers(sheet, report)


def _in_short(sheet: Any, report: Measurements) -> None:
    columns, formats = columns_and_formats(report.summary)
    headline = {key: head for key, head in columns.items() if key in _HEADLINE}
    sheet.section("In short").table(report.summary, headline, formats=formats)
    if len(columns) > len(headline):
        sheet.table(report.summary, columns, title="All means", formats=formats, folded=True)
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
            chart = drawing.profile(points, "layer", "value", "role", title, size=_HALF)
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
        sheet.chart(chart, name=f"heat-{heat.stack}-{heat.role}", width=1 / 3)


def _spectra(sheet: Any, report: Measurements) -> None:
    rows = [row for row in report.matrices if row["layer"] is not None and row["gap"] is not None and math.isfinite(row["gap"])]
    rows.sort(key=lambda row: role_order(row["stack"], row["role"]))
    if not rows:
        return
    sheet.section("Spectra").text(
        "A large σ₁/σ₂ is a direction far above the rest; near 1 the leading direction is hardly told from the second, and turns "
        "easily. The rank that the spectrum fills is given as a share of the largest there could be."
    )
    several = len({row["stack"] for row in rows}) > 1
    for key, title, unit, log, of in (
        ("gap", "σ₁ / σ₂", "σ₁ / σ₂", True, lambda row: 1),
        ("stable_rank", "Stable rank", "‖W‖² / σ₁², share of the smaller side", True, lambda row: min(row["shape"][-2:])),
        ("effective_rank", "Effective rank", "exp of the entropy of σ², share", False, lambda row: min(row["shape"][-2:])),
    ):
        points = [
            {"role": f"{row['stack']}: {row['role']}" if several else row["role"], "layer": row["layer"], "value": row[key] / of(row)}
            for row in rows if row[key] is not None
        ]  # fmt: skip
        if points:
            upright = drawing.Axis("value", unit, log)
            chart = drawing.profile(_mean_by_layer(points), "layer", upright, "role", title, size=_HALF)
            sheet.chart(chart, name=f"spectra-{key}", width=1 / 2)


def _quality(sheet: Any, report: Measurements) -> None:
    rows = [row for row in report.matrices if row["alpha"] is not None]
    if not rows:
        return
    sheet.section("Quality by layer, as others measure it").text(_ALPHA)
    columns = {"stack": "stack", "role": "role", "layer": "layer", "tensor": "tensor", "alpha": "α", "alpha_chance": "α of chance"}
    columns |= {"gap": "σ₁/σ₂", "stable_rank": "stable rank", "effective_rank": "effective rank", "norm": "‖W‖"}
    if len({row["stack"] for row in rows}) == 1:
        columns.pop("stack")
    formats = dict.fromkeys(("alpha", "alpha_chance", "gap"), ".2f") | dict.fromkeys(("stable_rank", "effective_rank"), ".1f")
    shown = sorted(rows, key=lambda row: -row["alpha"])[:_MAX_ROWS]
    sheet.table(shown, columns, formats=formats, title=f"Every matrix, the largest α first ({len(shown)} of {len(rows)})", folded=True)
    rows.sort(key=lambda row: role_order(row["stack"], row["role"]))
    points = [{"role": row["role"], "layer": row["layer"], "value": row["alpha"]} for row in rows if row["layer"] is not None]
    alpha = drawing.Axis("value", "α")
    chart = drawing.profile(_mean_by_layer(points), "layer", alpha, "role", "Power-law exponent", size=_HALF)
    sheet.chart(chart, name="alpha", width=1 / 2)


def _serial(sheet: Any, report: Measurements) -> None:
    usable: list[dict[str, Any]] = [row | {"pair": f"{row['role']} → {row['next_role']}"} for row in report.serial if row["defined"]]
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
    columns = "stack role layer tensor shape dtype norm gap stable_rank effective_rank alpha alpha_chance".split()
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
