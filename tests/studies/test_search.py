"""Equal tuning: draws, rungs and winners."""

from __future__ import annotations

import math

from gnomon.studies.search import Budget, Choice, Log, Rung, best, draws, wanted

SPACE = {"optim.lr": Log(1e-3, 1e-1), "optim.weight_decay": Choice((0.0, 0.05, 0.2))}
BUDGET = Budget(trials=9, share=0.25, keep=1 / 3)


def test_the_first_trial_is_the_recipe_and_every_stratum_has_one():
    found = draws(SPACE, BUDGET)
    assert len(found) == 9 and found[0] == ()
    rates = sorted(dict(trial)["optim.lr"] for trial in found[1:])
    for i, rate in enumerate(rates):
        place = math.log(rate / 1e-3) / math.log(100)
        assert i / 8 - 0.02 <= place <= (i + 1) / 8 + 0.02
    decays = [dict(trial)["optim.weight_decay"] for trial in found[1:]]
    assert all(decays.count(value) in (2, 3) for value in (0.0, 0.05, 0.2))


def test_contestants_share_the_draws_of_common_knobs():
    more = draws({**SPACE, "model.residual_options.clamp": Log(0.1, 1.5)}, BUDGET)
    for one, other in zip(draws(SPACE, BUDGET), more):
        assert dict(one).items() <= dict(other).items()


def test_short_runs_first_then_the_best_third_whole_then_the_winner():
    truth = {trial: abs(math.log(dict(trial).get("optim.lr", 0.5) / 0.02)) for trial in draws(SPACE, BUDGET)}
    measured: dict[Rung, float] = {}
    rounds = 0
    while todo := [rung for rung in wanted(SPACE, BUDGET, measured.get) if rung not in measured]:
        assert best(SPACE, BUDGET, measured.get) is None
        measured |= {rung: truth[rung.trial] for rung in todo}
        rounds += 1
    assert rounds == 2 and len(measured) == 12
    assert best(SPACE, BUDGET, measured.get) == min(truth, key=lambda trial: truth[trial])


def test_where_all_fail_the_recipe_stays_as_it_is():
    assert best(SPACE, BUDGET, lambda rung: math.inf) == ()


def test_cost():
    assert BUDGET.runs == 9 * 0.25 + 3
