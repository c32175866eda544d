"""`gnomon study residuals`: how sublayers join the stream (arXiv 2608.02668, 2601.22095), over depth and learning rate.

Four groups of variants. "twelve layers": every residual, tuned over a wide grid, so that the sensitivity to the rate is seen as
well. "decay and cap": what the sphere's options are worth. "depth": the main ones at 6, 24 and 48 layers. "no head bias": why
the sphere can stop at the entropy of single tokens, and what else cures it (docs/log.md, 2026-11-29).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from gnomon import report
from gnomon.series import over_depth
from gnomon.studies.claims import beats
from gnomon.studies.results import Results, curve
from gnomon.studies.scales import contestant, sized
from gnomon.studies.study import Claim, Finding, Outcome, Study, Variant
from gnomon.train import replace
from gnomon.train.presets import BASELINE

NAMES = {
    "Pre-LN": "pre-norm", "Post-LN": "post-norm", "Pre-DyT": "pre-dyt", "Peri-LN": "peri-norm", "Keel": "keel",
    "DeepNorm": "deepnorm", "LayerNorm scaling": "layernorm-scaling", "GeoNorm": "geonorm",
}  # fmt: skip

RESIDUALS: dict[str, dict[str, Any]] = {name: {"model.residual": residual} for name, residual in NAMES.items()} | {
    f"sphere p={p:g}": {"model.residual": "sphere", "model.residual_options.p": p} for p in (0.5, 1.0, 2.0, 4.0, math.inf)
}
CLAMPED = "sphere p=1, clamp pi/4"
RESIDUALS[CLAMPED] = RESIDUALS["sphere p=1"] | {"model.residual_options.clamp": math.pi / 4}

OPTIONS: dict[str, dict[str, Any]] = {
    "l counts blocks": {"count": "block"},
    "no decay": {"decay": "none"},
    "harmonic decay": {"decay": "harmonic"},
    "cap 0.5": {"cap": 0.5},
    "GeoNorm's decay and clamp": {"count": "block", "decay": "harmonic", "clamp": math.pi / 4},
}

BARE = "no head bias"
"""The group; and a part of its variants' names."""

DEEP = ("Pre-LN", "Post-LN", "Keel", "sphere p=1")
SMOKE = ("Peri-LN", "GeoNorm", "sphere p=1", "sphere p=1, 6 layers")

# Narrow, because depth and the number of runs are what this study is about; 1/sqrt(64) is the init.
TINY: dict[str, Any] = {
    "steps": 200, "model.width": 64, "model.heads": 2, "model.context": 64, "model.layers": 12, "model.init_std": 0.125,
    "schedule.warmup": 20, "data.batch": 8, "watch.eval_every": 50, "watch.eval_tokens": 8192, "watch.save_every": 0,
}  # fmt: skip

SMALL: dict[str, Any] = {
    "steps": 3000, "model.layers": 24, "model.width": 256, "model.heads": 4, "model.context": 256, "data.batch": 16,
    "model.init_std": 0.0625, "model.head_bias": True, "schedule.warmup": 150, "compute.compile": False,
    "watch.eval_every": 250, "watch.eval_tokens": 131072, "watch.probe_every": 250, "watch.save_every": 250,
}  # fmt: skip


def study(scale: str, changes: dict[str, Any]) -> Study:
    """The grid at a scale; the groups of options, depth and head bias are run at "tiny" only, which tunes on whole runs because
    the sensitivity to the rate is part of its result."""
    wide = {"tiny": (1e-3, 2e-3, 4e-3, 8e-3), "small": (1e-3, 2e-3, 4e-3), "paper": (6e-4,)}[scale]
    short = wide[1:] if scale == "tiny" else wide
    base = sized(scale, "gpt2-medium", BASELINE, TINY, SMALL)

    def variant(name: str, group: str, settings: dict[str, Any], rates: tuple[float, ...], baseline: str) -> Variant:
        return contestant(name, replace(replace(base, settings), changes, shared=True), rates, baseline, group)

    main = "twelve layers" if scale == "tiny" else ""
    variants = [variant(name, main, settings, wide, "Pre-LN") for name, settings in RESIDUALS.items()]
    if scale == "tiny":
        sphere = RESIDUALS["sphere p=1"]
        variants += [
            variant(f"p=1, {name}", "decay and cap", sphere | _options(options), short, "sphere p=1")
            for name, options in OPTIONS.items()
        ]
        for depth in (6, 24, 48):
            group = f"{depth} layers"
            chosen = {name: RESIDUALS[name] for name in DEEP}
            if depth > 12:
                chosen |= {name: RESIDUALS[name] for name in ("GeoNorm", CLAMPED)}
            variants += [
                variant(f"{name}, {group}", group, settings | {"model.layers": depth}, short, f"Pre-LN, {group}")
                for name, settings in chosen.items()
            ]
        bare = {"model.head_bias": False, "watch.probe_every": 10}
        plain, matrices = f"p=1, {BARE}", (0.02, 0.04, 0.08)
        variants += [
            variant(f"Pre-LN, {BARE}", BARE, RESIDUALS["Pre-LN"] | bare, short, f"Pre-LN, {BARE}"),
            variant(plain, BARE, sphere | bare, (*short, 1.6e-2), f"Pre-LN, {BARE}"),
            variant(f"{plain}, cap 0.3", BARE, sphere | bare | _options({"cap": 0.3}), (*short, 1.6e-2), plain),
        ]
        for assignment in ("stiefel", "hetero"):
            optim = {"optim.name": "manifold-muon", "optim.assignment": assignment, "optim.adamw_lr": 4e-3}
            variants.append(variant(f"{plain}, {assignment}", BARE, sphere | bare | optim, matrices, plain))
    return Study(
        name="residuals",
        title="How sublayers join the stream: fourteen residuals over learning rate and depth",
        scale=scale,
        variants=tuple(variants),
        claims=CLAIMS,
        figures=figures,
        widen=1,
        tuning=1.0 if scale == "tiny" else 0.5,
    )


