"""What a study leaves behind: `report.html` with figures, `results.csv` and `results.md`.

A variant's curve is the mean over its compared seeds with a band from the lowest to the highest.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gnomon import report
from gnomon.errors import UserError
from gnomon.files import atomic, read_json
from gnomon.progress import duration
from gnomon.series import over_depth
from gnomon.studies import verdict
from gnomon.studies.results import Results, after_training, curve

# How the main table is shown: keywords for `report.show`.
SHOWN: dict[str, Any] = {
    "columns": {
        "variant": "variant", "lr": "tuned lr", "seeds": "seeds", "mean": "final loss (nats)", "sd": "sd (nats)",
        "difference": "against baseline (nats)", "interval": "95% t interval", "p": "p (Holm)", "verdict": "verdict",
        "diverged": "diverged", "stalled": "stalled",
    },
    "formats": {"mean": ".4f", "sd": ".4f", "difference": "+.4f", "lr": "g", "p": ".2g"},
}  # fmt: skip

RULES = f"""
**Tuned.** Every variant had its learning rate searched on seed 1000, which no comparison uses. When the best rate lay at the
edge of the grid the grid was widened; a rate that still lies there is marked with `*`.

**Compared.** Losses are nats a token (of the MLP: an image). Differences are paired by seed. The interval is Student's t of their
mean, for one comparison alone. "Better" or "worse" is called where the p of the same test, corrected by Holm for every comparison
of the study, is below {verdict.LEVEL:g} *and* the mean difference is above {verdict.NOISE} nats; else "no difference seen", which is no
proof of equality. In a study where nothing differs, the rule calls a difference in at most {verdict.LEVEL:.0%} of studies
({verdict.FALSE_CALLS:.1%} of simulated ones: 20 variants against one baseline, three seeds, standard deviation 0.03).

