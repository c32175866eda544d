"""MNIST from three places, and the residual MLP trained on it."""

from __future__ import annotations

import gzip
import json
import struct

import numpy as np
import pytest

from gnomon import data
from gnomon.errors import UserError
from gnomon.models.mlp import variant
from gnomon.studies import mlp_run


def test_embedded_images_are_normalised_and_balanced():
    (x, y), (x_test, y_test) = data.mnist()
    assert x.shape == (4500, 784) and x_test.shape == (500, 784) and x.dtype == np.float32
    assert abs(x.mean()) < 0.05 and abs(x.std() - 1) < 0.05
    assert np.bincount(np.concatenate([y, y_test])).tolist() == [500] * 10
    assert min(np.bincount(y_test)) > 20


def write(folder, name, array, packed):
    content = bytes((0, 0, 8, array.ndim)) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
    (folder / (name + ".gz" * packed)).write_bytes(gzip.compress(content) if packed else content)


@pytest.mark.parametrize("packed", [False, True])
def test_a_folder_of_idx_files(tmp_path, packed):
    images = np.arange(3 * 784, dtype=np.uint8).reshape(3, 28, 28)
    for part in ("train", "t10k"):
        write(tmp_path, f"{part}-images-idx3-ubyte", images, packed)
        write(tmp_path, f"{part}-labels-idx1-ubyte", np.array([7, 0, 9], np.uint8), packed)
    (x, y), _ = data.mnist(str(tmp_path))
    np.testing.assert_allclose(x, (images.reshape(3, -1) / 255 - 0.1307) / 0.3081, rtol=1e-6)
    assert y.tolist() == [7, 0, 9]


def test_bad_folders_are_told(tmp_path):
    with pytest.raises(UserError, match="no folder"):
        data.mnist(str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match="train-images-idx3-ubyte"):
        data.mnist(str(tmp_path))
    write(tmp_path, "train-images-idx3-ubyte", np.zeros((3, 28, 28), np.uint8), False)
    short = tmp_path / "train-images-idx3-ubyte"
    short.write_bytes(short.read_bytes()[:-5])
    with pytest.raises(UserError, match="cut short"):
        data.mnist(str(tmp_path))


@pytest.mark.parametrize("optimizer", mlp_run.OPTIMIZERS)
def test_a_short_run_learns_and_leaves_its_series(tmp_path, optimizer):
    lr = {"adam": 1e-3, "sign": 3e-4, "sgd": 1e-2}[optimizer]
    recipe = mlp_run.MLPRecipe(variant("Res+ReLU", layers=4, width=64), steps=40, optimizer=optimizer, lr=lr, track_every=20)
    found = mlp_run.train(recipe, tmp_path / "a")
    records = [json.loads(line) for line in (tmp_path / "a/metrics.jsonl").read_text().splitlines()]
    assert found["fate"] == "learned" and found["value"] < 1.5
    assert [r["step"] for r in records] == [0, 20, 40]
    assert len(records[0]["gradient_v1"]) == 3 and records[-1]["weight_v1"]
    again = mlp_run.train(recipe, tmp_path / "a")
    assert again["value"] == found["value"], "a run repeats bit for bit"


def test_spectra_of_equal_and_of_unrelated_layers():
    import torch

    W = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    assert mlp_run.spectra([W, W])["weighted_v1"] == pytest.approx(1)
    assert mlp_run.spectra([W, torch.randn(32, 32, generator=torch.Generator().manual_seed(1))])["weighted_v1"] < 0.3
    assert mlp_run.spectra([torch.eye(32)] * 2)["effective_rank"] == pytest.approx(32)