def _options(values: dict[str, Any]) -> dict[str, Any]:
    return {f"model.residual_options.{key}": value for key, value in values.items()}


def _converges(results: Results) -> Finding:
    """Over every rate tried and every depth, and how the baseline fares on the same rates."""
    said, failed = [], False
    for start, name in (("sphere", "SpheretNorm"), ("Pre-LN", "Pre-LN")):
        names = [v.name for v in results.study.variants if v.name.startswith(start) and v.group != BARE and "clamp" not in v.name]
        runs = [(f"{name}, lr {rate:g}", out) for name in names for rate, out in results.tuned(name).items()]
        runs += [(f"{name}, seed {seed}", out) for name in names for seed, out in results.compared(name).items()]
        lost = [f"{where} ({out.fate})" for where, out in runs if out.fate != "learned"]
        said.append(f"{name}: {len(lost)} of {len(runs)} runs" + (f": {', '.join(lost)}" if lost else ""))
        failed |= bool(lost) and start == "sphere"
    return Finding("stalled or diverged, of " + "; of ".join(said), not failed, [])


FAMILY = tuple(name for name in RESIDUALS if name.startswith("sphere") and name != CLAMPED)


def _best_p(results: Results) -> Finding:
    """p = 1 has the lowest mean, and is told apart from the next."""
    order = sorted((name for name in FAMILY if name in results), key=results.mean)
    said = ", ".join(f"{name.removeprefix('sphere ')} {results.mean(name):.4f}" for name in order)
    first = order[0] == "sphere p=1"
    found = results.against("sphere p=1", order[1] if first else order[0])
    figures = [*map(results.mean, order), found.low]
    if found.word == "no difference seen":
        return Finding(f"{said}; p=1 and the best other not told apart ({found.mean:+.4f})", False, figures)
    return Finding(said, first, figures)


def _others_fail(results: Results) -> Finding:
    deep = [f"{name}, 48 layers" for name in DEEP if not name.startswith("sphere") and f"{name}, 48 layers" in results]
    failed = [f"{n} ({results.fates(n, 'diverged')} diverged, {results.fates(n, 'stalled')} stalled)" for n in deep
              if results.fates(n, "diverged") + results.fates(n, "stalled")]  # fmt: skip
    return Finding("failed at 48 layers: " + ", ".join(failed) if failed else "all learned at 48 layers", bool(failed), [])


def kept(angles: Sequence[float]) -> float:
    """Share of the state that enters the blocks still in the one that leaves them: each sublayer keeps cos(angle) of it."""
    return math.prod(math.cos(angle) for angle in angles)


def angles(outcome: Outcome) -> list[list[float]]:
    """By which each sublayer turned, at every step that was measured."""
    return [turns for record in curve(outcome) if (turns := over_depth("angle", record.get("angle")))]


def _stall(results: Results) -> Finding:
    """How far the sphere without a head bias turns at each rate, and where it learns little more than token frequencies."""
    said, runs = [], results.tuned(f"p=1, {BARE}")
    for rate, outcome in runs.items():
        probes = angles(outcome)
        ratio = max((math.tan(max(turns)) for turns in probes), default=math.nan)
        left = min(map(kept, probes), default=math.nan)
        said.append(f"lr {rate:g}: {outcome.value:.2f} ({outcome.fate}), ratio up to {ratio:.1f}, {left:.1e} of the input kept")
    losses = [outcome.value for outcome in runs.values() if outcome.fate != "diverged"] or [math.nan]
    return Finding("; ".join(said), max(losses) > min(losses) + 0.5, losses)


