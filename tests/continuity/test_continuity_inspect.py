"""`inspect` from end to end: what a report holds, and what every bad input becomes."""

from __future__ import annotations

import csv
import json
import math
import sys

import pytest
import torch
from continuity_cases import LLAMA, llama
from safetensors.torch import save_file

from gnomon.continuity import inspect
from gnomon.errors import UserError

ROW = set(
    "stack role layer next_layer tensor next_tensor v1_cos u1_cos v1_null u1_null subspace_v subspace_u gap "
    "defined".split()
)
Q1 = "model.layers.1.self_attn.q_proj.weight"


def flags(report, kind):
    return [flag for flag in report.flags if flag["kind"] == kind]


def queries(report):
    return {row["layer"]: row for row in report.rows if row["role"] == "query"}


def test_rows_and_files(tmp_path):
    report = inspect(llama(), k=4, config=LLAMA)
    assert len(report.rows) == 7 * 3 and all(ROW <= row.keys() for row in report.rows)
    assert [row["role"] for row in report.rows[::3]] == "query key value output gate up down".split()
    written = json.loads(report.to_json(tmp_path / "r.json").read_text(), parse_constant=pytest.fail)
    assert {"model", "rows", "flags", "summary", "matrices", "serial", "heat", "settings"} <= written.keys()
    assert written["rows"] == json.loads(json.dumps(report.rows))
    with open(report.to_csv(tmp_path / "r.csv")) as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 21 and float(lines[0]["v1_cos"]) == pytest.approx(report.rows[0]["v1_cos"])
    text = report.table()
    assert "query" in text and "not folded" in text and "null level" in text
    assert {row["layer"] for row in report.matrices} == {0, 1, 2, 3}
    assert len(report.matrices[0]["sigma"]) == 4


def test_rows_as_a_data_frame(monkeypatch):
    report = inspect(llama(), config=LLAMA)
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(UserError, match="pip install pandas"):
        report.to_pandas()
    monkeypatch.undo()
    frame = pytest.importorskip("pandas") and report.to_pandas()
    assert len(frame) == len(report.rows) and frame["v1_cos"].tolist() == [row["v1_cos"] for row in report.rows]


def test_the_page_is_one_file_with_everything(tmp_path):
    pytest.importorskip("altair")
    tensors = llama(layers=6)
    other = {name: W + 0.3 * torch.randn(W.shape) for name, W in tensors.items()}
    report = inspect(tensors, k=3, full=True, per_head=True, compare=other, config=LLAMA)
    page = report.to_html(tmp_path / "r.html").read_text()
    for words in ("pruning and sharing", "private SVD", "Every layer against every other", "Head by head", "Spectra"):
        assert words in page
    assert 'src="http' not in page and "<link" not in page
    assert not (tmp_path / "figures").exists()
    few = inspect(llama(layers=1), config=LLAMA).to_html(tmp_path / "one.html").read_text()
    assert "nothing to compare" in few


def test_a_zero_matrix_is_never_one():
    tensors = llama()
    for layer in (1, 2):
        tensors[f"model.layers.{layer}.self_attn.q_proj.weight"].zero_()
    for full in (False, True):
        report = inspect(tensors, k=2, full=full, config=LLAMA)
        for row in queries(report).values():
            assert row["v1_cos"] is None and row["subspace_u"] is None and row["gram_v"] is None
            assert not row["defined"] and "zero" in row["reason"] and row["v1_null"] > 0
        assert len(flags(report, "zero")) == 2
        assert all(row["defined"] for row in report.rows if row["role"] == "up")


@pytest.mark.parametrize("value, count", [(math.nan, 1), (math.inf, 3)])
@pytest.mark.parametrize("full", [False, True])
def test_one_bad_tensor_is_a_flagged_row(tmp_path, value, count, full):
    tensors = llama()
    tensors[Q1].view(-1)[:count] = value
    save_file(tensors, tmp_path / "model.safetensors")
    report = inspect(tmp_path, k=2, full=full, config=LLAMA)
    rows = queries(report)
    for layer in (0, 1):
        assert rows[layer]["v1_cos"] is None and not rows[layer]["defined"]
        assert f"{count} of 1024 entries" in rows[layer]["reason"]
    assert rows[2]["defined"]
    (flag,) = flags(report, "unreadable")
    assert flag["tensor"] == Q1 and "model.safetensors" in flag["message"]
    report.to_json(tmp_path / "r.json")
    assert "unreadable" in report.table()


