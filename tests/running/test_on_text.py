"""States, attention, losses and the report of a model on a text, against the whole model in memory."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hf_cases import build
from running_cases import make, write_tokens

from gnomon import cli, continuity
from gnomon.errors import UserError
from gnomon.files import read_json
from gnomon.monitor import Monitor
from gnomon.running import WithWeights, loss_of, prepare

pytest.importorskip("transformers")
IDS_N = np.random.default_rng(0).integers(3, 128, 150)
T = 50
TOKENS_BT = torch.from_numpy(IDS_N).view(3, T)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory):
    return write_tokens(tmp_path_factory.mktemp("tokens") / "t.bin", IDS_N)


def saved(kind, folder):
    if kind == "ours":
        from gnomon.models.hf import GnomonForCausalLM

        model = GnomonForCausalLM.from_transformer(build("llama-sphere")).eval()
    else:
        model = make(kind, "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM")
    model.save_pretrained(folder)
    return model


def ready(kind, folder, tokens, **options):
    """A small model prepared to read 3 rows of 50 tokens (ours: of its context), and itself."""
    model = saved(kind, folder)
    return prepare(folder, tokens, 150, length=min(T, model.config.max_position_embeddings), **options), model


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3", "gemma2", "gpt_neox", "bert", "ours"])
def test_the_record_is_that_of_the_model_in_memory(kind, tmp_path, tokens):
    prepared, model = ready(kind, tmp_path, tokens)
    found = prepared.run()
    batch = {"input_ids": prepared.rows.tokens_BT}
    expected = Monitor(model, every=0, since_start=False).look(batch)
    expected.pop("step_size", None)  # it is read after the pass, when no weight is in memory
    assert found.record.keys() == expected.keys() and len(found.record["angle"]) >= 3
    for key, series in expected.items():
        assert found.record[key].keys() == series.keys()
        for place, value in series.items():
            assert found.record[key][place] == pytest.approx(value, rel=1e-5, abs=1e-6), (key, place)
    if kind == "bert":
        assert found.loss is None
    else:
        with torch.no_grad():
            labelled = model(**batch, labels=batch["input_ids"]).loss.item()
        assert found.loss == pytest.approx(labelled, rel=1e-5)


def test_the_sample_is_not_of_one_position():
    """Rows of 64 tokens, 256 of them: every 64th token would be the first of its row."""
    from gnomon.monitor.states import spread
    from gnomon.running.on_text import SAMPLE

    for tokens, length in ((16_384, 64), (4096, 1024), (65_536, 64), (1 << 20, 1024)):
        positions = spread(tokens, SAMPLE) % length
        assert len(positions.unique()) > min(length, SAMPLE) / 2


def test_sinks_and_norms_are_those_transformers_returns(tmp_path, tokens):
    prepared, model = ready("llama", tmp_path, tokens)
    found = prepared.run()
    model.set_attn_implementation("eager")
    with torch.no_grad():
        whole = model(TOKENS_BT, output_hidden_states=True, output_attentions=True)
    for layer, p_BHTT in enumerate(whole.attentions):
        sink_H = p_BHTT[:, :, T // 2 :, 0].mean((0, 2))
        entropy_H = -torch.xlogy(p_BHTT, p_BHTT).sum(-1).mean((0, 2))
        assert found.record["attention_sink"][f"text.{layer}.attention"] == pytest.approx(sink_H.tolist(), rel=1e-4)
        assert found.record["attention_entropy"][f"text.{layer}.attention"] == pytest.approx(
            entropy_H.tolist(), rel=1e-4
        )
    # transformers' last state is behind the final norm, so that of the blocks before it.
    for layer, h_BTD in enumerate(whole.hidden_states[1:-1]):
        norm = h_BTD.square().sum(-1).mean().sqrt().item()
        assert found.record["stream_norm"][f"text.{layer}.mlp"] == pytest.approx(norm, rel=1e-5)


def test_what_is_changed_at_a_block_is_seen_after_it(tmp_path, tokens):
    prepared, _ = ready("llama", tmp_path, tokens)
    plain = prepared.look()
    changed = prepared.look(lambda index, h, block: block(h) * (2 if index == 1 else 1))
    norm, other = plain.record["stream_norm"], changed.record["stream_norm"]
    assert other["text.0.mlp"] == norm["text.0.mlp"] and other["text.1.mlp"] == pytest.approx(
        2 * norm["text.1.mlp"], rel=1e-5
    )
    assert loss_of(prepared.streamed, prepared.rows, plain.last) == pytest.approx(prepared.run().loss)


@pytest.mark.parametrize("kind", ["llama", "gpt2", "ours"])
def test_losses_without_a_block_are_those_of_models_that_lack_it(kind, tmp_path, tokens):
    prepared, model = ready(kind, tmp_path, tokens, removal=True)
    found = prepared.run()
    batch = prepared.rows.tokens_BT
    for layer in range(len(prepared.streamed.blocks)):
        blocks = model.get_submodule(prepared.streamed.prefix)
        shorter = torch.nn.ModuleList(block for index, block in enumerate(blocks) if index != layer)
        model.set_submodule(prepared.streamed.prefix, shorter)
        with torch.no_grad():
            expected = model(batch, labels=batch, use_cache=False).loss.item()
        model.set_submodule(prepared.streamed.prefix, blocks)
        assert found.without[layer] == pytest.approx(expected, rel=1e-5)
        assert found.worth()[layer]["worth"] == pytest.approx(expected - found.loss, abs=1e-5)


def test_an_encoder_has_no_loss_to_lose(tmp_path, tokens):
    with pytest.raises(UserError, match="does not predict a next token"):
        ready("bert", tmp_path, tokens, removal=True)


def test_the_estimate_counts_what_is_done(tmp_path, tokens):
    prepared, model = ready("llama", tmp_path, tokens)
    layers = sum(p.numel() for p in model.model.layers.parameters())
    head = model.lm_head.weight.numel()
    assert prepared.expected.flops == pytest.approx(2 * 150 * (layers + head) + 3 * 4 * 150 * T * 64)
    assert prepared.expected.read == sum(p.numel() * 4 for p in model.parameters())
    removed = prepare(tmp_path, tokens, 150, length=T, removal=True).expected
    assert removed.flops > 2 * prepared.expected.flops and removed.read == 2 * prepared.expected.read
    assert "reads" in str(removed) and removed.seconds > 0


def test_one_report_of_states_and_weights(tmp_path, tokens):
    prepared, _ = ready("llama", tmp_path, tokens, removal=True)
    both = WithWeights(continuity.inspect(tmp_path), prepared.run())
    both.to_json(tmp_path / "both.json")
    told = read_json(tmp_path / "both.json")
    assert told["rows"] and told["on_text"]["settings"]["tokens"] == 150 and len(told["on_text"]["without"]) == 3
    assert len(both.seen.by_sublayer()) == 6 and len(both.seen.by_head()) == 12
    pytest.importorskip("altair")
    page = both.to_html(tmp_path / "both.html").read_text()
    for words in (
        "Hidden states over depth",
        "Attention by head",
        "What each block is worth",
        "Every layer against every other",
    ):
        assert words in page


def test_the_command(tiny_run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("All work and no play makes Jack a dull boy.\n" * 20)
    arguments = ["inspect", str(tiny_run), "--text", str(text), "--tokens", "128", "--json", str(tmp_path / "i.json")]
    assert cli.main(arguments) in (0, None)
    out, err = capsys.readouterr()
    assert "128 tokens" in err and "holds about" in err and "in rows of 64, loss" in out
    assert 1.0 < read_json(tmp_path / "i.json")["on_text"]["loss"] < math.log(257) + 0.1


def test_weights_are_reported_though_the_text_cannot_be_read(tiny_run, tmp_path, capsys):
    (tmp_path / "short.txt").write_text("All work and no play")
    assert (
        cli.main(["inspect", str(tiny_run), "--text", str(tmp_path / "short.txt"), "--json", str(tmp_path / "i.json")])
        == 2
    )
    assert "too short" in capsys.readouterr().err
    assert "on_text" not in read_json(tmp_path / "i.json")
    assert cli.main(["inspect", str(tiny_run), "--removal"]) == 2
    assert "give one with --text" in capsys.readouterr().err
