"""LAMBADA on a model on disk: against transformers passage by passage, and against lm_eval on a run of ours."""

from __future__ import annotations

import json

import pytest
import torch
from running_cases import make, write_word_tokenizer

from gnomon.data import jargon
from gnomon.errors import UserError
from gnomon.running import open_streamed
from gnomon.running.last_words import last_words, read_last_words

transformers = pytest.importorskip("transformers")


def as_it_is(index, h_BTD, block):
    return block(h_BTD)


def write(path, texts):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    folder = write_word_tokenizer(tmp_path_factory.mktemp("llama"), before=True)
    make("llama").save_pretrained(folder)
    return folder


@torch.no_grad()
def test_transformers_says_the_same(llama, tmp_path):
    model = transformers.AutoModelForCausalLM.from_pretrained(llama).eval()
    drawn = torch.Generator().manual_seed(0)
    rows = [torch.randint(100, (length,), generator=drawn).tolist() for length in (2, 5, 5, 17, 40)]
    says = model(torch.tensor([[101, *rows[3][:-1]]])).logits[0, -1].argmax().item()
    rows[3][-1] = min(says, 99)
    file = write(tmp_path / "l.jsonl", [" ".join(f"w{i}" for i in row) for row in rows])
    found = last_words(open_streamed(llama), read_last_words(open_streamed(llama), file, 5), as_it_is)
    last_BV = torch.stack([model(torch.tensor([[101, *row[:-1]]])).logits[0, -1].log_softmax(-1) for row in rows])
    target_B = torch.tensor([row[-1] for row in rows])
    assert found.items == 5 and found.nats == pytest.approx(-last_BV.gather(1, target_B[:, None]).mean().item(), abs=1e-4)
    assert found.accuracy == (last_BV.argmax(-1) == target_B).double().mean().item() > 0


def test_lm_eval_says_the_same_of_a_run(tiny_run, tmp_path):
    """Last words of several tokens, passages longer than the context, two spaces before the last word."""
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    from gnomon.evaluation.loading import load
    from gnomon.evaluation.zeroshot import harness_model

    texts = [" ".join(jargon()[start : start + length].split()) for start, length in ((0, 40), (900, 63), (2000, 300), (5000, 64))]
    texts += ["two  spaces", "a " + "long" * 30]
    model, tokenizer, _ = load(tiny_run, "cpu")
    pairs = [(text.rpartition(" ")[0], " " + text.rpartition(" ")[2]) for text in texts]
    expected = harness_model(model, tokenizer).loglikelihood([Instance("loglikelihood", {}, pair, 0) for pair in pairs])
    streamed = open_streamed(tiny_run)
    found = last_words(streamed, read_last_words(streamed, write(tmp_path / "l.jsonl", texts), len(texts)), as_it_is)
    assert found.nats == pytest.approx(-sum(score for score, _ in expected) / len(texts), rel=1e-5)
    assert found.accuracy == sum(hit for _, hit in expected) / len(texts)


@pytest.mark.parametrize("line", ["no JSON", "[1]", '{"context": "a b"}', '{"text": "one"}', '{"text": "ends with "}', '{"text": 3}'])
def test_what_is_no_passage_is_told(llama, tmp_path, line):
    (tmp_path / "l.jsonl").write_text('{"text": "w1 w2"}\n' + line)
    with pytest.raises(UserError, match="line 2, is no passage with a last word"):
        read_last_words(open_streamed(llama), tmp_path / "l.jsonl", 2)


def test_too_few_are_told(llama, tmp_path):
    with pytest.raises(UserError, match="has 1 passages, and 2 are asked for"):
        read_last_words(open_streamed(llama), write(tmp_path / "l.jsonl", ["w1 w2"]), 2)
