"""Tasks of lm_eval (EleutherAI's harness) on a run of ours: HellaSwag, PIQA, ARC, LAMBADA and some ten thousand more.

The prompts and metrics are lm_eval's; ours is the model. With `task_path` the tasks are yours, as with its
`--include_path`, and run offline where their data are files.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from gnomon.errors import UserError, suggest
from gnomon.evaluation.loading import load
from gnomon.evaluation.scoring import complete, loglikelihoods
from gnomon.models.transformer import Transformer

# The usual zero-shot set of small language models, by lm_eval's names.
ZERO_SHOT = (
    "arc_challenge", "arc_easy", "boolq", "copa", "hellaswag", "lambada_openai", "openbookqa", "piqa", "sciq", "winogrande",
    "wikitext",
)  # fmt: skip


def evaluate_tasks(
    path: str | Path,
    tasks: Sequence[str],
    *,
    task_path: str | Path | None = None,
    fewshot: int | None = None,
    limit: int | None = None,
    device: str = "auto",
) -> list[dict[str, Any]]:
    """Score a trained model on tasks of lm_eval.

    Args:
        path: run folder or checkpoint.
        tasks: names of tasks, groups or tags, patterns ("arc_*"), or "zero-shot" for `ZERO_SHOT`.
        task_path: a folder of task files (.yaml) that are known besides lm_eval's own. A task file may name Python
            functions to run: take it from people you trust.
        fewshot: worked examples in each prompt; None for what each task says.
        limit: at most this many documents a task.
        device: auto, cpu, cuda or mps.

    Returns:
        One row for each metric: task, version, fewshot, documents, metric, value, stderr.

    Raises:
        UserError: lm_eval is not installed, a task is unknown, or its data cannot be read.
    """
    lm_eval = _library()
    # Told by Progress and the returned rows; the harness would repeat it line by line.
    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    manager, names = _find(tasks, task_path)
    chosen = _load_tasks(manager, names)
    model, tokenizer, _ = load(path, device)
    results = lm_eval.simple_evaluate(
        model=harness_model(model, tokenizer),
        tasks=chosen,
        task_manager=manager,
        num_fewshot=fewshot,
        limit=limit,
        bootstrap_iters=1000,
        log_samples=False,
    )
    return _rows(results)


def harness_model(model: Transformer, tokenizer: Any) -> Any:
    """Our model as an `lm_eval.api.model.LM`, for a script of your own around `lm_eval.simple_evaluate`.

    Log-likelihoods are those of lm_eval's own `hf` model: a request without context begins with end-of-text, documents
    are read in its rolling windows, and what does not fit the context is cut off on the left. Unlike there, an answer
    longer than the context is scored in windows rather than refused.
    """
    _library()
    from lm_eval.api.model import TemplateLM
    from lm_eval.models.utils import normalize_gen_kwargs

    class Harness(TemplateLM):
        tokenizer_name = tokenizer.name

        @property
        def eot_token_id(self) -> int:
            return tokenizer.end_of_text

        @property
        def max_length(self) -> int:
            return model.config.context

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
            return tokenizer.encode(string).tolist()

        def _loglikelihood_tokens(self, requests: Any, **_: Any) -> list[tuple[float, bool]]:
            scores = loglikelihoods(model, [(context, continuation) for _, context, continuation in requests])
            for (texts, _, _), score in zip(requests, scores):
                self.cache_hook.add_partial("loglikelihood", texts, score)
            return scores

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            texts = [request.args[0] for request in requests]
            begin = [self.prefix_token_id]
            scores = loglikelihoods(model, [(begin, self.tok_encode(text)) for text in texts])
            return [score for score, _ in scores]

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            answers: dict[int, str] = {}
            groups: dict[str, list[int]] = {}
            for number, request in enumerate(requests):
                groups.setdefault(repr(request.args[1]), []).append(number)
            for numbers in groups.values():
                settings = dict(normalize_gen_kwargs(dict(requests[numbers[0]].args[1])))
                prompts = [self.tok_encode(requests[n].args[0]) or [self.prefix_token_id] for n in numbers]
                answers |= zip(numbers, _answers(model, tokenizer, prompts, settings))
            return [answers[number] for number in range(len(requests))]

    return Harness()


def _answers(model: Transformer, tokenizer: Any, prompts: list[list[int]], settings: dict[str, Any]) -> list[str]:
    """Text after each prompt, up to the first of the task's stop words or end of text."""
    until = [word for word in settings["until"] if word]
    temperature = settings["temperature"] if settings.get("do_sample") else 0.0
    generator = torch.Generator(device=model.embed.weight.device).manual_seed(0)

    def enough(ids: list[int]) -> bool:
        return ids[-1] == tokenizer.end_of_text or any(word in tokenizer.decode(ids) for word in until)

    def draw(logits_BV: torch.Tensor) -> torch.Tensor:
        if not temperature:
            return logits_BV.argmax(-1)
        return torch.multinomial((logits_BV / temperature).softmax(-1), 1, generator=generator).squeeze(1)

    texts = []
    for ids in complete(model, prompts, settings["max_gen_toks"], stop=enough, choose=draw):
        text = tokenizer.decode(ids[:-1] if ids[-1:] == [tokenizer.end_of_text] else ids)
        for word in until:
            text = text.split(word)[0]
        texts.append(text)
    return texts


