"""A recommendation as tables and a command, for the terminal."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon.models.config import MODERN
from gnomon.train.recommend import BASELINE, Advice, Forecast

AGAINST = f"against tuned {BASELINE} (nats)"


def command(advice: Advice) -> str:
    """`gnomon train` with what is recommended. The preset gives what the advice leaves open: contexts of 1,024 tokens; heads have
    64 channels, or 32, where the width allows."""
    planned = advice.planned
    size = {
        "steps": planned.steps, "data.batch": max(planned.tokens // 1024, 1), "model.layers": planned.layers,
        "model.width": planned.width,
        "model.heads": next((planned.width // size for size in (64, 32) if planned.width % size == 0), 1),
    }  # fmt: skip
    block = {f"model.{key}": value for key, value in MODERN.items()} if advice.chosen.used[0].block == "modern" else {}
    options = {f"model.residual_options.{key}": value for key, value in advice.residual_options.items()}
    settings = size | block | options | dict(advice.settings)
    words = ["gnomon", "train", "gpt2-small", "--residual", advice.residual, "--assignment", advice.assignment, "--set"]
    return shlex.join([*words, *(f"{path}={_word(value)}" for path, value in settings.items())])


def found(advice: Advice) -> list[dict[str, Any]]:
    """One row a contestant, the best first: what it is expected to gain, and what it rests on."""
    return [
        {
            "contestant": forecast.contestant + " *" * (forecast.contestant == advice.chosen.contestant),
            AGAINST: _difference(forecast.difference, forecast.low, forecast.high) if forecast.used[0].difference is not None else "",
            "points": len(forecast.used), "diverged": forecast.diverged, "not measured": ", ".join(forecast.unmeasured),
        }
        for forecast in advice.forecasts
    ]  # fmt: skip


def evidence(forecast: Forecast) -> list[dict[str, Any]]:
    """The points that a forecast rests on, as they were measured."""
    return [
        {
            "axis": row.axis + (f" x {row.factor:g}" if row.axis == "rate" else ""), "layers": row.layers, "width": row.width,
            "steps": row.steps, "tokens a step": row.tokens, "rate": row.settings["optim.lr"], "seeds": row.seeds,
            "loss (nats)": row.mean, AGAINST: "" if row.difference is None else _difference(row.difference, row.low, row.high),
        }
        for row in forecast.used
    ]  # fmt: skip


def distance(advice: Advice) -> list[dict[str, Any]]:
    """By axis: the plan, octaves outside of what was measured, and octaves by which the tuned rate moved."""
    moved = {"layers": "depth"}
    return [
        {
            "axis": attribute if attribute != "tokens" else "tokens a step", "planned": getattr(advice.planned, attribute),
            "outside (octaves)": f"{octaves:+.1f}" if octaves else "inside",
            "rate moved (octaves)": _octaves(advice.rate_moved.get(moved.get(attribute, attribute))),
        }
        for attribute, octaves in advice.outside.items()
    ]  # fmt: skip


def trials(changes: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tuning runs, one a row."""
    told = [" ".join(f"{path}={_word(value)}" for path, value in change.items()) for change in changes]
    return [{"tuning run": number, "--set": text or "as above"} for number, text in enumerate(told, 1)]


def _difference(mean: float, low: float | None, high: float | None) -> str:
    return f"{mean:+.4f} [{low:+.4f}, {high:+.4f}]"


def _octaves(value: float | None) -> str:
    return "not searched" if value is None else f"{value:+.1f}"


def _word(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
