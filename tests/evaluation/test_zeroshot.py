"""Our models under lm_eval: what lm_eval's own class for transformers models gives for the same weights."""

from __future__ import annotations

import json
import textwrap

import pytest
import torch

from gnomon.data import jargon, train_bpe
from gnomon.errors import UserError
from gnomon.evaluation.scoring import complete, loglikelihoods, windows
from gnomon.evaluation.zeroshot import ZERO_SHOT, _find, evaluate_tasks, harness_model
from gnomon.models.config import TransformerConfig
from gnomon.models.transformer import Transformer

CHOICES = [
    ("A hacker who works at night is", ["tired in the morning.", "a fish.", "made of cheese and of wood."], 0),
    ("The program does not run, because", ["the moon is full.", "there is a bug in it.", "it"], 1),
    ("Question: What is a bit?\nAnswer:", ["a binary digit", "a horse", "a piece of a cake"], 0),
    ("Users of this machine", ["are many", "fly", "read the manual first, and then they read it again"], 2),
    ("To crash", ["is to fail suddenly", "is blue"], 0),
    ("To crash", ["is", "was"], 1),
    ("Kernel and shell", [" of a nut", " of a system"], 1),
    (jargon()[:900], ["and so on", "never"], 0),
]
# An empty line, one that fits, one of several contexts, one of exactly the context.
DOCUMENTS = ["To be or not to be", jargon()[1000:1900], "x", jargon()[5000:5400]]

TASKS = {
    "choices": """
        dataset_path: json
        dataset_kwargs: {data_files: {validation: DATA}}
        output_type: multiple_choice
        validation_split: validation
        doc_to_text: "{{query}}"
        doc_to_target: "{{gold}}"
        doc_to_choice: "{{choices}}"
        metric_list: [{metric: acc}, {metric: acc_norm}]
        metadata: {version: 1.0}
        """,
    "last_word": """
        dataset_path: json
        dataset_kwargs: {data_files: {validation: DATA}}
        output_type: loglikelihood
        validation_split: validation
        doc_to_text: "{{text.split(' ')[:-1]|join(' ')}}"
        doc_to_target: "{{' ' + text.split(' ')[-1]}}"
        metric_list: [{metric: perplexity}, {metric: acc}]
        metadata: {version: 1.0}
        """,
    "documents": """
        dataset_path: json
        dataset_kwargs: {data_files: {validation: DATA}}
        output_type: loglikelihood_rolling
        validation_split: validation
        doc_to_text: ""
        doc_to_target: "{{text}}"
        metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
        metadata: {version: 2.0}
        """,
    "say": """
        dataset_path: json
        dataset_kwargs: {data_files: {validation: DATA}}
        output_type: generate_until
        validation_split: validation
        doc_to_text: "{{query}}"
        doc_to_target: "x"
        generation_kwargs: {until: ["e", "\\n"], max_gen_toks: 12, do_sample: false}
        metric_list: [{metric: exact_match}]
        metadata: {version: 1.0}
        """,
}


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    rows = {
        "choices": [{"query": query, "choices": choices, "gold": gold} for query, choices, gold in CHOICES],
        "say": [{"query": query} for query, _, _ in CHOICES],
        "last_word": [{"text": text} for text in DOCUMENTS if " " in text],
        "documents": [{"text": text} for text in DOCUMENTS],
    }
    for name, config in TASKS.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows[name]))
        text = textwrap.dedent(config).replace("DATA", str(folder / f"{name}.jsonl"))
        (folder / f"{name}.yaml").write_text(f"task: {name}_here\n{text}")
    return folder


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """(ours, lm_eval's own around transformers) with the same random weights and tokenizer."""
    pytest.importorskip("lm_eval")
    pytest.importorskip("accelerate")
    transformers = pytest.importorskip("transformers")
    tokenizer = train_bpe([jargon()[:200_000]], 400)
    torch.manual_seed(0)
    config = TransformerConfig(vocab_size=400, context=48, layers=2, heads=2, width=32, qkv="fused", init_std=0.2)
    ours = Transformer(config).eval()
    theirs = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=400, n_positions=48, n_embd=32, n_layer=2, n_head=2)
    ).eval()
    places = {"embed": "wte", "positions": "wpe", "exit": "ln_f", "blocks": "h", "join_attention.before": "ln_1",
              "attention.qkv": "attn.c_attn", "attention.output": "attn.c_proj", "join_mlp.before": "ln_2",
              "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj"}  # fmt: skip
    state = {}
    for name, tensor in ours.state_dict().items():
        # GPT-2 keeps its matrices as inputs x outputs.
        turned = tensor.T if tensor.dim() == 2 and "blocks" in name else tensor
        for here, there in places.items():
            name = name.replace(here, there)
        state[f"transformer.{name}"] = turned
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert missing == ["lm_head.weight"] and not unexpected
    file = tokenizer.save(tmp_path_factory.mktemp("tokenizer"))
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(file), eos_token="<|endoftext|>")
    from lm_eval.models.huggingface import HFLM

    return harness_model(ours, tokenizer), HFLM(pretrained=theirs, tokenizer=fast, batch_size=3, device="cpu")


