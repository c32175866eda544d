"""The model card: what the model is, how to open it, how it was made and what it reached."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from gnomon import residual
from gnomon.models.hf.gpt2_llama import CLASSES

_CARD = """\
---
library_name: transformers
pipeline_tag: text-generation
tags:
- gnomon
- {residual}
---

# {name}

A decoder-only transformer of {parameters:,} weights, trained with gnomon {version}.

- blocks: {layers} of width {width}, {heads} heads, {positions} positions, {mlp}, context {context} tokens
- residual: **{residual}**{options}: {summary}
- optimizer: {optimizer}

## Use

{use}

## Results

{results}

## Recipe

`gnomon train --config recipe.json --out RUN` trains this model again.

| setting | value |
| --- | --- |
{recipe}

Made with {environment}.
"""

_THEIRS = """\
The blocks are those of {family}, so the folder opens as `{kind}` without any code of its own, in transformers and in
programs that read {family} checkpoints (vLLM, llama.cpp).

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
```"""

_OWN = """\
transformers has no class with these blocks ({obstacles}); the folder carries its own code.

```python
from transformers import AutoModelForCausalLM, AutoTokenizer

import gnomon

gnomon.register()  # or, where gnomon is not installed, trust_remote_code=True below
model, tokenizer = AutoModelForCausalLM.from_pretrained("{name}"), AutoTokenizer.from_pretrained("{name}")
```"""


def model_card(
    name: str,
    family: str | None,
    obstacles: Sequence[str],
    recipe: Mapping[str, Any],
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
    results: Mapping[str, Any],
    checked: str,
) -> str:
    """The text of README.md.

    Args:
        name: of the folder.
        family: "gpt2", "llama", or None for gnomon's own class, for which `obstacles` says why.
        recipe, settings: the recipe's leaves by dotted path, and the model's fields.
        environment: of the run, with "parameters".
        results: what to tell, in order; None is left out.
        checked: a sentence on what was verified, or nothing.
    """
    options = {key: value for key, value in settings["residual_options"].items()}
    use = _OWN.format(obstacles="; ".join(obstacles), name=name) if family is None else _THEIRS.format(
        family=family, kind=CLASSES[family], name=name
    )  # fmt: skip
    told = {key: value for key, value in results.items() if value is not None}
    return _CARD.format(
        **{key: settings[key] for key in ("layers", "width", "heads", "positions", "mlp", "context", "residual")},
        name=name,
        parameters=environment.get("parameters", 0),
        version=environment.get("gnomon", ""),
        options=f" ({', '.join(f'{key} = {value}' for key, value in options.items())})" if options else "",
        summary=residual.names()[settings["residual"]],
        optimizer=_optimizer(recipe),
        use=use + (f"\n\n{checked}" if checked else ""),
        results=_table(("", "value"), told) if told else "None were recorded.",
        recipe="\n".join(f"| {path} | {_cell(value)} |" for path, value in recipe.items()),
        environment=", ".join(
            f"{key} {environment[key]}" for key in ("gnomon", "torch", "python") if key in environment
        )
        or "an unknown version of gnomon",
    )


def _optimizer(recipe: Mapping[str, Any]) -> str:
    name = str(recipe["optim.name"])
    manifolds = f", assignment {recipe['optim.assignment']}" if name == "manifold-muon" else ""
    return f"{name}{manifolds}, learning rate {recipe['optim.lr']:g}, {recipe['schedule.name']} schedule"


def _table(head: tuple[str, str], rows: Mapping[str, Any]) -> str:
    lines = [
        f"| {head[0]} | {head[1]} |",
        "| --- | --- |",
        *(f"| {key} | {_cell(value)} |" for key, value in rows.items()),
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return (value if isinstance(value, str) else json.dumps(value)).replace("|", "\\|")
