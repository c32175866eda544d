"""Every causal class of the installed transformers: made smaller it opens with the logits it was made with, or it is told why not."""

from __future__ import annotations

import numpy as np
import pytest
import tiny_transformers
import torch
from running_cases import write_tokens

from gnomon.compress import compress
from gnomon.compress import compressing as ours
from gnomon.compress.in_place import visiting
from gnomon.errors import UserError
from gnomon.running import open_streamed

transformers = pytest.importorskip("transformers")
HONEST = (
    "does not predict a next token", "can be replaced", "does not run its blocks once and in order", "refuses its config.json",
    "directions that were never seen", "no class of transformers reads text", "writes into its weights",
)  # fmt: skip
"""Why a class may be refused."""
PARTS = 8
TOKENS_BT = torch.randint(5, 100, (2, 32), generator=torch.Generator().manual_seed(0))


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_class_of_transformers(part, tmp_path, monkeypatch):
    transformers.utils.logging.disable_progress_bar()
    tokens = write_tokens(tmp_path / "t.bin", np.random.default_rng(0).integers(5, 100, 640))
    seen = {}

    def keeping(streamed, load, rows, folder):
        seen["logits"] = streamed.run(TOKENS_BT, visiting(streamed, load)).logits
        return 0.0

    monkeypatch.setattr(ours, "check_folder", keeping)
    equal, told, wrong = [], {}, {}
    for (kind, name), encoder_decoder in list(tiny_transformers.classes().items())[part::PARTS]:
        if "Masked" in name:
            continue
        made = None if encoder_decoder else tiny_transformers.build(kind, name, encoder_decoder)
        if made is None:
            continue
        whole, small = tmp_path / f"{kind}-{name}", tmp_path / f"{kind}-{name}-small"
        try:
            made[0].save_pretrained(whole)
        except Exception:  # of a config that is built by hand and not read back
            continue
        try:
            compress(whole, small, tokens, 0.95, method="shared", length=32, verify=True)
            found = open_streamed(small).run(TOKENS_BT).logits
        except UserError as error:
            told[name] = str(error)
            continue
        if torch.allclose(found, seen["logits"], rtol=1e-4, atol=1e-5, equal_nan=True):
            equal.append(name)
        else:
            wrong[name] = float((found - seen["logits"]).abs().max())
    assert wrong == {} and len(equal) > 8
    assert {name: why for name, why in told.items() if not any(reason in why for reason in HONEST)} == {}
