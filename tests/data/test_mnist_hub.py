"""MNIST from the hub, by the call that `datasets` has."""

from __future__ import annotations

import numpy as np
import pytest

from gnomon.data import mnist
from gnomon.data.mnist import MEAN, STD
from gnomon.errors import UserError


def test_mnist_from_the_hub_is_read_row_by_row(monkeypatch):
    datasets = pytest.importorskip("datasets")
    images = {"train": [np.full((28, 28), 255), np.zeros((28, 28))], "test": [np.eye(28) * 51]}

    def load_dataset(path, config, *, split, streaming):
        assert (path, config, streaming) == ("ylecun/mnist", None, False)
        return [{"image": image.astype(np.uint8), "label": 7 + i} for i, image in enumerate(images[split])]

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    (x, y), (x_test, y_test) = mnist("hub")
    assert x.shape == (2, 784) and x_test.shape == (1, 784) and x.dtype == np.float32
    assert y.tolist() == [7, 8] and y_test.tolist() == [7] and y.dtype == np.int64
    assert np.allclose(x[:, 0] * STD + MEAN, [1, 0], atol=1e-6)
    assert np.allclose(x_test[0, :2] * STD + MEAN, [0.2, 0], atol=1e-6)

    monkeypatch.setattr(datasets, "load_dataset", lambda *a, **k: 1 / 0)
    with pytest.raises(UserError, match="ylecun/mnist from the hub failed: ZeroDivisionError"):
        mnist("hub")
