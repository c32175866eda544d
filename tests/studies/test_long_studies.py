"""What the studies of long runs read out of the records that their outcomes keep."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon import studies
from gnomon.studies import drift_study, instability_study
from gnomon.studies.results import NOT, REPRODUCED, Results
from gnomon.studies.standing import settle
from gnomon.studies.study import Outcome, plan


def probe(step, sigma, logit):
    return {
        "step": step, "sigma_max": {"text.0.query": sigma, "text.0.key": sigma / 2, "text.0.up": 99.0},
        "attention_logit_max": {"text.0.attention": [logit / 2, logit]}, "attention_entropy": {"text.0.attention": [0.5, 0.25]},
    }  # fmt: skip


@pytest.mark.parametrize("grown, word", [(30.0, REPRODUCED), (1.5, NOT)])
def test_growing_singular_values_of_query_and_key_are_told_from_bounded_ones(grown, word):
    one = studies.load("instability", "tiny", seeds=1)

    def ran(run):
        end = probe(900, grown, 100 * grown) if run.variant == "dgram" else probe(900, 1.0, 20.0)
        return Outcome("learned", 2.0, 1.0, Path("nowhere"), ((500, 500, 2.1), (900, 900, 2.0)), (probe(0, 1.0, 5.0), end))

    results = Results(one, settle(one, ran))
    start, end = instability_study.course(results, "dgram")
    assert start["step"] == 0 and end["sigma of query and key"] == grown and end["largest logit"] == 100 * grown
    assert end["lowest entropy"] == 0.375 and end["validation loss"] == 2.0
    claims = {claim["claim"]: claim["verdict"] for claim in results.claims()}
    assert claims["with DGram attention singular values of query and key grow, and logits with them"] == word
    assert claims["dgram becomes unstable"] == NOT


@pytest.mark.parametrize("name", ["instability", "warnings"])
def test_the_one_rate_of_all_can_be_set(name):
    one = studies.load(name, "tiny", seeds=1, changes={"optim.lr": 0.01})
    assert {(run.rate, run.recipe.optim.lr) for run in plan(one)} == {(0.01, 0.01)}


@pytest.mark.parametrize("end, kept", [(0.85, True), (0.5, False)])
def test_continuity_that_fell_below_its_peak_is_lost(end, kept):
    one = studies.load("drift", "tiny", variants=["MNIST MLP of width 16"])

    def ran(run):
        means = {0: 0.2, 9: 0.9, 5000: end}
        records = [{"step": s, "weight_v1": {"0": v - 0.01, "1": v + 0.01}, "change": {"0": s / 1000}} for s, v in means.items()]
        return Outcome("learned", 0.2, 1.0, Path("nowhere"), ((5000, 0, 0.2),), tuple(records))

    results = Results(one, settle(one, ran))
    course = drift_study.course(results, "Res+None, width 16")
    assert course == pytest.approx({"at the start": 0.2, "peak": 0.9, "step of the peak": 9, "at the end": end, "|dW|/|W0|": 5.0})
    claims = {claim["claim"]: claim["verdict"] for claim in results.claims()}
    assert (claims["Res+ReLU, width 16: continuity is kept"] == REPRODUCED) == kept
    assert (claims["Res+None, width 16: continuity is lost by drift"] == REPRODUCED) == (not kept)
    assert claims["width 16: continuity forms where |dW| passes |W0|"] == REPRODUCED
