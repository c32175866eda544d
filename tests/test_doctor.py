"""What `gnomon doctor` says of the machine."""

from __future__ import annotations

import importlib.metadata
import tomllib
from pathlib import Path

from gnomon import doctor


def test_every_extra_of_the_package_is_listed(monkeypatch):
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    rows = {row["what"]: row for row in doctor.findings()}
    assert {f"extra {name}" for name in project["optional-dependencies"]} == {w for w in rows if w.startswith("extra ")}

    real = importlib.metadata.version
    gone = {"gguf", "lm-eval", "wandb"}

    def version(name):
        if name in gone:
            raise importlib.metadata.PackageNotFoundError(name)
        return "1" if name in ("tensorboard", "trackio") else real(name)

    monkeypatch.setattr(importlib.metadata, "version", version)
    rows = {row["what"]: row for row in doctor.findings()}
    assert rows["extra gguf"]["found"] == "missing: gguf" and rows["extra gguf"]["means"] == 'pip install "gnomon[gguf]"'
    assert (rows["extra eval"]["found"], rows["extra track"]["found"]) == ("missing: lm-eval", "missing: wandb")
    assert (rows["extra data"]["found"], rows["extra data"]["means"]) == ("installed", "")


def test_a_folder_that_is_not_installed_says_so(monkeypatch):
    def requires(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)
    assert "not an installed package" in doctor.findings()[-1]["found"]
