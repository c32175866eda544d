"""A model run block by block from disk against the whole model in memory."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tiny_transformers
import torch
from hf_cases import OWN, build
from running_cases import FAMILIES, make

from gnomon.errors import UserError
from gnomon.running import open_streamed

transformers = pytest.importorskip("transformers")
transformers.logging.set_verbosity_error()

TOKENS_BT = torch.randint(3, 128, (3, 24), generator=torch.Generator().manual_seed(1))


def is_empty(parameter):
    return parameter.untyped_storage().nbytes() <= 4


def compare(model, folder, tokens_BT):
    """Output, states before each block, and logits of the last stream, against the model in memory."""
    with torch.no_grad():
        whole = model(tokens_BT, output_hidden_states=True)
    streamed, entering, last = open_streamed(folder), [], []

    def visit(index, h_BTD, block):
        others = [name for name in streamed.block_names if name != streamed.block_names[index]]
        entering.append(h_BTD)
        last[:] = [block(h_BTD)]
        assert all(is_empty(p) for name in others for p in streamed.model.get_submodule(name).parameters())
        return last[0]

    found = streamed.run(tokens_BT, visit)
    assert all(is_empty(p) for p in streamed.model.parameters())
    assert len(entering) == len(streamed.blocks)
    for theirs, ours in zip(whole.hidden_states, entering):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    if "logits" in whole:
        torch.testing.assert_close(found.logits, whole.logits, rtol=1e-5, atol=1e-5)
        again_BTV = torch.cat(list(streamed.logits(tokens_BT, last[0])))
        torch.testing.assert_close(again_BTV, whole.logits, rtol=1e-5, atol=1e-5)
    else:
        torch.testing.assert_close(found.last_hidden_state, whole.last_hidden_state, rtol=1e-5, atol=1e-5)
    return streamed


@pytest.mark.parametrize("kind", FAMILIES)
def test_equals_the_whole_model(kind, tmp_path):
    auto = "AutoModelForMaskedLM" if kind == "bert" else "AutoModelForCausalLM"
    model = make(kind, auto)
    model.save_pretrained(tmp_path)
    streamed = compare(model, tmp_path, TOKENS_BT)
    assert type(streamed.model) is type(model)
    assert streamed.predicts is (kind != "bert")


def test_an_encoder_without_a_head(tmp_path):
    model = make("bert", "AutoModel")
    model.save_pretrained(tmp_path)
    assert type(compare(model, tmp_path, TOKENS_BT).model).__name__ == "BertModel"


@pytest.mark.parametrize("name", OWN)
def test_every_residual_of_ours(name, tmp_path):
    from gnomon.models.hf import GnomonForCausalLM

    model = GnomonForCausalLM.from_transformer(build(name)).eval()
    model.save_pretrained(tmp_path)
    assert compare(model, tmp_path, TOKENS_BT).predicts


def test_a_run_folder(tiny_run):
    from gnomon import evaluation

    model = evaluation.load(tiny_run, "cpu")[0]
    with torch.no_grad():
        torch.testing.assert_close(
            open_streamed(tiny_run).run(TOKENS_BT).logits, model(TOKENS_BT), rtol=1e-5, atol=1e-5
        )


def test_a_gguf_file(tmp_path):
    gguf = pytest.importorskip("gguf")
    model = make("llama")
    config = model.config
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_block_count(3)
    writer.add_context_length(64)
    writer.add_embedding_length(64)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_vocab_size(128)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 3)
    for name, tensor in model.state_dict().items():
        array = tensor.numpy()
        for heads, role in ((4, "q_proj"), (2, "k_proj")):
            if role in name:  # as the converter to GGUF does it
                array = array.reshape(heads, 2, 8, 64).swapaxes(1, 2).reshape(array.shape)
        writer.add_tensor(names.get_name(name.removesuffix(".weight")) + ".weight", np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    compare(model, tmp_path / "model.gguf", TOKENS_BT)
    # What a model was made of makes it again: its names and forms are not changed twice.
    compare(model, open_streamed(tmp_path / "model.gguf").checkpoint, TOKENS_BT)


def test_a_block_that_is_passed_over_is_not_read(tmp_path):
    make("llama").save_pretrained(tmp_path)
    streamed = open_streamed(tmp_path)
    streamed.run(TOKENS_BT)
    read = []
    load = streamed.sources.load
    object.__setattr__(streamed.sources, "load", lambda model, names: (read.extend(names), load(model, names)))
    skipped = streamed.run(TOKENS_BT, lambda index, h, block: h if index == 1 else block(h))
    assert not [name for name in read if ".layers.1." in name] and [name for name in read if ".layers.2." in name]
    other = make("llama")
    del other.model.layers[1]
    with torch.no_grad():
        torch.testing.assert_close(skipped.logits, other(TOKENS_BT, use_cache=False).logits, rtol=1e-5, atol=1e-5)


def broken(tmp_path, **changes):
    make("llama").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "lama"}, r"'lama' is none that transformers .* Did you mean 'llama'"),
        ({"num_hidden_layers": 4}, "9 weights that 'llama' needs are not there"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "an encoder and a decoder"),
    ],
)
def test_what_cannot_be_run_is_told(changes, message, tmp_path):
    with pytest.raises(UserError, match=message):
        open_streamed(broken(tmp_path, **changes))


def test_another_width_than_the_config_says(tmp_path):
    with pytest.raises(UserError, match="Weights and config.json belong to different models"):
        open_streamed(broken(tmp_path, intermediate_size=80)).run(TOKENS_BT)


def test_weights_without_a_config(tmp_path):
    (broken(tmp_path) / "config.json").unlink()
    with pytest.raises(UserError, match="no config.json with a model_type"):
        open_streamed(tmp_path)


@pytest.mark.slow
def test_every_class_of_transformers(tmp_path):
    """Each runs block by block with the outputs of the whole model, or says why it cannot."""
    transformers.utils.logging.disable_progress_bar()
    equal, told, wrong = [], {}, {}
    for (kind, name), encoder_decoder in tiny_transformers.classes().items():
        made = None if encoder_decoder else tiny_transformers.build(kind, name, encoder_decoder)
        if made is None:
            continue
        model, inputs = made
        with torch.no_grad():
            whole = model(**inputs)[0]
        try:
            model.save_pretrained(tmp_path / name)
        except Exception:  # of a config that is built by hand and not read back
            continue
        try:
            streamed = open_streamed(tmp_path / name)
            streamed.model.config._attn_implementation = "eager"
            found = streamed.run(inputs["input_ids"])[0]
        except UserError as error:
            told[name] = str(error)
            continue
        if type(streamed.model) is not type(model):
            told[name] = f"run as {type(streamed.model).__name__}"
        elif torch.allclose(found, whole, rtol=1e-4, atol=1e-5, equal_nan=True):
            equal.append(name)
        else:
            wrong[name] = float((found - whole).abs().max())
    assert wrong == {}
    assert len(equal) > 170 and len(told) < 15, told
