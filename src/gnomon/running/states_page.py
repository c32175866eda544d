"""The page of a model on a text: what the states do over depth, where attention goes, what blocks are worth; then the weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gnomon import report as drawing
from gnomon.running.on_text import OnText
from gnomon.series import known

# What tells most, in the order the papers' chain has it: an unbounded stream, massive activations, sinks.
_OVER_DEPTH = (
    "stream_norm",
    "angle",
    "input_cosine",
    "input_kept",
    "massive",
    "kurtosis",
    "effective_rank",
    "stream_coherence",
)
_BY_HEAD = ("attention_sink", "attention_self", "attention_entropy", "attention_logit_max")
_LOGARITHMIC = {"stream_norm", "massive", "kurtosis", "effective_rank"}
_SHARES = {"attention_sink", "attention_self"}
_COLUMNS = {"layer": "layer", "sublayer": "sublayer"} | {
    "stream_norm": "norm", "angle": "angle", "input_cosine": "cos(h', h₀)", "effective_rank": "eff. rank",
    "stream_coherence": "coherence", "massive": "max/median", "massive_channel": "channel", "massive_position": "position",
    "kurtosis": "kurtosis",
}  # fmt: skip
_FORMATS = {"massive_channel": ".0f", "massive_position": ".0f"}


def page(found: OnText) -> Any:
    """A `gnomon.report.Page` of what was seen."""
    settings = found.settings
    tokens = f"{settings['tokens']:,} tokens in rows of {settings['length']:,}"
    title = f"{Path(found.model).name} on {Path(settings['text']).name}"
    sheet = drawing.Page(title, f"{tokens} · {settings['seconds']} s")
    fill(sheet, found)
    return sheet


def fill(sheet: Any, found: OnText) -> None:
    """Add everything to a page that is there already."""
    _in_short(sheet, found)
    _states(sheet, found)
    _attention(sheet, found)
    _worth(sheet, found)
    sheet.section("All numbers on text").facts({"model": found.model, **found.settings}, "Settings")
    sheet.table(found.by_sublayer(), _columns(found.by_sublayer()), title="States", formats=_FORMATS, folded=True)
    sheet.table(found.by_head(), title="Attention by head", folded=True)


def show(found: OnText, console: Any = None) -> None:
    """Print a table of the states, and what the blocks are worth."""
    rows = found.by_sublayer()
    settings = found.settings
    title = f"on {settings['text']}: {settings['tokens']:,} tokens in rows of {settings['length']:,}"
    if found.loss is not None:
        title += f", loss {found.loss:.4f} nats a token"
    drawing.show(
        _with_sinks(found, rows), _columns(rows) | {"sink": "sink"}, title=title, formats=_FORMATS, console=console
    )
    if found.without:
        drawing.show(
            found.worth(), {"layer": "block", "loss_without": "loss without it", "worth": "worth"}, console=console
        )


def _with_sinks(found: OnText, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows over sublayers with the mean share of attention that heads pay to the first token."""
    sinks = {
        (stack, layer): value
        for place, value in found.record.get("attention_sink", {}).items()
        for stack, layer in [tuple(place.split(".")[:2])]
    }
    lines = []
    for row in rows:
        heads = sinks.get((row["stack"], str(row["layer"]))) if row["sublayer"] != "mlp" else None
        lines.append(row | {"sink": sum(heads) / len(heads) if heads else None})
    return lines


def _columns(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    stack = {"stack": "stack"} if len({row["stack"] for row in rows}) > 1 else {}
    return stack | {key: name for key, name in _COLUMNS.items() if any(key in row for row in rows)}


def _in_short(sheet: Any, found: OnText) -> None:
    settings = found.settings
    words = f"{settings['tokens']:,} tokens of `{settings['text']}` in rows of {settings['length']:,}"
    loss = "" if found.loss is None else f" Loss: **{found.loss:.4f}** nats a token."
    sheet.section("On text").text(
        f"Measured while the model read {words}.{loss} A number is a mean over all tokens, or over a sample of a thousand "
        "(effective rank, median, attention); what it says holds for this text and this length of rows."
    )


def _states(sheet: Any, found: OnText) -> None:
    rows = found.by_sublayer()
    if not rows:
        return
    sheet.section("Hidden states over depth")
    for key in _OVER_DEPTH:
        points = [row for row in rows if row.get(key) is not None]
        if not points:
            continue
        series = known(key)
        axis = drawing.Axis(key, series.unit or key, log=key in _LOGARITHMIC)
        chart = drawing.profile(points, "layer", axis, "sublayer", series.title, size=(330, 240))
        sheet.chart(chart, series.meaning, name=f"text-{key}", width=1 / 2)


def _attention(sheet: Any, found: OnText) -> None:
    rows = found.by_head()
    if not rows:
        return
    sheet.section("Attention by head")
    for key in _BY_HEAD:
        points = [row for row in rows if row.get(key) is not None]
        if points:
            series = known(key)
            domain = (0.0, 1.0) if key in _SHARES else None
            chart = drawing.heatmap(points, "layer", "head", drawing.Axis(key, series.unit), series.title, domain)
            sheet.chart(chart, series.meaning, name=f"text-{key}")


def _worth(sheet: Any, found: OnText) -> None:
    if not found.without:
        return
    axis = drawing.Axis("worth", "nats a token", log=min(found.without) > (found.loss or 0.0))
    chart = drawing.profile(found.worth(), "layer", axis, title="Loss without a block, less the loss with it")
    sheet.section("What each block is worth").chart(
        chart,
        "Each block is left out alone; blocks that could be left out together are another question.",
        name="text-worth",
    )
