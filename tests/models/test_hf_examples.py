"""The examples run: other people's training loops take ManifoldMuon as it is, checkpoints and all."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from hf_cases import build

import gnomon
from gnomon.anatomy import read

EXAMPLES = Path(__file__).parents[2] / "examples"


def example(name: str):
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def violations(model: torch.nn.Module) -> list[float]:
    """How far each attention and MLP matrix is from its manifold under "hetero"."""
    state, found = model.state_dict(), []
    for part in read(model):
        if part.sublayer in ("attention", "mlp") and part.is_matrix:
            manifold = gnomon.Stiefel() if part.sublayer == "attention" else gnomon.DGram()
            found.append(float(manifold.violation(part.block.take(state[part.name]))))
    return found


def test_transformers_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    settings = dict(save_strategy="steps", save_steps=3, disable_tqdm=True, logging_steps=1)
    whole = example("hf_trainer").main(steps=6, out=str(tmp_path / "whole"), **settings)
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert len(losses) == 6 and float(losses[-1]) < float(losses[0])
    found = violations(whole.model)
    assert len(found) == 3 * 6 and max(found) < 1e-3
    # Stopped after three steps and continued from transformers' own checkpoint, the weights are the same.
    again = example("hf_trainer").main(
        steps=6,
        out=str(tmp_path / "again"),
        resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-3"),
        **settings,
    )
    for a, b in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_transformers_trainer_on_an_exported_model(tmp_path):
    """Trainer and gnomon's own class: loss, gradients, saving, and the sphere's steps among the trained."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    import dataclasses

    from gnomon.models.hf import GnomonConfig, GnomonForCausalLM

    ours = build("llama-sphere")
    model = GnomonForCausalLM(GnomonConfig(**dataclasses.asdict(ours.config)))
    start = [block.join_mlp.a.item() for block in model.model.blocks]
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(257, (24, 32))]
    trainer = transformers.Trainer(
        model=model,
        args=transformers.TrainingArguments(
            output_dir=str(tmp_path), max_steps=2, report_to="none", save_strategy="no", disable_tqdm=True
        ),
        train_dataset=rows,
        optimizers=(gnomon.ManifoldMuon(gnomon.assign(model, "stiefel"), lr=0.01, adamw_lr=1e-2), None),
    )
    trainer.train()
    assert all(a.join_mlp.a.item() != b for a, b in zip(model.model.blocks, start))
    query = model.model.blocks[0].attention.query.weight
    assert float(gnomon.Stiefel().violation(query.detach())) < 1e-3
    trainer.save_model(tmp_path / "saved")
    back = GnomonForCausalLM.from_pretrained(tmp_path / "saved")
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), back.parameters(), strict=True))


def test_lightning(tmp_path):
    pytest.importorskip("lightning")
    small = dict(layers=2, width=32, heads=4, context=32)
    whole = example("lightning_loop").main(4, str(tmp_path / "whole"), **small)
    model = whole.lightning_module.model
    found = violations(model)
    assert whole.global_step == 4 and len(found) == 2 * 6 and max(found) < 1e-3
    half = example("lightning_loop").main(2, str(tmp_path / "half"), **small)
    assert half.global_step == 2
    again = example("lightning_loop").main(4, str(tmp_path / "again"), str(tmp_path / "half" / "last.ckpt"), **small)
    assert again.global_step == 4
    steps = [group["step"] for group in again.optimizers[0].param_groups if group["manifolds"] is not None]
    assert steps and set(steps) == {4}
