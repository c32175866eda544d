"""Families nobody listed: read by structure where names and shapes agree, and otherwise left unknown."""

from __future__ import annotations

import torch
from torch import nn

from gnomon import anatomy
from gnomon.anatomy.unlisted_families import STRUCTURAL


def roles(found) -> dict:
    return {part.name: part.role for part in found if part.layer == 0}


def own_block(width=96, inner=200):
    return {
        "attn.to_q.weight": (width, width),
        "attn.to_k.weight": (48, width),
        "attn.to_out.0.weight": (width, width),
        "ff.w_in.weight": (inner, width),
        "ff.w_out.weight": (width, inner),
        "ff.magic.weight": (33, 17),
        "norm.weight": (width,),
    }


def test_words_count_where_shapes_agree_and_the_rest_is_unknown():
    shapes = {f"net.units.{n}.{name}": shape for n in range(3) for name, shape in own_block().items()}
    found = anatomy.read(shapes)
    assert found.family == STRUCTURAL == "unknown (structural)"
    assert list(roles(found).values()) == ["query", "key", "output", "up", "down", "unknown", "norm"]
    assert {part.name.split(".", 3)[3] for part in found.unknown} == {"ff.magic.weight"}
    assert 0.8 < found.confidence < 1 and "5 of 6" in found.evidence[0]
    assert len(found.pairs("up")) == 2


def test_orientation_follows_the_weights_that_are_not_square():
    shapes = {f"net.units.{n}.{name}": shape[::-1] for n in range(3) for name, shape in own_block().items()}
    found = anatomy.read(shapes)
    (up, *_) = found.select("up")
    assert up.block.transposed and up.shape == (200, 96)
    assert all(part.block.transposed for part in found.select("query"))


def test_square_weights_without_a_witness_are_doubted():
    shapes = {f"units.{n}.attn.to_{x}.weight": (96, 96) for n in range(3) for x in ("q", "k", "v", "out")}
    found = anatomy.read(shapes)
    assert {part.role for part in found} == {"query", "key", "value", "output"}
    assert all("in x out" in part.doubt and not part.is_matrix for part in found)


def test_the_rows_of_an_unknown_fused_weight_stay_together():
    shapes = {f"units.{n}.attn.to_qkv.weight": (288, 96) for n in range(2)}
    shapes |= {f"units.{n}.attn.to_out.weight": (96, 96) for n in range(2)}
    found = anatomy.read(shapes)
    (fused, _) = found.select("query+key+value")
    assert "order" in fused.doubt and fused.shape == (288, 96)


def test_a_wrong_shape_outweighs_a_good_name():
    shapes = {f"units.{n}.{name}": shape for n in range(2) for name, shape in own_block().items()}
    shapes |= {f"units.{n}.attn.to_v.weight": (96, 77) for n in range(2)}
    assert roles(anatomy.read(shapes))["units.0.attn.to_v.weight"] == "unknown"


class OwnAttention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(64, 64) for _ in range(4))


class OwnBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.pre = nn.LayerNorm(64)
        self.mixing = OwnAttention()
        self.widen, self.narrow = nn.Linear(64, 200), nn.Linear(200, 64)
        self.kernel = nn.Conv1d(64, 64, 3)
        self.temperature = nn.Parameter(torch.ones(1))


def test_a_live_model_tells_by_its_modules():
    model = nn.ModuleDict({"table": nn.Embedding(61, 64), "parts": nn.ModuleList(OwnBlock() for _ in range(2))})
    found = anatomy.read(model)
    by_name = {part.name.removeprefix("parts.0."): part for part in found if part.layer == 0}
    assert [by_name[f"mixing.w{x}.weight"].role for x in "qkvo"] == ["query", "key", "value", "output"]
    assert by_name["pre.weight"].role == "norm" and by_name["pre.bias"].role == "bias"
    assert by_name["kernel.weight"].role == "conv" and by_name["temperature"].role == "scalar"
    assert found["table.weight"][0].role == "embedding" and found["table.weight"][0].shape == (64, 61)
    # A Linear of unknown purpose is not given a role, but its axes are no guess.
    assert by_name["widen.weight"].role == "unknown" and by_name["widen.weight"].out_axis == 0


def test_plain_linear_layers_in_a_row():
    sequence = nn.Sequential(*(m for _ in range(3) for m in (nn.Linear(32, 32, bias=False), nn.ReLU())))
    found = anatomy.read(sequence)
    assert [part.role for part in found] == ["linear"] * 3
    assert [(pair.first.name, pair.second.name, pair.lag) for pair in found.pairs("linear")] == [
        *(("0.weight", "2.weight", 2), ("2.weight", "4.weight", 2))
    ]


def test_torch_transformer_layers():
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2)
    found = anatomy.read(encoder)
    assert found.family == "torch.nn.Transformer" and not found.unknown
    (query, _) = found.select("query")
    weight = encoder.layers[0].self_attn.in_proj_weight
    torch.testing.assert_close(query.block.take(weight), weight[:32])
    assert (query.heads, query.head_dim) == (4, 8)


def test_no_repeated_layers():
    found = anatomy.read({"input.weight": (64, 8), "hidden.weight": (64, 64), "hidden.bias": (64,)})
    assert found.stacks == () and found.layers() == () and found.pairs() == ()
    assert {part.name: part.role for part in found}["hidden.weight"] == "unknown"


def test_nothing_at_all():
    found = anatomy.read({})
    assert len(found) == 0 and found.confidence == 0 and found.table().startswith("family: unknown")
