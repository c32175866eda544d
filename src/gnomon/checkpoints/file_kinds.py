"""What a file is by its first bytes, for those that come under another format's name."""

from __future__ import annotations

import re
from pathlib import Path

# (first bytes, what the file is, and what to do about it). The order counts: the first that fits is it.
_KINDS = [
    (re.compile(start, re.DOTALL), what)
    for start, what in (
        (rb"version https://git-lfs", "a Git LFS pointer: a few lines that stand for a file which was not downloaded. "
         "Fetch the real file (`git lfs pull`, or download it again)"),
        (rb"PK\x03\x04", "a torch zip file. Rename it to .bin or .pt"),
        (rb"GGUF", "a GGUF file. Rename it to .gguf"),
        (rb"\x89HDF", "an HDF5 (Keras, TensorFlow) file. Convert it to safetensors first"),
        (rb"\x80[\x02-\x05]", "a Python pickle. Rename it to .bin if it is a torch checkpoint you trust"),
        (rb"\x1f\x8b|BZh|\xfd7zXZ|\x28\xb5\x2f\xfd|.{257}ustar", "a packed archive. Unpack it first"),
        (rb"\s*<(!DOCTYPE|!doctype|html|\?xml)", "an HTML page, most likely an error page saved by the download. "
         "Download the file again"),
        # A version, then the length and the name of a model specification.
        (rb"[\x01-\x20]\x00\x00\x00.\x00[A-Za-z0-9]+Spec\x00", "a CTranslate2 model. Pass the model it was converted from"),
        (rb".{8}\{", "a safetensors file. Rename it to .safetensors"),
    )
]  # fmt: skip


def kind_of(path: Path) -> str | None:
    """What the file is, with a remedy; None when its first bytes do not tell."""
    with open(path, "rb") as file:
        head = file.read(512)
    return next((what for start, what in _KINDS if start.match(head)), None)


def wrong_format(path: Path, wanted: str) -> str | None:
    """A sentence that says what the file really is, when its first bytes tell that it is not `wanted`."""
    if path.stat().st_size == 0:
        return f"{path} is empty. The download or the copy failed; fetch it again."
    what = kind_of(path)
    return f"{path} is not {wanted} but {what}." if what and not what.startswith(wanted) else None
