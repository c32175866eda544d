"""Our Hugging Face classes under transformers' own tests of models, as a module of transformers' `tests` package.

Not collected from here: `tests/models/test_hf_transformers_tests.py` puts it beside transformers' tests and runs it there.
"""

from __future__ import annotations

import unittest

import torch
from transformers.models.auto import modeling_auto

import gnomon
from gnomon.models.hf import GnomonConfig, GnomonForCausalLM, GnomonModel

from .generation.test_utils import GenerationTesterMixin  # type: ignore[import-not-found]
from .test_configuration_common import ConfigTester  # type: ignore[import-not-found]
from .test_modeling_common import ModelTesterMixin, ids_tensor  # type: ignore[import-not-found]

gnomon.register()
# By these the tests know which classes take labels.
modeling_auto.MODEL_MAPPING_NAMES["gnomon"] = "GnomonModel"
modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES["gnomon"] = "GnomonForCausalLM"

SMALL = dict(
    vocab_size=99, context=64, layers=2, heads=4, width=32, mlp_width=64, bos_token_id=1, eos_token_id=None, pad_token_id=0
)
ROPE = dict(positions="rope", norm="rms", mlp="swiglu", bias=False, kv_heads=2, tied=False)
CASES = {
    "pre_norm": ROPE,
    "clamped_sphere": ROPE | dict(residual="sphere", residual_options={"p": 1.0, "clamp": 1.5}, head_bias=True),
    "geonorm": ROPE | dict(residual="geonorm"),
    "learned_positions_untied": dict(tied=False),
    "tied": ROPE | dict(tied=True, head_bias=True),
}


class CaseTester:
    """What the tests ask of a `model_tester`."""

    batch_size, seq_length, key_length, encoder_seq_length = 3, 7, 7, 7
    hidden_size, num_hidden_layers, num_attention_heads, vocab_size, is_training = 32, 2, 4, 99, True

    def __init__(self, settings: dict):
        self.settings = settings

    def get_config(self) -> GnomonConfig:
        return GnomonConfig(**SMALL | self.settings)

    def prepare_config_and_inputs_for_common(self) -> tuple[GnomonConfig, dict]:
        tokens = ids_tensor([self.batch_size, self.seq_length], self.vocab_size)
        return self.get_config(), {"input_ids": tokens, "attention_mask": torch.tril(torch.ones_like(tokens))}


def case(name: str) -> type:
    class Test(ModelTesterMixin, GenerationTesterMixin, unittest.TestCase):
        all_model_classes = (GnomonModel, GnomonForCausalLM)
        all_generative_model_classes = (GnomonForCausalLM,)

        def setUp(self) -> None:
            self.model_tester = CaseTester(CASES[name])
            self.config_tester = ConfigTester(self, config_class=GnomonConfig, **SMALL | CASES[name])

        def test_config(self) -> None:
            self.config_tester.run_common_tests()

    return Test


globals().update({f"Test_{name}": case(name) for name in CASES})