def _find(tasks: Sequence[str], task_path: str | Path | None) -> tuple[Any, list[str]]:
    """What knows the tasks, and their names with patterns spelled out."""
    from lm_eval.tasks import TaskManager

    wanted = [name for task in tasks for name in (ZERO_SHOT if task == "zero-shot" else [task])]
    if task_path is not None:
        if not Path(task_path).is_dir():
            raise UserError(f"--task-path: there is no folder {task_path}; it should hold lm_eval task files (.yaml)")
        # Reading lm_eval's own fifteen thousand takes seconds: only where the folder does not have all.
        manager = TaskManager(include_path=str(task_path), include_defaults=False)
        if all(manager.match_tasks([name]) for name in wanted):
            return manager, _spelled_out(manager, wanted)
    manager = TaskManager(include_path=None if task_path is None else str(task_path))
    return manager, _spelled_out(manager, wanted)


def _spelled_out(manager: Any, wanted: list[str]) -> list[str]:
    found: list[str] = []
    for name in wanted:
        matches = manager.match_tasks([name])
        if not matches:
            raise UserError(f"unknown task {name!r}. {suggest(name, ['zero-shot', *manager.all_tasks])[:400]}")
        found += [match for match in matches if match not in found]
    return found


def _load_tasks(manager: Any, names: list[str]) -> list[Any]:
    chosen: list[Any] = []
    for name in names:
        try:
            loaded = manager.load([name])
        except Exception as error:  # of datasets, of the hub's client, of the network: dozens of types
            raise UserError(
                f"the task {name!r} could not be loaded: {type(error).__name__}: {next(iter(str(error).splitlines()), '')}. "
                "lm_eval's own tasks fetch their data from the hub. Without a network, give tasks over local files: "
                "--task-path FOLDER."
            ) from error
        # A group counts as one, and comes first.
        chosen += list(loaded["groups"].values())[:1] or list(loaded["tasks"].values())
    return chosen


def _rows(results: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for task, values in results["results"].items():
        for key, value in values.items():
            metric, comma, filtered = key.partition(",")
            if not comma or metric.endswith("_stderr") or not isinstance(value, (int, float)):
                continue
            stderr = values.get(f"{metric}_stderr,{filtered}")
            rows.append(
                {
                    "task": task,
                    "version": results["versions"].get(task),
                    "fewshot": results["n-shot"].get(task),
                    "documents": results["n-samples"].get(task, {}).get("effective"),
                    "metric": metric if filtered == "none" else f"{metric} ({filtered})",
                    "value": value,
                    "stderr": stderr if isinstance(stderr, (int, float)) and math.isfinite(stderr) else None,
                }
            )
    return rows


def _library() -> Any:
    try:
        import lm_eval
    except ImportError as error:
        raise UserError('these tasks are those of lm_eval: pip install "gnomon[eval]"') from error
    return lm_eval
