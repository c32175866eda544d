"""The report of runs: what it reads, what it says when something is missing, and what it draws."""

from __future__ import annotations

import json
import math
import re
import statistics

import pytest

from gnomon import UserError
from gnomon.report import read_runs, run_page, run_report, show, summary, summary_table
from gnomon.report.training_report import tensor_group

pytest.importorskip("altair")
pytest.importorskip("vl_convert")

LAYERS = 3


def metrics(steps: int, scale: float = 1.0) -> list[dict]:
    rows = []
    for step in range(1, steps + 1):
        row = {"step": step, "tokens": 512 * step, "seconds": 0.5 * step, "loss": 2 + 3 / step, "lr": 1e-3,
               "grad_norm": 1.0 + 0.1 * (step % 3), "tokens_per_second": 1000.0 + step % 5}
        if step % 10 == 0:
            row |= {"val_loss": 2.1 + 3 / step, "stream_norm": [scale * (i + step) for i in range(2 * LAYERS)],
                    "angle": [0.1] * (2 * LAYERS), "attention_logit_max": [scale * step, 1.0, 2.0],
                    "attention_entropy": [3.0, 2.0, 1.0],
                    "sigma_max": {f"layers.{i}.attention.{m}.weight": 1.0 + i for i in range(LAYERS) for m in "qk"},
                    "unheard_of": 7.0 + step, "unheard_list": [1.0, None, 3.0], "unheard_dict": {"head.weight": 2.0},
                    "words": "not a number", "nested": [[1.0], [2.0]]}
        rows.append(row)
    return rows


