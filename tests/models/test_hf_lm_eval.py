"""lm_eval through an exported folder, as a stranger runs it: `--model hf --model_args pretrained=OUT,trust_remote_code=True`."""

from __future__ import annotations

import dataclasses
import json
import textwrap

import pytest
from hf_cases import LLAMA, SMALL

from gnomon.evaluation.zeroshot import evaluate_tasks
from gnomon.export import export
from gnomon.train import preset, train

pytest.importorskip("transformers")
lm_eval = pytest.importorskip("lm_eval")
pytest.importorskip("accelerate")

ROWS = [("A day", [" is long", " of the"], 0), ("Hi", ["!", " or no"], 1), ("The end is", [" near", "x"], 0)]
TASK = """
    task: short
    dataset_path: json
    dataset_kwargs: {data_files: {validation: DATA}}
    output_type: multiple_choice
    validation_split: validation
    doc_to_text: "{{query}}"
    doc_to_target: "{{gold}}"
    doc_to_choice: "{{choices}}"
    metric_list: [{metric: acc}, {metric: acc_norm}]
    metadata: {version: 1.0}
    """
SAY = """
    task: say
    dataset_path: json
    dataset_kwargs: {data_files: {validation: DATA}}
    output_type: generate_until
    validation_split: validation
    doc_to_text: "{{query}}"
    doc_to_target: "x"
    generation_kwargs: {until: ["e"], max_gen_toks: 6, do_sample: false}
    metric_list: [{metric: exact_match}]
    metadata: {version: 1.0}
    """


@pytest.mark.parametrize("residual", ["pre-norm", "sphere"])
def test_tasks_on_an_exported_folder_score_what_they_score_on_the_run(residual, tmp_path, monkeypatch):
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    recipe = preset("tiny", residual)
    recipe = dataclasses.replace(
        recipe,
        steps=1,
        model=dataclasses.replace(recipe.model, **SMALL | LLAMA | dict(head_bias=False)),
        data=dataclasses.replace(recipe.data, batch=2),
        watch=dataclasses.replace(recipe.watch, eval_tokens=64),
    )
    train(recipe, tmp_path / "run")
    made = export(tmp_path / "run", tmp_path / "out")
    assert made.family == ("llama" if residual == "pre-norm" else None)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps({"query": q, "choices": c, "gold": g}) + "\n" for q, c, g in ROWS))
    (tmp_path / "tasks").mkdir()
    for name, text in (("short", TASK), ("say", SAY)):
        (tmp_path / "tasks" / f"{name}.yaml").write_text(textwrap.dedent(text).replace("DATA", str(data)))
    results = lm_eval.simple_evaluate(
        "hf",
        model_args=dict(pretrained=str(tmp_path / "out"), trust_remote_code=True, device="cpu", batch_size=2),
        tasks=["short", "say"],
        task_manager=TaskManager(include_path=str(tmp_path / "tasks"), include_defaults=False),
        bootstrap_iters=0,
    )
    own = evaluate_tasks(tmp_path / "run", ["short"], task_path=tmp_path / "tasks", device="cpu")
    scores = {row["metric"]: row["value"] for row in own}
    for metric in ("acc", "acc_norm"):
        assert results["results"]["short"][f"{metric},none"] == pytest.approx(scores[metric])
    assert len(results["samples"]["say"]) == len(ROWS)
