"""WikiText as lm_eval reads it: articles, spelling, words; and the perplexities against its own task."""

from __future__ import annotations

import gzip
import math

import pytest

from gnomon import evaluation
from gnomon.data import wikitext
from gnomon.errors import UserError

TEXT = """ 
 = Robert the Robot = 
 
 Robert the Robot is an English film , " I , Robot " , of 2 @.@ 5 hours ( or 2 @,@ 000 seconds ) ; it cost $ 3 @-@ 4 .
 The players ' parts : Mark 's ' cat ' and [ a dog ] . It is 20 ° C ! Is it ? N people say { so } .
 
 = = Reception = = 
 
 = = = In Britain = = = 
 
 = = = = In York = = = = 
 
 Nobody saw it . 
 
 = A = 
 
 Another <unk> article with words . 
 
 = Third = 
 
 And one more , with naïve letters . 
 
"""


def articles() -> list[str]:
    return ["\n".join(lines) for lines in wikitext.split_articles(TEXT.split("\n"))]


def test_articles_are_those_of_lm_eval():
    found = articles()
    assert [article.strip().split("\n")[0].strip() for article in found] == [
        "= Robert the Robot =",
        "= A =",
        "= Third =",
    ]
    assert "\n".join(found) == TEXT[TEXT.index("\n") + 1 :]  # nothing is lost but the empty line before the first


def test_spelling_and_words_are_those_of_lm_eval():
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    for article in [TEXT, *articles(), "'' s '", "( ( a ) )", ' " " " ']:
        assert wikitext.detokenised(article) == theirs.wikitext_detokenizer({"page": article})
        scores = theirs.process_results({"page": article}, (-1.0,))
        assert scores["word_perplexity"] == (-1.0, wikitext.words(article))
    assert '"I, Robot", of 2.5 hours (or 2,000 seconds)' in wikitext.detokenised(TEXT)


@pytest.mark.parametrize("suffix", [".txt", ".tokens.gz"])
def test_perplexities_are_those_of_lm_eval_s_task(tiny_run, tmp_path, suffix):
    theirs = pytest.importorskip("lm_eval.tasks.wikitext.preprocess_wikitext")
    from lm_eval.api.instance import Instance

    from gnomon.evaluation.zeroshot import harness_model

    file = tmp_path / f"wiki{suffix}"
    file.write_bytes(gzip.compress(TEXT.encode()) if suffix.endswith("gz") else TEXT.encode())
    printed, bare = evaluation.wikitext(tiny_run, str(file), device="cpu")
    assert (printed["text"], bare["text"], printed["articles"]) == ("detokenised", "as it is", 3)

    model, tokenizer, _ = evaluation.load(tiny_run, "cpu")
    docs = [{"page": page} for page in articles()]
    requests = [Instance("loglikelihood_rolling", doc, (theirs.wikitext_detokenizer(doc),), 0) for doc in docs]
    scores = [
        theirs.process_results(doc, (score,))
        for doc, score in zip(docs, harness_model(model, tokenizer).loglikelihood_rolling(requests))
    ]
    for key in ("word_perplexity", "bits_per_byte"):
        mean = -sum(s[key][0] for s in scores) / sum(s[key][1] for s in scores)
        assert printed[key] == pytest.approx(math.exp(mean) if key == "word_perplexity" else mean / math.log(2))
    spelled = [wikitext.detokenised(article) for article in articles()]
    assert printed["tokens"] == sum(len(text.encode()) for text in spelled) < bare["tokens"]
    assert printed["loss"] == pytest.approx(math.log(printed["perplexity"]))


def test_part_of_it(tiny_run, tmp_path):
    (tmp_path / "wiki.txt").write_text(TEXT)
    printed, bare = evaluation.wikitext(tiny_run, str(tmp_path / "wiki.txt"), tokens=100, device="cpu")
    assert printed["articles"] == bare["articles"] == 1 and bare["tokens"] >= 100
    assert evaluation.wikitext(tiny_run, str(tmp_path / "wiki.txt"), tokens=10**9, device="cpu")[0]["articles"] == 3


def test_sets_of_the_hub_are_joined_as_the_file_is(tiny_run, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(*arguments, **settings):
        asked.append((arguments, settings))
        return [{"text": line + "\n" if line.strip() else ""} for line in TEXT[:-1].split("\n")]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert "".join(wikitext.articles("wikitext-103")) == "".join(articles())
    assert asked == [(("Salesforce/wikitext", "wikitext-103-raw-v1"), {"split": "test", "streaming": False})]

    def fails(*_, **__):
        raise ConnectionError("no route")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(UserError, match="wikitext-2-raw-v1 from the hub failed: ConnectionError: no route"):
        evaluation.wikitext(tiny_run, "wikitext-2")


def test_other_files_are_refused(tiny_run, tmp_path):
    (tmp_path / "novel.txt").write_text("It was a dark night.\n")
    with pytest.raises(UserError, match="not in WikiText's form"):
        evaluation.wikitext(tiny_run, str(tmp_path / "novel.txt"))
    with pytest.raises(UserError, match="Did you mean 'wikitext-2'"):
        evaluation.wikitext(tiny_run, "wikitext2")
    (tmp_path / "novel.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="not UTF-8"):
        evaluation.wikitext(tiny_run, str(tmp_path / "novel.txt"))
