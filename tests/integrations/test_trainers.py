"""The callbacks in the trainers they are for."""

from __future__ import annotations

import pytest
from test_recorder import example

from gnomon import report
from gnomon.run_folder import read_metrics


def test_transformers_trainer(tmp_path):
    pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    main = example("monitor_transformers").main
    settings = dict(disable_tqdm=True, gradient_accumulation_steps=2, eval_strategy="no", save_strategy="steps", save_steps=10)
    whole = main(steps=20, out=str(tmp_path / "whole"), **settings)
    records = {record["step"]: record for record in read_metrics(tmp_path / "whole" / "gnomon")}
    logged = {row["step"]: row for row in whole.state.log_history if "loss" in row}
    assert sorted(logged) == [5, 10, 15, 20] and set(logged) <= set(records)
    for step, row in logged.items():
        assert records[step]["loss"] == row["loss"] and records[step]["lr"] == row["learning_rate"]
    assert [step for step, record in records.items() if "sigma_max" in record] == [10, 20]
    assert set(records[10]["angle"]) == {f"text.{i}.{name}" for i in range(3) for name in ("attention", "mlp")}
    assert report.summary(tmp_path / "whole" / "gnomon")["loss"] == pytest.approx(logged[20]["loss"], abs=0.2)
    # Continued from Trainer's own checkpoint, the folder goes on.
    main(steps=30, out=str(tmp_path / "whole"), **settings | {"resume_from_checkpoint": str(tmp_path / "whole" / "checkpoint-10")})
    steps = [record["step"] for record in read_metrics(tmp_path / "whole" / "gnomon")]
    assert steps == sorted(set(steps)) and steps[-1] == 30


def test_lightning(tmp_path):
    pytest.importorskip("lightning")
    trainer = example("monitor_lightning").main(steps=20, out=str(tmp_path), accumulate_grad_batches=2, enable_progress_bar=False)
    records = {record["step"]: record for record in read_metrics(tmp_path / "gnomon")}
    assert trainer.global_step == 20 and list(records) == [10, 20]
    assert "sigma_max" in records[20] and records[20]["loss"] < 6 and records[20]["lr"] == 3e-3
    assert set(records[10]["attention_entropy"]) == {f"text.{i}.attention" for i in range(3)}
    # The norm before clipping: what a fresh model has is above the bound.
    assert report.summary(tmp_path / "gnomon")["name"] == "gnomon"
