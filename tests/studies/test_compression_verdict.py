"""What lines of measurements say: against numpy and scipy, and on lines of which one knows what they hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from gnomon.studies import compression_verdict as verdict


def line(method="whole", keep=1.0, sample=0, model="m, seed 0", **more):
    return {"model": model, "method": method, "keep": keep, "sample": sample, "weights": int(1000 * keep), "bytes": int(2000 * keep)} | more


def losses(a, b):
    return {"a": a, "b": b}


def test_rank_correlation_is_scipys():
    x, y = np.random.default_rng(0).integers(0, 9, (2, 20)).tolist()
    assert verdict.spearman(x, y).rho == pytest.approx(stats.spearmanr(x, y).statistic, rel=1e-12)
    assert verdict.ranks(x) == stats.rankdata(x).tolist()


def test_the_interval_covers():
    """Of pairs that do not correlate, one interval in twenty leaves zero out."""
    drawn = np.random.default_rng(0)
    found = [verdict.spearman(*drawn.normal(size=(2, 24))) for _ in range(2000)]
    out = sum(one.low > 0 or one.high < 0 for one in found)
    assert 0.03 < out / 2000 < 0.07


def test_what_does_not_vary_has_no_correlation():
    assert math.isnan(verdict.spearman([1, 1, 1, 1], [1, 2, 3, 4]).rho) and math.isnan(verdict.spearman([1, 2], [2, 1]).rho)
    assert verdict.spearman([1, 2, 3, 4, 5], [1, 2, 3, 4, 5]).low > 0.9


def test_the_table_is_of_differences():
    lines = [line(losses=losses(1.0, 2.0))]
    lines += [line("private", 0.8, sample, losses=losses(1.1 + 0.01 * sample, 2.5)) for sample in range(3)]
    lines += [line("private", 0.6, losses=losses(3.0, 4.0))]
    found = verdict.tables(lines, "m")
    half = stats.t.ppf(0.975, 2) * 0.01 / math.sqrt(3)
    assert list(found) == ["a", "b", verdict.BYTES]
    assert found["a"] == [
        {"method": "whole", "100 %": "1.0000", "80 %": "", "60 %": ""},
        {"method": "private", "100 %": "", "80 %": f"+0.1100 ± {half:.4f} (3)", "60 %": "+2.0000"},
    ]
    assert found[verdict.BYTES][1] == {"method": "private", "100 %": "", "80 %": "0.800", "60 %": "0.600"}


def test_the_table_of_last_words():
    lines = [line(losses=losses(1.0, 2.0), lambada={"items": 9, "accuracy": 0.5, "nats": 2.0}), line("mlp", 0.8, losses=losses(1, 2))]
    lines += [line("private", 0.8, sample, lambada={"items": 9, "accuracy": 0.25, "nats": 3.5}) for sample in range(2)]
    found = verdict.tables(lines, "m")
    assert found[verdict.LAMBADA] == [
        {"method": "whole", "100 %": "2.0000", "80 %": ""}, {"method": "private", "100 %": "", "80 %": "+1.5000 ± 0.0000 (2)"},
    ]  # fmt: skip
    assert [row["80 %"] for row in found[verdict.ACCURACY]] == ["", "25.0 ± 0.0 (2)"]
    assert [row["method"] for row in found["a"]] == ["whole", "mlp"]


def test_models_that_differ_by_their_seed_are_one_family():
    lines = [line(model=f"m, seed {seed}", losses=losses(1.0 + seed, 1.0)) for seed in range(2)]
    lines += [line("private", 0.8, model=f"m, seed {seed}", losses=losses(1.2 + seed, 1.1)) for seed in range(2)]
    assert verdict.families(lines) == ["m"]
    assert verdict.tables(lines, "m")["a"][1]["80 %"] == "+0.2000 ± 0.0000 (2)"


def test_lines_of_other_settings_are_not_compared():
    lines = [line(losses=losses(1.0, 1.0), tokens=100), line("private", 0.8, losses=losses(1.2, 1.1), tokens=100)]
    lines += [line(losses={"a": 5.0}, tokens=50), line("modules", 0.8, losses={"a": 9.0}, tokens=75)]
    assert [(row["method"], row["80 %"]) for row in verdict.tables(lines, "m")["a"]] == [("whole", ""), ("private", "+0.2000")]
    assert not any("modules costs less than private" in found["claim"] for found in verdict.claims(lines))


def claim(lines, start):
    return next(found for found in verdict.claims(lines) if found["claim"].startswith(start))


@pytest.mark.parametrize(("input_", "word"), [(1.0, "holds"), (1.4, "the reverse"), (None, "not seen")])
def test_the_axis_rule(input_, word):
    noise = [0.001, -0.002, 0.001, 0.003]
    lines = []
    for sample, jitter in enumerate(noise):
        own = 1.2 + jitter if input_ is None else input_
        cell = {side: losses(loss, 9.0) for side, loss in (("own", 1.1 + jitter), ("input", own), ("output", 1.2 + 2 * jitter))}
        lines.append(line("roles", 0.5, sample, roles={"query": cell, "value": cell}))
    assert claim(lines, "query: a shared input basis costs less than a shared output")["verdict"] == word
    assert claim(lines, "value: a basis of its own costs less than a shared output")["verdict"] == "holds"


def test_the_axis_rule_over_all_models():
    lines = [
        line("roles", 0.5, model=f"{name}, seed {seed}", roles={"up": {s: losses(1 + 0.001 * seed + add, 9.0) for s, add in
             (("own", 0.2), ("input", 0.001 * seed), ("output", 0.1))}})
        for name in ("m", "n") for seed in range(3)
    ]  # fmt: skip
    # Measured in other tokens, a model is not one of them.
    lines.append(line("roles", 0.5, model="o, seed 0", tokens=7, roles={"up": {s: losses(9.0, 9.0) for s in ("own", "input", "output")}}))
    pooled = [found for found in verdict.claims(lines) if found["model"] == verdict.ALL]
    assert len(pooled) == 2 and all("6 cells" in found["found"] and found["verdict"] == "holds" for found in pooled)


def test_what_predicts_blocks():
    worth = [0.5, 0.1, 0.4, 0.3, 0.2, 0.6, 0.7, 0.8]
    blocks = {
        "whole": 1.0, "without": [1 + w for w in worth], "change": worth, "calibration": worth[::-1],
        "continuity": [None, *worth[1:]],
    }  # fmt: skip
    lines = [line("blocks", 0.5, blocks=blocks)]
    assert claim(lines, "change predicts which blocks")["verdict"] == "holds"
    assert claim(lines, "continuity predicts which blocks")["verdict"] == "the reverse"
    assert "over 7" in claim(lines, "continuity predicts which blocks")["found"]
    assert claim(lines, "calibration predicts which blocks")["verdict"] != "holds"


def test_what_predicts_pairs():
    extra = [0.1, 0.5, 0.2, 0.7, 0.6, 0.3, 0.9, 0.8]
    pairs = {"shared": [2 + e for e in extra], "own": [2.0] * 8, "tail": extra, "continuity": [-e for e in extra]}
    for name in ("tail", "continuity"):
        assert claim([line("pairs", 0.5, pairs=pairs)], f"{name} predicts which neighbours")["verdict"] == "holds"


@pytest.mark.parametrize(("last", "word"), [(0.3, "holds"), (0.1, "does not hold")])
def test_whitening_is_judged_matrix_by_matrix(last, word):
    lines = [line("whitening", 0.5, whitening={"query": {"whitened": [0.1, 0.2], "plain": [0.2, last]}})]
    found = claim(lines, "the whitened SVD loses no more")
    assert found["verdict"] == word and found["found"].startswith(f"in {2 if word == 'holds' else 1} of 2 matrices; in the mean 15.0%")


@pytest.mark.parametrize(("best", "word"), [(1.0, "holds"), (1.2, "does not hold")])
def test_the_aim(best, word):
    lines = [line("private", 0.8, losses=losses(1.2, 2.2)), line("modules", 0.8, losses=losses(best, 2.0))]
    # Healed, any method could be: that is no contest with an SVD that is not.
    lines.append(line("mlp + heal 50", 0.8, losses=losses(0.5, 0.5)))
    found = claim(lines, "the best at 0.8")
    assert found["verdict"] == word and found["found"].startswith("modules:")


def test_a_single_cell_has_no_verdict():
    lines = [line("private", 0.8, losses=losses(1.2, 2.2)), line("modules", 0.8, losses=losses(1.0, 2.0))]
    assert claim(lines, "modules costs less than private, 0.8 kept, a")["verdict"] == "one cell: no verdict"