def make(folder, rows=None, name="sphere", tail="", postmortem=None, **recipe):
    folder.mkdir(parents=True)
    recipe = {"name": name, "seed": 1, "steps": 40, "model": {"layers": LAYERS, "residual": name},
              "optim": {"lr": 0.001, "betas": [0.9, 0.95]}} | recipe
    (folder / "recipe.json").write_text(json.dumps(recipe))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13", "parameters": 1_234_567}))
    lines = [json.dumps(row) for row in (metrics(40) if rows is None else rows)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n" * bool(lines) + tail)
    if postmortem:
        (folder / "postmortem.json").write_text(json.dumps(postmortem))
    return folder


def charts(page) -> list[str]:
    return list(page._figures)


def words(page) -> str:
    """Everything the page shows, without the libraries."""
    return page.html().split("<main>")[1].split("</main>")[0]


def test_summary_is_what_the_metrics_say(tmp_path):
    row = summary(make(tmp_path / "a"))
    assert row["name"] == "sphere" and row["state"] == "finished" and row["parameters"] == 1_234_567
    assert row["tokens"] == 512 * 40 and row["seconds"] == 20.0
    assert row["val_loss"] == row["best_val_loss"] == 2.1 + 3 / 40
    assert row["loss"] == pytest.approx(2 + 3 / 40, abs=0.02)
    assert row["tokens_per_second"] == statistics.median(1000.0 + step % 5 for step in range(1, 41))
    assert row["max_stream_norm"] == 45 and row["max_attention_logit"] == 40


def test_a_run_stopped_one_step_early_is_not_finished(tmp_path):
    assert summary(make(tmp_path / "a", metrics(39)))["state"] == "at step 39 of 40"
    assert summary(make(tmp_path / "b", metrics(40)))["state"] == "finished"


def test_bits_a_byte_where_the_text_is_known(tmp_path):
    run = make(tmp_path / "a", [{"step": 40, "loss": 3.0, "val_loss": 2.8}])
    assert summary(run)["bits_per_byte"] is None
    (run / "environment.json").write_text(json.dumps({"bytes_per_token": 4.0}))
    assert summary(run)["bits_per_byte"] == pytest.approx(2.8 / 4 / math.log(2))


def test_runs_of_different_tokenizers_are_drawn_in_bits_a_byte(tmp_path):
    rows = [{"step": s, "tokens": s, "seconds": s, "loss": 4.0, "val_loss": 4.0} for s in (39, 40)]
    byte, bpe = (make(tmp_path / name, rows, name, data={"tokenizer": name}) for name in ("byte", "bpe"))
    assert "do not compare" in words(run_page(read_runs([byte, bpe])))
    for folder, size in ((byte, 1.0), (bpe, 4.0)):
        (folder / "environment.json").write_text(json.dumps({"bytes_per_token": size}))
    page = run_page(read_runs([byte, bpe]))
    drawn = {row["run"]: row["val_loss"] for row in json.loads(page._figures["val-loss"]["data"]["values"])}
    assert drawn == {"byte": pytest.approx(4 / math.log(2), rel=1e-5), "bpe": pytest.approx(1 / math.log(2), rel=1e-5)}
    assert "loss (bits a byte)" in json.dumps(page._figures) and "do not compare" not in words(page)


def test_best_is_not_last(tmp_path):
    rows = [{"step": 1, "loss": 2.0, "val_loss": 1.5}, {"step": 2, "loss": 2.0, "val_loss": 1.8}]
    row = summary(make(tmp_path / "a", rows))
    assert (row["val_loss"], row["best_val_loss"]) == (1.8, 1.5)


def test_speed_is_worked_out_when_it_was_not_recorded(tmp_path):
    rows = [{"step": s, "loss": 1.0, "tokens": 100 * s, "seconds": 2.0 * s} for s in range(1, 5)]
    assert summary(make(tmp_path / "a", rows))["tokens_per_second"] == 50


def test_a_loss_that_ended_in_nan_does_not_look_like_a_result(tmp_path):
    rows = [{"step": 1, "loss": 2.0, "val_loss": 2.0}, {"step": 2, "loss": None, "val_loss": None}]
    row = summary(make(tmp_path / "a", rows))
    assert math.isnan(row["loss"]) and math.isnan(row["val_loss"]) and row["best_val_loss"] == 2.0


def test_summaries_can_be_shown(tmp_path, capsys):
    rows = [summary(make(tmp_path / "a")), summary(make(tmp_path / "b", [{"step": 1, "loss": 2.0}]))]
    show(rows, **summary_table(rows))
    out = capsys.readouterr().out
    assert "1.23M" in out and "0:20" in out and "2.1750" in out and "at step 1 of 40" in out and "–" in out


def test_a_line_cut_short_is_skipped_and_told(tmp_path):
    run, = read_runs([make(tmp_path / "a", tail='{"step": 41, "lo')])
    assert len(run.metrics) == 40
    assert len(run.notes) == 1 and "metrics.jsonl" in run.notes[0] and "line 41" in run.notes[0]
    assert "line 41" in words(run_page([run]))


def test_a_step_written_twice_counts_once_and_the_later_wins(tmp_path):
    rows = [{"step": 1, "loss": 5.0}, {"step": 2, "loss": 4.0}, {"step": 2, "loss": 3.0}, {"step": 3, "loss": 2.0}]
    run, = read_runs([make(tmp_path / "a", rows)])
    assert [row["loss"] for row in run.metrics] == [5.0, 3.0, 2.0]


@pytest.mark.parametrize("content", ["", "\n\n", "not json\n", "[1, 2]\n", '{"loss": 1.0}\n', '{"step": "x"}\n'])
def test_metrics_without_a_step_name_the_file(tmp_path, content):
    folder = make(tmp_path / "a")
    (folder / "metrics.jsonl").write_text(content)
    with pytest.raises(UserError, match=r"a/metrics\.jsonl"):
        run_report([folder], tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()


def test_missing_metrics_and_missing_folders_are_named(tmp_path):
    folder = make(tmp_path / "a")
    (folder / "metrics.jsonl").unlink()
    with pytest.raises(UserError, match=r"a/metrics\.jsonl is missing"):
        summary(folder)
    with pytest.raises(UserError, match="no run folder at .*nowhere"):
        summary(tmp_path / "nowhere")
    with pytest.raises(UserError, match="at least one"):
        read_runs([])


def test_a_broken_recipe_is_told_and_the_rest_is_shown(tmp_path):
    folder = make(tmp_path / "a")
    (folder / "recipe.json").write_text("{")
    run, = read_runs([folder])
    assert run.name == "a" and "recipe.json" in run.notes[0]
    assert charts(run_page([run]))


def test_names_differ_even_when_the_recipes_do_not(tmp_path):
    same = [make(tmp_path / name) for name in ("a", "b")]
    assert [run.name for run in read_runs(same)] == ["a", "b"]
    deep = [make(tmp_path / name / "run") for name in ("x", "y")]
    assert len({run.name for run in read_runs(deep)}) == 2
    with pytest.raises(UserError, match="given twice"):
        read_runs([same[0], same[0]])


def test_every_metric_gets_a_chart_known_or_not(tmp_path):
    page = run_page(read_runs([make(tmp_path / "a"), make(tmp_path / "b", metrics(40, 2.0), "pre-norm")]))
    assert charts(page) == [
        "loss", "val-loss", "lr", "grad-norm", "tokens-per-second",
        "stream-norm-depth", "stream-norm-max", "angle-depth", "angle-max", "attention-logit-max-depth",
        "attention-logit-max-max", "attention-entropy-depth", "attention-entropy-min", "sigma-max-attention-q",
        "sigma-max-attention-k", "unheard-of",
        "unheard-list-depth", "unheard-list-max", "unheard-dict-head"]


def test_profiles_show_first_middle_and_last_and_curves_the_extreme(tmp_path):
    page = run_page(read_runs([make(tmp_path / "a"), make(tmp_path / "b", metrics(40, 2.0), "pre-norm")]))
    rows = json.loads(page._figures["stream-norm-depth"]["data"]["values"])
    firsts = {(row["run"], row["probe"]): row["stream_norm"] for row in rows if row["depth"] == 0}
    assert firsts == {("sphere", "first probe"): 10, ("sphere", "middle probe"): 30, ("sphere", "last probe"): 40,
                      ("pre-norm", "first probe"): 20, ("pre-norm", "middle probe"): 60, ("pre-norm", "last probe"): 80}
    entropy = json.loads(page._figures["attention-entropy-min"]["data"]["values"])
    assert {row["attention_entropy"] for row in entropy} == {1.0}


def test_tensors_that_differ_by_layer_share_a_chart(tmp_path):
    page = run_page(read_runs([make(tmp_path / "a")]))
    assert {"sigma-max-attention-q", "sigma-max-attention-k"} <= page._figures.keys()
    rows = json.loads(page._figures["sigma-max-attention-q"]["data"]["values"])
    assert {(row["smallest"], row["sigma_max"], row["largest"]) for row in rows} == {(1.0, 2.0, 3.0)}


@pytest.mark.parametrize("name, group", [
    ("layers.3.mlp.up.weight", "mlp.up"), ("transformer.h.11.attn.c_attn.weight", "attn.c_attn"),
    ("experts.2.layers.0.w1", "w1"), ("lm_head.weight", "lm_head"), ("blocks.7", "blocks.7")])
def test_tensor_groups(name, group):
    assert tensor_group(name) == group


def test_what_runs_came_to_is_read_downwards_and_fits(tmp_path):
    """Names and values of one run, a column for each of a few, a line for each of many; what nobody recorded is nowhere."""
    folders = [make(tmp_path / name, name=name) for name in "abcde"]
    one, few, many = (words(run_page(read_runs(folders[:count]))) for count in (1, 3, 5))
    assert "<dt>final val loss (nats/token)</dt><dd>2.1750</dd>" in one and "bits/byte" not in one
    first = few.split("<table>")[1].split("</table>")[0]
    assert len(re.findall("<th[ >]", first)) == 4 and ">b</th>" in first and first.count("2.1750") == 6
    shown = summary_table([summary(folder) for folder in folders])
    assert len(re.findall("<th[ >]", many.split("</thead>")[0])) == len(shown["columns"]) and "bits/byte" not in many


def test_settings_that_differ_come_first_and_the_rest_is_folded(tmp_path):
    page = run_page(read_runs([make(tmp_path / "a"), make(tmp_path / "b", name="pre-norm", steps=80)]))
    html = words(page)
    differ, folded = html.index("Settings that differ"), html.index("Shared by all runs")
    assert differ < html.index("model.residual") < html.index('id="loss"') < folded < html.index("optim.lr")
    assert html.count("model.residual") == 1 and "<details><summary>Shared by all runs" in html


def test_a_post_mortem_is_a_red_box_without_its_long_lists(tmp_path):
    told = {"step": 12, "first_bad": "the loss", "likely_cause": "logits > 1e4", "recent": [{"step": 11, "loss": 9.5}]}
    html = words(run_page(read_runs([make(tmp_path / "a", postmortem=told)])))
    assert 'class="flags error"' in html and "likely cause: logits &gt; 1e4" in html and "recent" not in html
    assert summary(tmp_path / "a")["state"] == "stopped: not finite"


def test_a_run_that_was_never_finite_still_gets_a_page(tmp_path):
    rows = [{"step": 1, "tokens": 1, "seconds": 1.0, "loss": None}]
    page = run_page(read_runs([make(tmp_path / "a", rows)]))
    assert charts(page) == [] and "nan" in words(page)


def test_a_single_point_is_no_chart(tmp_path):
    page = run_page(read_runs([make(tmp_path / "a", metrics(10))]))  # one validation, one probe
    drawn = charts(page)
    assert "loss" in drawn and "stream-norm-depth" in drawn
    assert "val-loss" not in drawn and "stream-norm-max" not in drawn
    never = make(tmp_path / "b", [{"step": 1, "tokens": 1, "seconds": 1.0, "loss": None}])
    assert 'id="loss"' not in words(run_page(read_runs([never])))


def test_writes_the_page_and_the_figures(tmp_path):
    folder = make(tmp_path / "a", [{"step": s, "tokens": s, "seconds": s, "loss": 2.0 + 1 / s} for s in range(1, 9)])
    path = run_report([folder], tmp_path / "out")
    assert path == tmp_path / "out" / "report.html" and path.stat().st_size > 500_000
    assert {file.name for file in (tmp_path / "out" / "figures").iterdir()} == {
        f"loss.{ending}" for ending in ("png", "svg", "csv")}


@pytest.mark.slow
def test_a_log_of_100_000_records_makes_a_page_below_5_mb(tmp_path):
    page = run_page(read_runs([make(tmp_path / "a", metrics(100_000), steps=100_000)]))
    assert page.write(tmp_path / "report.html", figures=False).stat().st_size < 5_000_000


@pytest.mark.slow
def test_records_by_place_are_drawn_as_lists_were(tmp_path):
    """The record of a monitor: sublayers and blocks by name, a list of heads a block."""
    places = [f"text.{i}.{name}" for i in range(LAYERS) for name in ("attention", "mlp")]
    named = []
    for row in metrics(40):
        for key in ("stream_norm", "angle"):
            if key in row:
                row[key] = dict(zip(places, row[key]))
        if "attention_logit_max" in row:
            row["attention_logit_max"] = {place: [at, -1.0] for place, at in zip(places[::2], row["attention_logit_max"])}
            row["sigma_max"] = {f"text.{i}.expert{e}.up": 1.0 + i for i in range(LAYERS) for e in range(2)}
        named.append(row)
    old, new = (run_page(read_runs([make(tmp_path / name, rows)])) for name, rows in (("old", metrics(40)), ("new", named)))
    alike = [[name for name in charts(page) if not name.startswith(("sigma-max", "unheard-dict"))] for page in (old, new)]
    assert alike[0] == alike[1]
    for chart in ("stream-norm-depth", "angle-max", "attention-logit-max-depth", "attention-logit-max-max"):
        assert json.loads(new._figures[chart]["data"]["values"]) == json.loads(old._figures[chart]["data"]["values"])
    assert [name for name in charts(new) if name.startswith("sigma-max")] == ["sigma-max-up"]
    assert summary(tmp_path / "new")["max_attention_logit"] == 40


def test_a_group_of_zeros_is_drawn_beside_one_that_spans_decades(tmp_path):
    rows = [{"step": i, "underflow": {"text.0.query": 0.0, "text.0.up": 10.0**-i}} for i in range(1, 9)]
    page = run_page(read_runs([make(tmp_path / "run", rows)]))
    assert {"underflow-query", "underflow-up"} <= set(charts(page))


def test_what_warnings_said_stands_on_the_page_and_in_the_table(tmp_path):
    rows = [{"step": i, "loss": 2.0, "attention_logit_max": {"text.0.attention": [5.0 if i < 20 else 500.0]},
             "massive": {"text.0.mlp": 1e6}} for i in range(1, 41)]  # fmt: skip
    run = make(tmp_path / "run", rows)
    assert summary(run)["first_warning"] == "saturation, step 20" and summary(make(tmp_path / "other", rows[:19]))["first_warning"] is None
    page = run_page(read_runs([run]))
    assert "the largest attention logit of attention 0 of text is 500" in words(page) and "massive-activations" in words(page)
