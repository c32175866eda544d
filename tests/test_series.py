"""The table of series, and what reads old records and new ones alike."""

from __future__ import annotations

from pathlib import Path

import pytest

from gnomon import series


def test_every_series_says_what_it_is():
    for key, one in series.SERIES.items():
        assert one.section in series.SECTIONS and one.over in series.OVER, key
        assert one.title and one.meaning.endswith("."), key
        assert one.worst in ("max", "min") and one.heads in ("max", "mean"), key


def test_old_lists_and_new_places_read_alike():
    assert series.over_depth("angle", [0.1, 0.2]) == [0.1, 0.2]
    assert series.over_depth("angle", {"text.0.attention": 0.1, "text.0.mlp": 0.2}) == [0.1, 0.2]
    assert series.over_depth("attention_logit_max", {"text.0.attention": [1.0, 3.0], "text.1.attention": [2.0, 0.0]}) == [3.0, 2.0]
    assert series.over_depth("attention_entropy", {"text.0.attention": [1.0, 3.0]}) == [2.0]
    assert series.over_depth("unheard_of", [1.0]) == [1.0]
    assert series.over_depth("sigma_max", {"text.0.query": 1.0}) == series.over_depth("angle", None) == []


def test_an_unknown_series_is_shown_under_its_own_name():
    assert series.known("my_own").title == "My own"
    assert series.in_order(["my_own", "angle", "lr"]) == ["lr", "angle", "my_own"]


@pytest.mark.parametrize("place, parts", [
    ("text.3.query", ("text", 3, "query")), ("text.12.expert7.up", ("text", 12, "expert7.up")),
    ("text[model.layers].0.mlp", ("text[model.layers]", 0, "mlp"))])  # fmt: skip
def test_places_come_apart(place, parts):
    assert series.split_place(place) == parts


def test_what_is_no_place_is_refused():
    with pytest.raises(ValueError, match="STACK.LAYER.NAME"):
        series.split_place("lm_head")


def test_the_guide_tells_every_series_of_the_monitor():
    guide = (Path(__file__).parent.parent / "docs" / "guides" / "monitor.md").read_text(encoding="utf-8")
    of_our_loop = {"sigma_min", "tangency", "alignment"}
    for key, one in series.SERIES.items():
        if one.over != "run" and key not in of_our_loop:
            source = f" ({one.source})" if one.source else ""
            assert f"| `{key}` | {one.over} | {one.unit.replace('|', chr(92) + '|')} | {one.meaning}{source} |" in guide, key