**Diverged**: stopped by a number that is not finite, or ended {verdict.SPIKE} nats above its own best. **Stalled**: ended within
{verdict.STALL} nats of the entropy of single tokens, or above it. Diverged runs are counted and leave the mean.
"""


def write(results: Results, folder: str | Path) -> Path:
    """Write all three beside the runs; returns the page."""
    folder = Path(folder)
    study = results.study
    rows, claims = table(results), results.claims()
    report.csv(folder / "results.csv", results.rows())
    with atomic(folder / "results.md", "w") as file:
        file.write(markdown(results, folder))
    page = report.Page(study.title, study.command)
    page.text(_account(folder))
    page.table(rows, **SHOWN)
    if claims:
        page.section("Claims").table(claims)
    _intervals(page, results)
    for group in dict.fromkeys(variant.group for variant in study.variants):
        _group(page, results, group)
    if study.figures is not None:
        study.figures(page, results)
    page.section("Rules").text(f"{RULES}\n\n{_counted(results)}\n\n{study.notes}")
    return page.write(folder / "report.html")


def markdown(results: Results, folder: Path) -> str:
    """Tables for the documentation."""
    study = results.study
    text = [f"# {study.title}", f"`{study.command}`. " * bool(study.command) + _account(folder)]
    text.append(report.markdown(table(results), **SHOWN))
    if claims := results.claims():
        text.append(report.markdown(claims))
    return "\n\n".join([*text, RULES.strip(), _counted(results), study.notes.strip()]).strip() + "\n"


def _counted(results: Results) -> str:
    many, seeds = sum(found.pairs > 1 for found in results.verdicts.values()), len(results.study.seeds)
    told = f"Comparisons of this study: {many}; seeds: {seeds}."
    if many and seeds > 1:
        least = verdict.t_quantile(1 - verdict.LEVEL / many, seeds - 1)
        told += f" Its clearest difference is called from {least:.1f} standard errors on; more seeds (`--seeds`) lower that."
    return told


def table(results: Results) -> list[dict[str, Any]]:
    """The rows of the main table, spelled out."""
    return [
        row | {
            "lr": f"{row['lr']:g}" + "*" * row["edge"],
            "interval": f"[{row['low']:+.4f}, {row['high']:+.4f}]" if _finite(row["low"]) else "",
            "difference": row["difference"] if _finite(row["difference"]) else None,
            "p": row["p"] if _finite(row["p"]) else None,
            "verdict": "baseline" if row["verdict"] == "baseline" else f"{row['verdict']} ({row['baseline']})",
        }
        for row in results.rows()
    ]  # fmt: skip


def _account(folder: Path) -> str:
    """One line on what the study took."""
    file = folder / "study.json"
    if not file.exists():
        return ""
    sessions = read_json(file)["sessions"]
    wall, inside = (sum(session[key] for session in sessions) for key in ("wall_seconds", "run_seconds"))
    worker = sum(session["wall_seconds"] * session["jobs"] for session in sessions)
    runs = sum(session["runs"] for session in sessions)
    return f"{runs} runs in {duration(wall)}; {max(1 - inside / worker, 0):.1%} of the workers' time was not spent inside runs."


def _intervals(page: report.Page, results: Results) -> None:
    rows = []
    for row in results.rows():
        values = list(results.values(row["variant"]).values())
        if values:
            rows.append({"variant": row["variant"], "mean": row["mean"], "low": min(values), "high": max(values)})
    mean = report.Axis("mean", "nats; line: lowest to highest seed")
    _chart(page, lambda: report.intervals(
        rows, "variant", mean, "low", "high", title="Final validation loss"
    ), "Final loss of the compared seeds.", "final")  # fmt: skip


def _group(page: report.Page, results: Results, group: str) -> None:
    """The charts of one group of variants: loss, sensitivity, over depth, over steps."""
    names = [variant.name for variant in results.study.variants if variant.group == group]
    where = group or "all"
    page.section(f"In detail: {group}" if group else "In detail")
    loss = [row for name in names for row in band(results, name, "val_loss")]
    _chart(page, lambda: report.curves(
        loss, "step", report.Axis("val_loss", "nats"), report.Series("variant", names), "Validation loss (mean over seeds)",
        line=report.Line(dots=True, band=("low", "high"), focus=0.1),
    ), "Band: lowest to highest seed.", f"loss-{where}")  # fmt: skip
    _sensitivity(page, results, names, where)
    _depth(page, results, names, where)
    _over_steps(page, results, names, where)


def band(results: Results, name: str, key: str, pick: Callable[[Any], float] = float) -> list[dict[str, Any]]:
    """Rows step, key, low, high: a metric over the steps at which every seed that did not diverge recorded it."""
    runs = [curve(out) for out in results.compared(name).values() if out.fate != "diverged"]
    found: dict[int, list[float]] = {}
    for run in runs:
        for record in run:
            if record.get(key) is not None:
                found.setdefault(record["step"], []).append(pick(over_depth(key, record[key]) or record[key]))
    return [
        {"variant": name, "step": step, key: statistics.fmean(v), "low": min(v), "high": max(v)}
        for step, v in sorted(found.items()) if len(v) == len(runs)
    ]  # fmt: skip


def _sensitivity(page: report.Page, results: Results, names: list[str], where: str) -> None:
    rows = [
        {"variant": name, "lr": rate, "loss": out.value}
        for name in names for rate, out in results.tuned(name).items() if out.fate != "diverged"
    ]  # fmt: skip
    if rows:
        _chart(page, lambda: report.curves(
            rows, report.Axis("lr", "peak learning rate", log=True), report.Axis("loss", "nats"), report.Series("variant", names),
            "Final loss of the tuning runs", line=report.Line(dots=True),
        ), "Seed 1000. Rates at which a run diverged have no dot.", f"sensitivity-{where}")  # fmt: skip


DEPTH = (
    ("worth", "Loss added when a block is skipped", "nats", "Near zero: the block does nothing (the curse of depth)."),
    ("gradient_norm", "Gradient norm by block", "Frobenius norm", "On the trained model."),
    ("sink", "Attention paid to the first token", "share", "By tokens in the second half of the context, mean over heads."),
    ("stream_norm", "Norm of the stream by sublayer", "RMS over tokens", "At the last probe."),
    ("angle", "Angle turned by sublayer", "radians", "At the last probe."),
)


def _depth(page: report.Page, results: Results, names: list[str], where: str) -> None:
    """Profiles of the trained models, means over seeds."""
    for key, title, unit, told in DEPTH:
        rows = []
        for name in names:
            alive = [out for out in results.compared(name).values() if out.fate != "diverged"]
            found = [at for out in alive if (at := after_training(out).get(key) or _last(curve(out), key))]
            rows += [{"variant": name, "depth": i, key: statistics.fmean(at)} for i, at in enumerate(zip(*found))]
        if rows:
            wide = key in ("gradient_norm", "stream_norm") and min(row[key] for row in rows) > 0
            _chart(page, lambda rows=rows, key=key, title=title, unit=unit, wide=wide: report.profile(
                rows, "depth", report.Axis(key, unit, wide), report.Series("variant", names), title
            ), told, f"{key}-{where}")  # fmt: skip


STEPS: tuple[tuple[str, Callable[[Any], float], str, str, bool], ...] = (
    ("attention_logit_max", max, "Largest attention logit", "over blocks", True),
    ("attention_entropy", min, "Lowest attention entropy of a block", "nats", False),
    ("sigma_max", lambda d: max(v for name, v in d.items() if name.endswith(("query", "key", "[query]", "[key]"))),
     "Largest singular value of a query or key matrix", "over blocks", True),
    ("alignment", lambda d: statistics.fmean(d.values()), "Alignment of the direction with the optimum", "mean", False),
)  # fmt: skip


def _over_steps(page: report.Page, results: Results, names: list[str], where: str) -> None:
    """What the probes saw inside attention and the optimizer."""
    for key, pick, title, unit, log in STEPS:
        rows = [row for name in names for row in band(results, name, key, pick)]
        if rows:
            _chart(page, lambda rows=rows, key=key, title=title, unit=unit, log=log: report.curves(
                rows, "step", report.Axis(key, unit, log), report.Series("variant", names), title,
                line=report.Line(dots=True, band=("low", "high")),
            ), "Mean over seeds; band: lowest to highest.", f"{key}-{where}")  # fmt: skip


def _last(records: list[dict[str, Any]], key: str) -> list[float]:
    return next((values for r in reversed(records) if (values := over_depth(key, r.get(key)))), [])


def _chart(page: report.Page, make: Callable[[], Any], caption: str, name: str) -> None:
    """Add a chart; one without a single drawable row is left out, and the page says so."""
    try:
        page.chart(make(), caption, name)
    except UserError as error:
        if "install" in str(error):
            raise
        page.text(f"*{name}: nothing to draw ({error}).*")


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