def test_a_nan_scale_and_a_missing_scale(tmp_path):
    tensors = llama()
    tensors[Q1] = torch.ones(32, 32, dtype=torch.int8)
    tensors[Q1 + "_scale"] = torch.tensor(math.nan)
    tensors["model.layers.2.self_attn.q_proj.weight"] = torch.ones(32, 32, dtype=torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    report = inspect(tmp_path, k=2, config=LLAMA)
    assert not any(row["defined"] for row in queries(report).values())
    messages = " ".join(flag["message"] for flag in flags(report, "unreadable"))
    assert "NaN or infinite" in messages and "int8 and has no scale" in messages


def test_orthogonal_weights_have_no_leading_direction():
    tensors = llama()
    for layer in range(4):
        name = f"model.layers.{layer}.self_attn.q_proj.weight"
        tensors[name] = torch.linalg.qr(tensors[name])[0]
    tensors["model.layers.1.self_attn.o_proj.weight"] = torch.eye(32)
    report = inspect(tensors, k=2, config=LLAMA)
    for row in queries(report).values():
        assert not row["defined"] and not row["subspace_defined"] and row["gap"] == pytest.approx(1, abs=1e-4)
        assert "sigma1/sigma2" in row["reason"]
    assert len(flags(report, "degenerate")) == 5
    line = report.summary[0]
    assert line["role"] == "query" and line["v1_cos"] is None and line["defined"] == 0


def test_near_equal_values_are_flagged_as_fragile():
    U, V = (torch.linalg.qr(torch.randn(32, 32))[0] for _ in range(2))
    tensors = llama()
    tensors[Q1] = U * torch.tensor([3, 3 / 1.01] + [1.0] * 30) @ V
    report = inspect(tensors, k=2, config=LLAMA)
    assert Q1 in [flag["tensor"] for flag in flags(report, "fragile")]
    assert queries(report)[1]["defined"] and queries(report)[1]["gap"] == pytest.approx(1.01, abs=1e-4)


def test_copied_layers_are_told_from_similar_ones():
    tensors = llama()
    up = "model.layers.{}.mlp.up_proj.weight".format
    tensors[up(1)] = tensors[up(0)].clone()
    tensors[up(3)] = tensors[up(2)] + 1e-6 * torch.randn(48, 32)
    # The same spectrum and other numbers: neurons in another order.
    down = "model.layers.{}.mlp.down_proj.weight".format
    tensors[down(1)] = tensors[down(0)].flip(1)
    report = inspect(tensors, k=2, config=LLAMA)
    rows = {row["layer"]: row for row in report.rows if row["role"] == "up"}
    assert rows[0]["v1_cos"] == pytest.approx(1) and not rows[0]["defined"] and "same numbers" in rows[0]["reason"]
    assert rows[2]["v1_cos"] == pytest.approx(1) and rows[2]["defined"]
    assert len(flags(report, "copied")) == 1


def test_tied_layers_of_a_live_model_are_left_out():
    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fc1, self.fc2 = torch.nn.Linear(16, 40, bias=False), torch.nn.Linear(40, 16, bias=False)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = torch.nn.ModuleList([Block() for _ in range(4)])
            self.layers[1].fc1.weight = self.layers[0].fc1.weight

    report = inspect(Net(), k=2)
    assert report.rows and not any(row["tensor"] == "layers.1.fc1.weight" for row in report.rows)
    assert [flag["tensor"] for flag in flags(report, "tied")] == ["layers.1.fc1.weight"]


def test_one_layer_has_nothing_to_compare():
    report = inspect(llama(layers=1), config=LLAMA)
    assert not report.rows and "nothing to compare" in report.table()
    assert inspect({"w": torch.zeros(3, 3)}).rows == []


def test_serial_alignment_goes_from_each_writer_to_the_next_readers():
    tensors = llama(layers=3)
    report = inspect(tensors, k=2, config=LLAMA)
    found = {(row["role"], row["layer"], row["next_role"], row["next_layer"]) for row in report.serial}
    inside = {("output", layer, role, layer) for layer in range(3) for role in ("gate", "up")}
    across = {("down", layer, role, layer + 1) for layer in range(2) for role in ("query", "key", "value")}
    assert found == inside | across
    row = next(row for row in report.serial if row["role"] == "down" and row["next_role"] == "key")
    u1 = torch.linalg.svd(tensors[row["tensor"]].double())[0][:, 0]
    v1 = torch.linalg.svd(tensors[row["next_tensor"]].double())[2][0]
    assert row["uv_cos"] == pytest.approx(abs(float(u1 @ v1)), abs=1e-4)


def test_missing_layers_and_lags():
    tensors = {name: W for name, W in llama(layers=6).items() if "layers.2." not in name}
    rows = queries(inspect(tensors, k=2, config=LLAMA))
    assert [(row["layer"], row["next_layer"], row["lag"]) for row in rows.values()] == [
        (0, 1, 1),
        (1, 3, 2),
        (3, 4, 1),
        (4, 5, 1),
    ]
    rows = queries(inspect(llama(layers=5), k=2, lag=3, config=LLAMA))
    assert [(row["layer"], row["next_layer"]) for row in rows.values()] == [(0, 3), (1, 4)]


def test_both_tiers_agree():
    tensors = llama(layers=4, d=256, f=320)
    fast, full = (inspect(tensors, k=4, full=full, config=LLAMA) for full in (False, True))
    seen = 0
    for a, b in zip(fast.rows, full.rows):
        if b["gap"] > 1.02:
            seen += 1
            for key in ("v1_cos", "u1_cos"):
                assert a[key] == pytest.approx(b[key], abs=5e-3)
        assert a["gap"] == pytest.approx(b["gap"], rel=1e-3)
    assert seen > 3
    assert all(row["effective_rank"] is None for row in fast.matrices)
    assert all(row["effective_rank"] > 1 for row in full.matrices)
    for a, b in zip(
        fast.matrices, sorted(full.matrices, key=lambda row: [m["tensor"] for m in fast.matrices].index(row["tensor"]))
    ):
        assert a["tensor"] == b["tensor"] and a["stable_rank"] == pytest.approx(b["stable_rank"], rel=1e-4)


def test_several_workers_give_the_same(monkeypatch):
    tensors = llama(layers=5)
    alone = inspect(tensors, k=3, config=LLAMA)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    together = inspect(tensors, k=3, config=LLAMA)
    for a, b in zip(alone.rows, together.rows):
        assert a["v1_cos"] == pytest.approx(b["v1_cos"], abs=1e-5) and a["tensor"] == b["tensor"]


def test_experts_are_read_one_at_a_time_and_not_more_than_needed(tmp_path, monkeypatch):
    from gnomon.checkpoints import safetensors_files

    g = torch.Generator().manual_seed(0)
    tensors = {"model.embed_tokens.weight": torch.randn(500, 16, generator=g)}
    for layer in range(3):
        at = f"model.layers.{layer}.mlp."
        tensors[f"{at}experts.gate_up_proj"] = torch.randn(5, 40, 16, generator=g)
        tensors[f"{at}experts.down_proj"] = torch.randn(5, 16, 20, generator=g)
        tensors[f"{at}gate.weight"] = torch.randn(5, 16, generator=g)
    save_file(tensors, tmp_path / "model.safetensors")
    sizes, plain = [], safetensors_files.read_tensor

    def counted(name, entry, buffer, index):
        tensor = plain(name, entry, buffer, index)
        sizes.append(tensor.numel() * 4)
        return tensor

    monkeypatch.setattr(safetensors_files, "read_tensor", counted)
    report = inspect(tmp_path, k=2, config={"model_type": "qwen3_moe"})
    assert len([row for row in report.rows if row["role"] == "up"]) == 5 * 2
    assert max(sizes) == 40 * 16 * 4
    assert sum(sizes) == 3 * 4 * (5 * 40 * 16 + 5 * 16 * 20 + 5 * 16) == report.settings["bytes_read"]


def test_compare_puts_two_models_side_by_side(tmp_path):
    tensors = llama()
    Q = torch.linalg.qr(torch.randn(32, 32, generator=torch.Generator().manual_seed(0)))[0]
    turned = {name: W @ Q if W.shape[-1] == 32 and "up_proj" in name else 2 * W for name, W in tensors.items()}
    report = inspect(tensors, k=2, compare=turned, config=LLAMA)
    written = json.loads(report.to_json(tmp_path / "r.json").read_text())
    lines = {line["role"]: line for line in written["comparison"]}
    assert lines["query"]["v1_cos"] == pytest.approx(lines["query"]["v1_cos_other"], abs=1e-5)
    assert lines["query"]["turned_v"] < 0.1 and lines["up"]["turned_v"] > 20 and lines["up"]["turned_u"] < 0.1
    ratios = {row["role"]: row["norm_ratio"] for row in written["turned"]}
    assert ratios["query"] == pytest.approx(2) and ratios["up"] == pytest.approx(1)
    assert "against model" in report.table()


def test_progress_is_shown_when_asked(capsys, monkeypatch):
    from gnomon import progress

    ticks = iter(range(10**6))
    monkeypatch.setattr(progress.time, "monotonic", lambda: 20.0 * next(ticks))
    inspect(llama(layers=2), config=LLAMA)
    assert capsys.readouterr().err == ""
    inspect(llama(layers=2), config=LLAMA, progress=True)
    assert "inspecting" in (err := capsys.readouterr().err) and "ETA" in err


@pytest.mark.parametrize("bad", [{"k": 0}, {"lag": 0}, {"keep": 1.0}])
def test_arguments_out_of_range(bad):
    with pytest.raises(UserError, match="at least 1"):
        inspect(llama(), **bad)


def test_starting_from_the_layer_before_changes_nothing(monkeypatch):
    from gnomon.geometry import subspace

    tensors = llama(layers=4, d=512, f=256)
    for layer in range(4):  # much alike, so that the start is near and helps
        name = "model.layers.{}.self_attn.q_proj.weight".format
        tensors[name(layer)] = tensors[name(0)] + 0.2 * tensors[name(layer)]
    steps, plain = [], subspace._gram_times
    monkeypatch.setattr(subspace, "_gram_times", lambda *a: steps.append(1) or plain(*a))
    warm = inspect(tensors, k=8, config=LLAMA)
    warm_steps, steps[:] = len(steps), []
    leading = subspace.leading
    monkeypatch.setattr(subspace, "leading", lambda W, k, start=None: leading(W, k))
    cold = inspect(tensors, k=8, config=LLAMA)
    assert warm_steps < len(steps)
    for a, b in zip(warm.rows, cold.rows):
        if b["gap"] > 1.005:
            assert a["v1_cos"] == pytest.approx(b["v1_cos"], abs=1e-3)
            assert a["u1_cos"] == pytest.approx(b["u1_cos"], abs=1e-3)
