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


def searched(truth) -> tuple[dict[Rung, float], int]:
    """All rungs of a search where `truth` scores a rung, and in how many rounds they became known."""
    measured: dict[Rung, float] = {}
    rounds = 0
    while todo := [rung for rung in wanted(SPACE, BUDGET, measured.get, 0.5) if rung not in measured]:
        assert best(SPACE, BUDGET, measured.get, 0.5) is None
        measured |= {rung: truth(rung) for rung in todo}
        rounds += 1
    return measured, rounds


def test_short_runs_first_then_the_best_third_whole_then_the_rate_of_the_best():
    def off(rung: Rung, place: float) -> float:
        return abs(math.log(dict(rung.trial).get("optim.lr", 0.5) / place))

    measured, rounds = searched(lambda rung: off(rung, 0.02))
    whole = [rung for rung in measured if rung.number == 1]
    assert rounds == 3 and len(whole) == 3 + 2
    assert best(SPACE, BUDGET, measured.get, 0.5) == min(whole, key=lambda rung: off(rung, 0.02)).trial
    # Whole runs want a quarter of the rate of short ones: the grid follows it over its edge.
    measured, rounds = searched(lambda rung: off(rung, 0.005 if rung.number else 0.02))
    found = dict(best(SPACE, BUDGET, measured.get, 0.5) or ())
    assert rounds == 4 and 0.0035 <= found["optim.lr"] <= 0.007 and "optim.weight_decay" in found


def test_the_recipe_s_own_rate_is_where_its_grid_starts():
    measured, _ = searched(lambda rung: abs(math.log(dict(rung.trial).get("optim.lr", 0.5) / 0.3)))
    assert best(SPACE, BUDGET, measured.get, 0.5) == (("optim.lr", 0.25),)


def test_where_all_fail_the_recipe_stays_as_it_is():
    assert best(SPACE, BUDGET, lambda rung: math.inf, 0.5) == ()


def test_cost():
    assert BUDGET.runs == 9 * 0.25 + 3 + 4
