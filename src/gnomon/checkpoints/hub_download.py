"""Models by their name on the Hugging Face hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from gnomon.errors import UserError

_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")


def is_hub_name(name: str) -> bool:
    return bool(_ID.match(name))


def fetched(name: str) -> Path:
    """The local folder of a hub model: its weights (safetensors, else .bin), index and configs, and no code.

    Raises:
        UserError: the package is missing, or the model cannot be had.
    """
    try:
        import huggingface_hub
    except ImportError as error:
        raise UserError(
            f"{name} is no local path, and to fetch it the package huggingface-hub is needed ({error}). "
            'Install it: pip install "gnomon[hf]"'
        ) from None
    try:
        for weights in ("*.safetensors", "*.bin"):
            patterns = [weights, "*.index.json", "config.json", "adapter_config.json"]
            folder = Path(huggingface_hub.snapshot_download(name, allow_patterns=patterns))
            if any(folder.glob(weights)):
                break
    except Exception as error:  # offline, unknown, gated: each has its own class, all the user's to mend
        offline = " (HF_HUB_OFFLINE is set)" if os.environ.get("HF_HUB_OFFLINE") else ""
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(
            f"{name} is no local path and could not be fetched{offline}: {reason} "
            "Check the name and the connection, or download the model and give its folder."
        ) from None
    return folder
