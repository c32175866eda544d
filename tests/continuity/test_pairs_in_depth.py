"""Which layers are compared, on which side, and what is said where layers are no plain neighbours.

Every matrix has rank one; its direction on the side of the stream turns by arccos(c) a layer.
"""

from __future__ import annotations

import math

import pytest
import torch
from continuity_cases import LLAMA, llama

from gnomon import anatomy
from gnomon.continuity import Tracker, inspect

D, F = 64, 96
COSINE = {"query": 0.95, "key": 0.85, "value": 0.75, "output": 0.9, "gate": 0.65, "up": 0.55, "down": 0.8, "router": 0.1}


def turning(out: int, inputs: int, layer: int, role: str) -> torch.Tensor:
    writes = role in ("output", "down")
    g = torch.Generator().manual_seed(int(1e4 * COSINE[role]))
    a, b = torch.linalg.qr(torch.randn(out if writes else inputs, 2, generator=g))[0].T
    angle = layer * math.acos(COSINE[role])
    stream, other = math.cos(angle) * a + math.sin(angle) * b, torch.randn(inputs if writes else out, generator=g)
    return torch.outer(stream, other) if writes else torch.outer(other, stream)


def attention(layer: int, at: str = "self_attn.{}_proj.weight") -> dict[str, torch.Tensor]:
    roles = {"q": "query", "k": "key", "v": "value", "o": "output"}
    return {at.format(x): turning(32 if x in "kv" else D, D, layer, role) for x, role in roles.items()}


def mlp(layer: int, inner: int = F, names: str = "gate_proj.weight up_proj.weight down_proj.weight") -> dict:
    shapes = {"gate": (inner, D), "up": (inner, D), "down": (D, inner)}
    return {name: turning(*shapes[role], layer, role) for name, role in zip(names.split(), shapes)}


def model(layers, inner=lambda layer: F, prefix="model.layers", **more) -> dict[str, torch.Tensor]:
    tensors = {"model.embed_tokens.weight": torch.randn(128, D)}
    for n in layers:
        tensors |= {f"{prefix}.{n}.{name}": W for name, W in attention(n).items()}
        tensors |= {f"{prefix}.{n}.mlp.{name}": W for name, W in mlp(n, inner(n)).items()}
    return tensors


def found(report) -> dict[str, float]:
    """role -> the mean on the side of the stream."""
    return {line["role"]: line["v1_cos" if line["stream"] == "reads" else "u1_cos"] for line in report.summary}


def messages(report, kind: str) -> str:
    return " | ".join(flag["message"] for flag in report.flags if flag["kind"] == kind)


@pytest.mark.parametrize("full", [False, True])
def test_layers_of_different_width_compare_on_the_side_of_the_stream(full, tmp_path):
    report = inspect(model(range(4), (96, 80, 64, 40).__getitem__), full=full, config={"model_type": "llama"})
    assert found(report) == pytest.approx({k: v for k, v in COSINE.items() if k != "router"}, abs=1e-4)
    down = next(row for row in report.rows if row["role"] == "down")
    assert down["v1_cos"] is None and down["v1_null"] is None and down["frobenius"] is None and down["defined"]
    assert (down["gram_u"] is not None) == full and down["next_shape"] == [D, 80]
    (heat,) = (heat for heat in report.heats if heat.role == "up")
    assert heat.u1 is None and heat.layers == (0, 1, 2, 3) and float(heat.v1[0, 1]) == pytest.approx(0.55, abs=1e-4)
    report.to_json(tmp_path / "r.json")
    assert "up" in report.table()


def test_the_page_of_layers_without_an_inner_side(tmp_path):
    pytest.importorskip("altair")
    widths = (96, 80, 64, 40)
    tensors = {f"model.layers.{n}.mlp.{k}": W for n in range(4) for k, W in mlp(n, widths[n]).items()}
    report = inspect(tensors, k=1, full=True, config={"model_type": "llama"}, compare=model(range(3)))
    page = report.to_html(tmp_path / "r.html").read_text()
    assert "Leading direction, stream side" in page and "Leading direction, inner side" not in page
    report.to_json(tmp_path / "r.json")
    report.to_csv(tmp_path / "r.csv")


