"""What an Anatomy answers: selection, neighbours, heads, the table, and our own models."""

from __future__ import annotations

import pytest
import torch

from gnomon import anatomy, residual
from gnomon.errors import UserError
from gnomon.models.config import TransformerConfig
from gnomon.models.mlp import MLPConfig, ResidualMLP
from gnomon.models.transformer import Transformer


def llama(layers, **changes) -> dict:
    shapes = {}
    for n in layers:
        at = f"model.layers.{n}."
        shapes |= {f"{at}self_attn.{x}_proj.weight": changes.get((n, x), (96, 96)) for x in "qkvo"}
    return shapes


CONFIG = {"model_type": "llama", "num_attention_heads": 6, "hidden_size": 96}


def test_selection():
    found = anatomy.read(llama(range(3)), CONFIG)
    assert len(found.select("query")) == 3 and len(found.select(layer=1)) == 4
    (part,) = found.select("query", layer=2, stack="text")
    assert found[part.name] == (part,) and part.name in found and "nothing" not in found
    assert list(found) == list(found.parts) and len(found) == 12
    assert found.by_role["key"] == found.select("key") and found.layers() == (0, 1, 2)
    assert found.select("gate") == ()


def test_wrong_names_are_met_with_a_suggestion():
    found = anatomy.read(llama(range(2)), CONFIG)
    with pytest.raises(UserError, match="Did you mean 'query'"):
        found.select("qery")
    with pytest.raises(UserError, match="text"):
        found.pairs("query", stack="txt")
    with pytest.raises(UserError, match="q_proj"):
        found["model.layers.0.self_attn.q_prj.weight"]
    with pytest.raises(UserError, match="lag"):
        found.pairs("query", lag=0)
    with pytest.raises(UserError, match="expected a shape"):
        anatomy.read({"a.weight": "wide"})
    with pytest.raises(UserError, match="expected a model"):
        anatomy.read(42)


def test_neighbours_in_a_stack_with_gaps():
    found = anatomy.read(llama([0, 1, 4]), CONFIG)
    assert [(p.first.layer, p.second.layer, p.lag) for p in found.pairs("query")] == [(0, 1, 1), (1, 4, 3)]
    assert [(p.first.layer, p.second.layer, p.lag) for p in found.pairs("query", lag=2)] == [(0, 4, 4)]
    assert len(found.pairs()) == 8


def test_neighbours_in_a_hybrid_stack_are_of_one_shape():
    """Layers of two widths in turn: each meets its like, and the lag says how far that is."""
    shapes = llama(range(4)) | {f"model.layers.{n}.self_attn.q_proj.weight": (48, 96) for n in (1, 3)}
    found = anatomy.read(shapes, CONFIG)
    assert [(p.first.layer, p.second.layer, p.lag) for p in found.pairs("query")] == [(0, 2, 2), (1, 3, 2)]
    assert [p.lag for p in found.pairs("key")] == [1, 1, 1]


def test_attention_in_some_layers_only():
    shapes = {k: v for k, v in llama(range(6)).items() if int(k.split(".")[2]) % 3 == 2}
    shapes |= {f"model.layers.{n}.mlp.up_proj.weight": (160, 96) for n in range(6)}
    found = anatomy.read(shapes, CONFIG)
    assert [p.lag for p in found.pairs("query")] == [3] and len(found.pairs("up")) == 5


def test_one_layer_has_no_neighbours_and_says_so():
    found = anatomy.read(llama([0]), CONFIG)
    assert found.pairs() == () and any("one layer" in note for note in found.notes)


def test_layers_that_share_their_weights_have_no_neighbours():
    block = torch.nn.Linear(8, 8, bias=False)
    found = anatomy.read(torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block, block, block])}))
    assert [part.tied_to for part in found] == [None, "blocks.0.weight", "blocks.0.weight"]
    assert found.pairs() == ()


def test_heads_need_a_number():
    found = anatomy.read(llama(range(2)))
    with pytest.raises(UserError, match="num_attention_heads"):
        found.heads(found.select("query")[0])
    with pytest.raises(UserError, match="norm"):
        one = anatomy.read(llama(range(2)) | {"model.norm.weight": (96,)}, CONFIG)
        one.heads(one.select("norm")[0])


def test_the_table_has_one_line_for_each_kind():
    text = anatomy.read(llama(range(12)), CONFIG).table()
    assert len([line for line in text.splitlines() if "q_proj" in line]) == 1
    (line,) = [line for line in text.splitlines() if "o_proj" in line]
    assert all(word in line for word in ("text", "0-11", "output", "96 x 96", "writes", "6 x 16", "{l}"))
    doubtful = anatomy.read({f"h.{n}.attn.c_proj.weight": (9, 9) for n in range(2)}).table()
    assert "?" in doubtful and "2 of 2 weights are unknown or in doubt" in doubtful


def own(**changes) -> Transformer:
    return Transformer(TransformerConfig(vocab_size=61, width=96, layers=2, heads=6, context=32, **changes))


@pytest.mark.parametrize("name", residual.names())
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_our_own_models_are_known_whatever_their_residual(name, norm):
    model = own(residual=name, norm=norm)
    found = anatomy.read(model)
    assert found.family == "gnomon" and not found.unknown and found.norm_offset == 0.0
    stored = anatomy.read({name: p.shape for name, p in model.named_parameters()}, model.config)
    assert [(p.name, p.role, p.block, p.heads) for p in stored] == [(p.name, p.role, p.block, p.heads) for p in found]
    before = found.select("query")[0].norm_before
    assert before == ("blocks.0.join_attention.before.weight" if before else None)
    assert (before is not None) == hasattr(model.blocks[0].join_attention, "before")


@pytest.mark.parametrize("qkv", ["fused", "split"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_our_own_attention_and_mlp(qkv, mlp):
    model = own(qkv=qkv, mlp=mlp, kv_heads=2, tied=False)
    found = anatomy.read(model)
    by = {part.role: part for part in found if part.layer == 1 and part.is_matrix}
    assert by.keys() == {"query", "key", "value", "output", "up", "down"} | ({"gate"} if mlp == "swiglu" else set())
    assert [(by[role].heads, by[role].head_dim) for role in ("query", "key", "output")] == [(6, 16), (2, 16), (6, 16)]
    x = torch.randn(5, 96)
    attention = model.blocks[1].attention
    q, k, v = (
        attention.qkv(x).split(attention.widths, -1)
        if qkv == "fused"
        else (attention.query(x), attention.key(x), attention.value(x))
    )
    for role, expected in (("query", q), ("key", k), ("value", v)):
        weight = by[role].block.take(model.get_parameter(by[role].name))
        torch.testing.assert_close(x @ weight.T, expected)
    assert found.select("head")[0].name == "head.weight" and found.select("embedding")[0].name == "embed.weight"


def test_our_own_residual_mlp():
    found = anatomy.read(ResidualMLP(MLPConfig(inputs=20, width=16, layers=4, outputs=10, layer_norm=True)))
    assert found.family == "gnomon_mlp" and found.stacks == ("main",) and not found.unknown
    assert len(found.pairs("linear")) == 3 and found.select("linear")[0].norm_before == "blocks.0.norm.weight"
    assert all(part.reads_stream and part.writes_stream for part in found.select("linear"))
    assert found["input.weight"][0].role == "embedding" and found["input.weight"][0].shape == (16, 20)
    assert found["output.weight"][0].role == "head"