def test_every_kind_of_request_is_answered_as_lm_eval_s_own_model_does(pair, tasks):
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    ours, theirs = (
        lm_eval.simple_evaluate(lm, tasks=[f"{name}_here" for name in TASKS], task_manager=manager, bootstrap_iters=0)
        for lm in pair
    )
    for name in TASKS:
        mine, other = (
            {repr((s["doc"], s["arguments"])): s["resps"] for s in results["samples"][f"{name}_here"]}
            for results in (ours, theirs)
        )
        assert mine.keys() == other.keys() and len(mine) >= 2
        for key in mine:
            assert str(mine[key]).count("(") == str(other[key]).count("(")
            for a, b in zip(_flat(mine[key]), _flat(other[key]), strict=True):
                assert a == (pytest.approx(b, abs=2e-4) if isinstance(b, float) else b), name
    for name in TASKS:
        scores = [
            {k: v for k, v in r["results"][f"{name}_here"].items() if isinstance(v, float)} for r in (ours, theirs)
        ]
        assert scores[0] == pytest.approx(scores[1], rel=1e-4) and scores[0]
    said = [text for s in ours["samples"]["say_here"] for text in _flat(s["resps"])]
    assert len({len(text) for text in said}) > 1 and not any("e" in text for text in said)


def _flat(value):
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _flat(item)]
    return [value]


def test_likelihoods_are_the_model_s_own():
    """Against the definition, one token at a time, with requests of all lengths in one call."""
    torch.manual_seed(1)
    model = Transformer(TransformerConfig(vocab_size=30, context=8, layers=1, heads=2, width=16, init_std=0.3)).eval()
    ids = torch.randint(30, (25,)).tolist()
    requests = [(ids[:a], ids[a:b]) for a in (1, 3, 7, 12) for b in range(a, 25, 3)]
    scores = loglikelihoods(model, requests)
    for (context, continuation), (score, greedy) in zip(requests, scores):
        whole, total, every = [*context, *continuation], 0.0, True
        for first, end, count in windows(len(context), len(whole), 8):
            for t in range(end - count, end):
                logp = model(torch.tensor([whole[first:t]]))[0, -1].log_softmax(-1)
                total, every = total + logp[whole[t]].item(), every and int(logp.argmax()) == whole[t]
        assert score == pytest.approx(total, abs=1e-4) and greedy == every
    best = int(model(torch.tensor([ids[:4]]))[0, -1].argmax())
    assert loglikelihoods(model, [(ids[:4], [best])])[0][1]
    with pytest.raises(UserError, match="one token at least"):
        loglikelihoods(model, [([], [1])])


@pytest.mark.parametrize("start, stop, context", [(1, 2, 4), (1, 6, 4), (3, 30, 7), (9, 12, 4), (1, 9, 4), (5, 5, 4)])
def test_windows_predict_each_token_once_from_as_much_as_fits(start, stop, context):
    predicted = []
    for first, end, count in windows(start, stop, context):
        assert 0 <= first and end - first - 1 <= context and end - count > first
        assert first == 0 or end - first - 1 == context
        predicted += range(end - count, end)
    assert predicted == list(range(start, stop))


def test_generation_in_a_batch_is_generation_alone():
    torch.manual_seed(2)
    model = Transformer(TransformerConfig(vocab_size=30, context=16, layers=2, heads=2, width=16, init_std=0.3)).eval()
    prompts = [torch.randint(30, (n,)).tolist() for n in (3, 1, 9, 9, 20)]
    together = complete(model, prompts, 6, stop=lambda ids: ids[-1] < 5)
    for prompt, said in zip(prompts, together):
        ids, wanted = prompt[-10:], []
        while len(wanted) < 6 and not (wanted and wanted[-1] < 5):
            wanted.append(int(model(torch.tensor([ids + wanted]))[0, -1].argmax()))
        assert said == wanted
    with pytest.raises(UserError, match="leave no room"):
        complete(model, prompts, 16, stop=bool)


def test_a_run_gets_rows_for_tasks_by_name_and_pattern(tiny_run, tasks):
    pytest.importorskip("lm_eval")
    rows = evaluate_tasks(tiny_run, ["choices_here", "*_word_here"], task_path=tasks, limit=3, device="cpu")
    by_metric = {(row["task"], row["metric"]): row for row in rows}
    assert by_metric.keys() == {
        ("choices_here", "acc"), ("choices_here", "acc_norm"), ("last_word_here", "perplexity"), ("last_word_here", "acc"),
    }  # fmt: skip
    row = by_metric["choices_here", "acc"]
    assert (row["documents"], row["fewshot"], row["version"]) == (3, 0, 1.0) and row["value"] * 3 in (0, 1, 2, 3)


def test_mistakes_are_told(tiny_run, tasks, monkeypatch):
    their_tasks = pytest.importorskip("lm_eval.tasks")

    class Few(their_tasks.TaskManager):
        """Reading lm_eval's own task files takes seconds."""

        def __init__(self, include_path=None, include_defaults=True):
            super().__init__(include_path=include_path, include_defaults=False)

    monkeypatch.setattr(their_tasks, "TaskManager", Few)
    with pytest.raises(UserError, match="unknown task 'choice_here'. Did you mean 'choices_here'"):
        evaluate_tasks(tiny_run, ["choice_here"], task_path=tasks)
    with pytest.raises(UserError, match="no folder"):
        evaluate_tasks(tiny_run, ["piqa"], task_path=tasks / "nowhere")
    (tasks / "choices.jsonl").rename(tasks / "away.jsonl")
    with pytest.raises(UserError, match="'choices_here' could not be loaded: .*--task-path"):
        evaluate_tasks(tiny_run, ["choices_here"], task_path=tasks)
    monkeypatch.setitem(__import__("sys").modules, "lm_eval", None)
    with pytest.raises(UserError, match=r'pip install "gnomon\[eval\]"'):
        evaluate_tasks(tiny_run, ["piqa"])


@pytest.mark.slow
def test_lm_eval_knows_the_zero_shot_set(tasks):
    pytest.importorskip("lm_eval")
    assert _find(["zero-shot", "choices_here"], tasks)[1] == [*ZERO_SHOT, "choices_here"]
    with pytest.raises(UserError, match="unknown task 'hellaswagg'. Did you mean 'hellaswag"):
        _find(["hellaswagg"], None)