def _cure(name: str) -> Callable[[Results], Finding]:

    def judge(results: Results) -> Finding:
        runs = results.tuned(name)
        failed = [f"{rate:g} ({out.fate})" for rate, out in runs.items() if out.fate != "learned"]
        rates = ", ".join(f"{rate:g}" for rate in runs)
        said = f"loss {results.mean(name):.4f} against {results.mean(f'p=1, {BARE}'):.4f} without; rates {rates}: "
        # With one rate there was no high one to stall at.
        figures = [0.0 if len(runs) > 1 else math.nan]
        return Finding(said + (f"failed at {', '.join(failed)}" if failed else "all learned"), not failed, figures)

    return judge


def figures(page: report.Page, results: Results) -> None:
    """What decides whether a sphere learns: how much of the input its turns leave, over every run; and at every rate of the
    variants without a head bias, how that comes about."""
    spheres = [v for v in results.study.variants if v.recipe.model.residual in ("sphere", "geonorm")]
    runs = [(v, rate, out) for v in spheres for rate, out in results.tuned(v.name).items()]
    runs += [(v, results.rate(v.name), out) for v in spheres for out in results.compared(v.name).values()]
    ends = [
        {"variant": v.name, "group": v.group or "all", "lr": rate, "loss": out.value,
         "kept": kept(probes[-1])}
        for v, rate, out in runs if out.fate != "diverged"
        if (probes := angles(out))
    ]  # fmt: skip
    if ends:
        page.section("What is left of the input")
        left = report.Axis("kept", "product over sublayers of the cosine of the turn, at the end", log=True)
        chart = report.scatter(ends, left, report.Axis("loss", "final loss (nats)"), "group",
                               "Final loss over the share of the entering state that is left", told=("variant", "lr"))  # fmt: skip
        page.chart(chart, "Every run on a sphere, tuning runs included.", "kept")
    steps = [
        {"run": f"{v.name.removeprefix(f'p=1, {BARE}').lstrip(', ') or 'plain'}, lr {rate:g}", "step": record["step"],
         "turn": max(over_depth("angle", record["angle"])), "alike": over_depth("stream_coherence", record["stream_coherence"])[-1]}
        for v in spheres if v.group == BARE
        for rate, out in results.tuned(v.name).items() for record in curve(out) if record.get("angle")
    ]  # fmt: skip
    if steps:
        page.section("Without a head bias, at every rate")
        turn, alike = report.Axis("turn", "radians"), report.Axis("alike", "length of the mean unit state")
        page.chart(report.curves(steps, "step", turn, "run", "Largest angle of a sublayer"),
                   "Tuning runs. The ratio of step to stream is the tangent of this angle.", "stall-angle")  # fmt: skip
        page.chart(report.curves(steps, "step", alike, "run", "Coherence of the last states"),
                   "1: the states of all tokens are one point.", "stall-coherence")  # fmt: skip


CLAIMS = (
    beats("1-SpheretNorm beats Peri-LN", "perplexity 16.81 < 19.09 (24 layers)", "sphere p=1", "Peri-LN"),
    beats("1-SpheretNorm beats GeoNorm", "best p is 1", "sphere p=1", "GeoNorm"),
    Claim("p = 1 is the best of the family", "p = 1", _best_p, ("sphere p=1", "sphere p=2"),
          tuple(("sphere p=1", name) for name in FAMILY if name != "sphere p=1")),
    beats("GeoNorm beats Pre-LN", "1.8792 < 1.9032 (Arxiv, 125M)", "GeoNorm", "Pre-LN"),
    beats("1-SpheretNorm beats Pre-LN at 48 layers", "Pre-LN diverged (OpenWebText, medium)",
          "sphere p=1, 48 layers", "Pre-LN, 48 layers"),
    Claim("deep baselines stall or diverge", "Pre-LN and Keel diverged", _others_fail, ("Pre-LN, 48 layers",)),
    *(beats(f"{name} beats Pre-LN at 48 layers", "our question", f"{name}, 48 layers", "Pre-LN, 48 layers")
      for name in ("GeoNorm", CLAMPED)),
    Claim("every SpheretNorm converges", "always", _converges, ("sphere p=1",)),
    Claim("without a head bias the sphere stalls at a high rate", "our prototype, lr 1e-2: 3.35", _stall, (f"p=1, {BARE}",)),
    *(Claim(f"{what} removes that stall", "our question", _cure(f"p=1, {BARE}, {name}"),
            (f"p=1, {BARE}", f"p=1, {BARE}, {name}"))
      for what, name in (("a cap on the ratio", "cap 0.3"), ("Stiefel weights", "stiefel"), ("hetero weights", "hetero"))),
)  # fmt: skip