def test_pairs_across_a_missing_layer_stay_out_of_the_mean():
    report = inspect(model((0, 1, 3)), config={"model_type": "llama", "num_hidden_layers": 4})
    rows = [(row["layer"], row["next_layer"], row["lag"], row["missing"]) for row in report.rows if row["role"] == "query"]
    assert rows == [(0, 1, 1, []), (1, 3, 2, [2])]
    assert found(report) == pytest.approx({k: v for k, v in COSINE.items() if k != "router"}, abs=1e-4)
    assert "layer 2 of 4 missing" in messages(report, "contradiction")


def test_layers_that_other_kinds_of_layers_stand_between_are_neighbours():
    """A hybrid stack: attention in every third layer only; nothing is missing."""
    tensors = {k: v for k, v in model(range(6)).items() if "mlp" in k or "embed" in k or int(k.split(".")[2]) % 3 == 2}
    (pair,) = anatomy.read({k: tuple(v.shape) for k, v in tensors.items()}).pairs("query")
    assert (pair.lag, pair.missing) == (3, ())


def test_fewer_layers_than_the_config_says():
    report = inspect(model(range(3)), config={"model_type": "llama", "num_hidden_layers": 32})
    assert "32 layers, 3 are here" in messages(report, "contradiction")


def test_a_slice_without_a_config_contradicts_its_norms():
    """Meta's consolidated.00.pth of two: embedding, heads and MLP cut in half, norms whole."""
    shapes = {"tok_embeddings.weight": (500, D // 2), "norm.weight": (D,), "output.weight": (250, D)}
    for n in range(2):
        at = f"layers.{n}."
        shapes |= {f"{at}attention.{x}.weight": (D // 2, D) for x in ("wq", "wk", "wv")}
        shapes |= {f"{at}attention.wo.weight": (D, D // 2), f"{at}attention_norm.weight": (D,), f"{at}ffn_norm.weight": (D,)}
        shapes |= {f"{at}feed_forward.{x}.weight": (F, D) for x in ("w1", "w3")} | {f"{at}feed_forward.w2.weight": (D, F)}
    (warning,) = anatomy.read(shapes).warnings
    assert "one of 2 tensor-parallel slices" in warning
    assert anatomy.read(shapes | {"tok_embeddings.weight": (500, D)}).warnings == ()


def test_two_mlps_in_one_layer_each_meet_their_like():
    """Macaron blocks: ffn1 of a layer is no neighbour of ffn2 of the next."""
    shapes = {f"net.layers.{n}.ffn{m}.{name}": W.shape for n in range(3) for m in (1, 2) for name, W in mlp(n).items()}
    pairs = anatomy.read({k: tuple(v) for k, v in shapes.items()}).pairs("up")
    assert len(pairs) == 4
    assert all(pair.first.name.replace(".0.", ".1.").replace(".1.", ".2.") for pair in pairs)
    assert {pair.first.name.split(".")[3] for pair in pairs} == {"ffn1", "ffn2"}
    assert all(pair.first.name.split(".")[3] == pair.second.name.split(".")[3] and pair.lag == 1 for pair in pairs)


def test_one_vector_asked_for_still_looks_at_the_second():
    """Orthogonal weights have no leading direction, whatever k."""
    tensors = llama(layers=3)
    for name in tensors:
        if "q_proj" in name:
            tensors[name] = torch.linalg.qr(tensors[name])[0]
    report = inspect(tensors, k=1, config=LLAMA)
    rows = [row for row in report.rows if row["role"] == "query"]
    assert all(not row["defined"] and not row["subspace_defined"] and row["gap"] < 1.001 for row in rows)
    assert found(report)["query"] is None and "query" in messages(report, "degenerate")
    key = next(row for row in report.rows if row["role"] == "key")
    assert key["defined"] and len(key["angles_v"]) == 1 and key["subspace_v"] == pytest.approx(key["v1_cos"] ** 2, rel=1e-3)
    assert all(len(matrix["sigma"]) == 1 for matrix in report.matrices)


def test_a_mixers_rates_are_no_mean_with_its_inputs():
    shapes = {"in_proj_qkvz": 192, "in_proj_ba": 8}
    tensors = {
        f"model.layers.{n}.linear_attn.{x}.weight": torch.randn(m, D) for n in range(3) for x, m in shapes.items()
    }
    tensors |= {f"model.layers.{n}.linear_attn.out_proj.weight": torch.randn(D, 48) for n in range(3)}
    report = inspect(tensors, config={"model_type": "qwen3_next"})
    assert {line["role"]: line["pairs"] for line in report.summary} == dict(mixer_in=2, mixer_rates=2, mixer_out=2)


def test_what_does_not_read_the_stream_is_not_held_against_it():
    """MLA: q_b reads a latent, whose directions no two layers share by name."""
    shapes = {"q_a_proj": (24, D), "q_b_proj": (80, 24), "o_proj": (D, 64)}
    tensors = {
        f"model.layers.{n}.self_attn.{x}.weight": torch.randn(*s) for n in range(3) for x, s in shapes.items()
    } | {f"model.layers.{n}.self_attn.q_a_layernorm.weight": torch.ones(24) for n in range(3)}
    report = inspect(tensors, config={"model_type": "deepseek_v3", "num_attention_heads": 4, "hidden_size": D})
    streams = {line["role"]: line["stream"] for line in report.summary}
    assert streams == {"latent_query": "reads", "query": "", "output": "writes"}


def test_a_tracker_follows_layers_of_different_width():
    class Block(torch.nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.norm = torch.nn.LayerNorm(16)
            self.up_proj, self.down_proj = torch.nn.Linear(16, inner), torch.nn.Linear(inner, 16)

    net = torch.nn.ModuleDict({"layers": torch.nn.ModuleList(Block(n) for n in (40, 32, 24))})
    record = Tracker(net, every=1).after_step(0)
    (name,) = (name for name in record["weight_v1"] if ".0." in name and "up" in name)
    assert name not in record["weight_u1"] and name.replace("up", "down") in record["weight_u1"]


def test_names_from_a_file_cannot_write_on_the_terminal():
    tensors = model(range(2))
    tensors["model.layers.0.mlp.\x1b[31mred" + "x" * 100_000] = torch.randn(7, 5)
    table = inspect(tensors, config={"model_type": "llama"}).table()
    assert "\x1b" not in table and r"\x1b[31mred" in table and max(map(len, table.splitlines())) < 2000
    assert "\x1b" not in anatomy.read({k: tuple(v.shape) for k, v in tensors.items()}).table()


@pytest.mark.parametrize("pre", [True, False])
def test_folding_takes_the_norm_that_is_read(pre):
    """OPT before and after its norms; the cross attention of BART."""
    g = torch.Generator().manual_seed(0)
    tensors = {}
    for n in range(3):
        at = f"model.decoder.layers.{n}."
        for name in ("self_attn", "encoder_attn")[: 1 if pre else 2]:
            tensors |= {f"{at}{name}.{x}_proj.weight": torch.randn(D, D, generator=g) for x in ("q", "k", "v", "out")}
            tensors[f"{at}{name}_layer_norm.weight"] = torch.rand(D, generator=g) + 0.1
        tensors |= {f"{at}fc1.weight": torch.randn(F, D, generator=g), f"{at}fc2.weight": torch.randn(D, F, generator=g)}
        tensors[f"{at}final_layer_norm.weight"] = torch.rand(D, generator=g) + 0.1
    config = {"model_type": "opt", "do_layer_norm_before": True} if pre else {"model_type": "bart"}
    report = inspect(tensors, fold_norms=True, full=True, config=config)
    norms = {m["tensor"]: m["norm"] for m in report.matrices}
    read = {"self_attn.q_proj": "self_attn_layer_norm", "fc1": "final_layer_norm"}
    if not pre:
        read = {"encoder_attn.q_proj": "self_attn_layer_norm", "fc1": "encoder_attn_layer_norm"}
        assert "cross_key" in messages(report, "unfolded") and "cross_value" in messages(report, "unfolded")
    for name, norm in read.items():
        at = "model.decoder.layers.1."
        folded = tensors[f"{at}{name}.weight"] * tensors[f"{at}{norm}.weight"]
        assert norms[f"{at}{name}.weight"] == pytest.approx(float(folded.norm()), rel=1e-5)
