"""MNIST: 5,000 images embedded, or all 70,000 from a folder of idx files or from the hub.

Legend: N images, P = 784 pixels.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np

from gnomon.data.hub import load_rows
from gnomon.data.plain_text import read_bytes
from gnomon.errors import UserError

MEAN, STD = 0.1307, 0.3081
HELD_OUT = 500


def mnist(source: str = "embedded") -> tuple[tuple[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]]:
    """Training and test images, normalised, and their labels.

    Args:
        source: "embedded" (4,500 and 500 images, a part of MNIST's training set), "hub" (all, through the extra `data`), or
            a folder with `train-images-idx3-ubyte` and its three companions, with or without `.gz`.

    Returns:
        ((N, P) float32, (N,) int64) for training and the same for testing; pixels have mean 0 and deviation 1 over MNIST.

    Raises:
        UserError: no such folder, a file is missing or is not what its name says, or the extra is not installed.
    """
    if source == "embedded":
        # What a file of ours holds is arrays only; anything else is refused by numpy.
        with np.load(Path(__file__).with_name("mnist_5k.npz"), allow_pickle=False) as file:
            images, labels = file["images"], file["labels"]
        parts = (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT])
    elif source == "hub":
        parts = _hub()
    else:
        folder = Path(source)
        if not folder.is_dir():
            raise UserError(f"no folder {source} to read MNIST from; give a folder of idx files, 'embedded' or 'hub'")
        parts = tuple((_idx(folder, f"{part}-images-idx3-ubyte", 3), _idx(folder, f"{part}-labels-idx1-ubyte", 1))
                      for part in ("train", "t10k"))  # fmt: skip
    (x, y), (x_test, y_test) = ((_normalised(images), labels.astype(np.int64)) for images, labels in parts)
    return (x, y), (x_test, y_test)


def _normalised(images: np.ndarray) -> np.ndarray:
    return ((images.reshape(len(images), -1) / 255 - MEAN) / STD).astype(np.float32)


def _idx(folder: Path, name: str, axes: int) -> np.ndarray:
    """An array of bytes in the idx format: a magic number that tells the axes, their lengths, the bytes."""
    path = next((p for p in (folder / name, folder / f"{name}.gz") if p.exists()), None)
    if path is None:
        raise UserError(f"{folder} holds no {name} (or {name}.gz); MNIST consists of four such files")
    content = read_bytes(path)
    head = 4 + 4 * axes
    shape = struct.unpack(f">{axes}I", content[4:head]) if content[:4] == bytes((0, 0, 8, axes)) else ()
    if not shape or len(content) != head + int(np.prod(shape)):
        raise UserError(f"{path} is not an idx file of {axes} axes, or is cut short; fetch it again")
    return np.frombuffer(content, np.uint8, offset=head).reshape(shape)


def _hub() -> tuple[tuple[np.ndarray, np.ndarray], ...]:
    parts = []
    for split in ("train", "test"):
        images, labels = zip(*((row["image"], row["label"]) for row in load_rows("ylecun/mnist", split=split)))
        parts.append((np.stack([np.asarray(image, np.uint8) for image in images]), np.asarray(labels)))
    return tuple(parts)
