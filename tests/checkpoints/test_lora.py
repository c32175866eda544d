"""LoRA folders: the update alone, or added to its base; what does not fit is named."""

from __future__ import annotations

import json
import math

import pytest
import torch
from continuity_cases import LLAMA, llama
from safetensors.torch import save_file

from gnomon.checkpoints.opener import open_checkpoint
from gnomon.continuity import inspect
from gnomon.errors import UserError

R, ALPHA = 4, 10


def adapter(folder, rank=R, prefix="base_model.model.", config=True, transposed=False, **options):
    g = torch.Generator().manual_seed(1)
    factors = {}
    for layer in range(4):
        for name, (out, inputs) in {"q_proj": (32, 32), "k_proj": (16, 32)}.items():
            module = f"{prefix}model.layers.{layer}.self_attn.{name}"
            factors[f"{module}.lora_A.weight"] = torch.randn(rank, inputs, generator=g)
            factors[f"{module}.lora_B.weight"] = torch.randn(out, rank, generator=g)
    folder.mkdir(exist_ok=True)
    save_file(factors, folder / "adapter_model.safetensors")
    if config:
        text = json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": ALPHA, **options})
        (folder / "adapter_config.json").write_text(text)
    return factors


NAME = "model.layers.2.self_attn.k_proj"


@pytest.mark.parametrize(
    "options, scale",
    [
        ({}, ALPHA / R),
        ({"use_rslora": True}, ALPHA / math.sqrt(R)),
        ({"alpha_pattern": {"k_proj": 6}}, 6 / R),
    ],
)
def test_the_update_alone(tmp_path, options, scale):
    factors = adapter(tmp_path / "lora", **options)
    checkpoint = open_checkpoint(tmp_path / "lora")
    assert len(checkpoint.entries) == 8
    key = f"base_model.model.{NAME}"
    expected = scale * factors[f"{key}.lora_B.weight"] @ factors[f"{key}.lora_A.weight"]
    assert checkpoint.entries[f"{NAME}.weight"].shape == (16, 32)
    assert torch.allclose(checkpoint.read(f"{NAME}.weight"), expected, atol=1e-4)
    assert any("update alone" in note for note in checkpoint.notes)


@pytest.mark.parametrize("prefix", ["base_model.model.", ""])
def test_added_to_its_base(tmp_path, prefix):
    factors, base = adapter(tmp_path / "lora", prefix=prefix), llama()
    checkpoint = open_checkpoint(tmp_path / "lora", base=base)
    assert set(checkpoint.entries) == set(base)
    key = f"{prefix}{NAME}"
    expected = base[f"{NAME}.weight"] + ALPHA / R * factors[f"{key}.lora_B.weight"] @ factors[f"{key}.lora_A.weight"]
    assert torch.allclose(checkpoint.read(f"{NAME}.weight"), expected, atol=1e-5)
    assert torch.equal(checkpoint.read("model.embed_tokens.weight"), base["model.embed_tokens.weight"])


def test_conv1d_targets_are_stored_the_other_way(tmp_path):
    factors = adapter(tmp_path / "lora", fan_in_fan_out=True)
    read = open_checkpoint(tmp_path / "lora").read(f"{NAME}.weight")
    key = f"base_model.model.{NAME}"
    assert read.shape == (32, 16)
    expected = ALPHA / R * factors[f"{key}.lora_B.weight"] @ factors[f"{key}.lora_A.weight"]
    assert torch.allclose(read.T, expected, atol=1e-4)


def test_without_its_config_directions_are_the_same(tmp_path):
    adapter(tmp_path / "a")
    adapter(tmp_path / "b", config=False)
    one, two = (inspect(tmp_path / name, k=2, config=LLAMA) for name in "ab")
    assert one.rows and [row["v1_cos"] for row in one.rows] == pytest.approx(
        [row["v1_cos"] for row in two.rows], abs=1e-5
    )
    assert any("adapter_config.json is missing" in flag["message"] for flag in two.flags)
    assert all(row["gap"] and row["defined"] for row in one.rows)


def test_what_does_not_fit(tmp_path):
    factors = adapter(tmp_path / "lora")
    path = tmp_path / "lora" / "adapter_model.safetensors"
    with pytest.raises(UserError, match="has 0 tensors of that name"):
        open_checkpoint(tmp_path / "lora", base={"x.weight": torch.zeros(2, 2)})
    with pytest.raises(UserError, match="belongs to another base"):
        open_checkpoint(tmp_path / "lora", base=llama(d=16))
    with pytest.raises(UserError, match="holds no LoRA factors"):
        save_file({"x": torch.zeros(1)}, tmp_path / "x.safetensors")
        open_checkpoint(tmp_path / "x.safetensors", base=llama())
    key = f"base_model.model.{NAME}.lora_B.weight"
    save_file({**factors, key: torch.zeros(16, 3)}, path)
    with pytest.raises(UserError, match="do not fit"):
        open_checkpoint(tmp_path / "lora")
    del factors[key]
    save_file(factors, path)
    with pytest.raises(UserError, match="no partner lora_B"):
        open_checkpoint(tmp_path / "lora")


def saved(model, folder):
    """What peft writes of its model, and the weights it merges to."""
    model.save_pretrained(folder)
    return open_checkpoint(folder, base=BASE), dict(model.merge_and_unload().named_parameters())


class Experts(torch.nn.Module):
    """Two packed matrices, out x in as most models keep them, or in x out."""

    def __init__(self, first, second):
        super().__init__()
        self.gate_up_proj = torch.nn.Parameter(torch.randn(3, *first))
        self.down_proj = torch.nn.Parameter(torch.randn(3, *second))

    def forward(self, x):
        return x


def tiny(first=(20, 12), second=(12, 10)):
    torch.manual_seed(0)
    inner = torch.nn.ModuleDict({"embed": torch.nn.Embedding(30, 12), "q_proj": torch.nn.Linear(12, 16, bias=False)})
    inner["experts"] = Experts(first, second)
    model = torch.nn.Sequential(inner)
    model.forward = lambda x: x
    global BASE
    BASE = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    return model


BASE: dict = {}


def adapted(model, **options):
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(model, peft.LoraConfig(r=4, lora_alpha=6, init_lora_weights=False, **options))
    for name, parameter in wrapped.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(parameter, std=0.3, generator=torch.Generator().manual_seed(len(name)))
    return wrapped


@pytest.mark.parametrize("dora", [False, True])
def test_what_peft_merges_is_what_is_read(tmp_path, dora):
    checkpoint, merged = saved(adapted(tiny(), target_modules=["embed", "q_proj"], use_dora=dora), tmp_path)
    assert set(checkpoint.entries) == set(BASE)
    for name, tensor in merged.items():
        assert torch.allclose(checkpoint.read(name), tensor, atol=1e-5), name
    assert not torch.allclose(merged["0.q_proj.weight"], BASE["0.q_proj.weight"], atol=0.1)


@pytest.mark.parametrize("shapes", [((20, 12), (12, 10)), ((12, 20), (10, 12)), ((12, 12), (12, 10))])
def test_packed_experts_as_peft_merges_them(tmp_path, shapes):
    model = adapted(tiny(*shapes), target_modules=[], target_parameters=["experts.gate_up_proj", "experts.down_proj"])
    checkpoint, merged = saved(model, tmp_path)
    for name, tensor in merged.items():
        assert torch.allclose(checkpoint.read(name), tensor, atol=1e-5), name
    assert torch.equal(checkpoint.read("0.experts.down_proj", index=1), checkpoint.read("0.experts.down_proj")[1])
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    if shapes[0] == (12, 12):
        (tmp_path / "adapter_config.json").write_text(json.dumps(config | {"peft_version": None}))
        with pytest.raises(UserError, match="are square .12 x 12., and adapter_config.json has no peft_version"):
            open_checkpoint(tmp_path, base=BASE)
    with pytest.raises(UserError, match="only known with the base"):
        open_checkpoint(tmp_path)


def test_square_experts_of_an_older_peft(tmp_path):
    """Before 0.19.1 A read the first axis of the parameter, whatever it was."""
    tiny((12, 12), (12, 10))
    g = torch.Generator().manual_seed(0)
    A, B = torch.randn(6, 12, generator=g), torch.randn(12, 6, generator=g)
    key = "base_model.model.0.experts.lora_"
    save_file({f"{key}A.weight": A, f"{key}B.weight": B}, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_parameters": ["experts.gate_up_proj"], "peft_version": "0.19.0"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    expected = BASE["0.experts.gate_up_proj"].clone()
    for e in range(3):
        for r in range(2):
            expected[e] += torch.outer(A[2 * e + r], B[:, 3 * r + e])
    read = open_checkpoint(tmp_path, base=BASE).read("0.experts.gate_up_proj")
    assert torch.allclose(read, expected, atol=1e-5)


def test_a_full_state_dict_is_its_own_base(tmp_path):
    model = adapted(tiny(), target_modules=["q_proj"])
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    with pytest.raises(UserError, match="no adapter_config.json; its lora_alpha is needed"):
        open_checkpoint(tmp_path)
    (tmp_path / "adapter_config.json").write_text(json.dumps({"r": 4, "lora_alpha": 6}))
    checkpoint, merged = open_checkpoint(tmp_path), dict(model.merge_and_unload().named_parameters())
    assert set(checkpoint.entries) == set(merged)
    for name, tensor in merged.items():
        assert torch.allclose(checkpoint.read(name), tensor, atol=1e-5)
    with pytest.raises(UserError, match="holds its own base weights"):
        open_checkpoint(tmp_path, base=BASE)


def test_modules_saved_whole_take_the_place_of_the_base(tmp_path):
    model = adapted(tiny(), target_modules=["q_proj"], modules_to_save=["embed"])
    model.base_model.model[0]["embed"].modules_to_save["default"].weight.data.fill_(3)
    checkpoint, merged = saved(model, tmp_path)
    assert torch.equal(checkpoint.read("0.embed.weight"), torch.full((30, 12), 3.0))
    assert torch.allclose(checkpoint.read("0.q_proj.weight"), merged["0.q_proj.weight"], atol=1e-5)


def test_dora_without_its_base_says_what_is_left_out(tmp_path):
    adapted(tiny(), target_modules=["q_proj"], use_dora=True).save_pretrained(tmp_path)
    assert any("magnitudes" in note for note in open_checkpoint(tmp_path).notes)


@pytest.mark.parametrize(
    "options, message",
    [
        ({"lora_alpha": None}, "has no lora_alpha"),
        ({"lora_alpha": "16"}, "lora_alpha of adapter_config.json is '16'.*expected a number"),
        ({"alpha_pattern": {"q_proj(": 8}}, r"has 'q_proj\(', which is no regular expression"),
        ({"peft_type": "ADALORA"}, "of the kind ADALORA, and only LoRA and DoRA are read"),
    ],
)
def test_configs_that_cannot_be_used(tmp_path, options, message):
    adapter(tmp_path, **options)
    with pytest.raises(UserError, match=message):
        open_checkpoint(tmp_path)


def test_other_adapters_are_named(tmp_path):
    factors = adapter(tmp_path)
    save_file(factors | {"x.lora_E": torch.ones(4, 1)}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="of the kind AdaLoRA"):
        open_checkpoint(tmp_path)
    two = factors | {name.replace(".weight", ".second.weight"): tensor.clone() for name, tensor in factors.items()}
    save_file(two, tmp_path / "adapter_model.safetensors")
    with pytest.raises(UserError, match="several adapters .default, second."):
        open_checkpoint(tmp_path)


def test_the_command_takes_a_config(tmp_path, capsys):
    from gnomon import cli

    adapter(tmp_path / "lora")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for config in (tmp_path, tmp_path / "config.json"):
        cli.main(["inspect", str(tmp_path / "lora"), "--config", str(config), "--top", "2"])
        assert "llama" in capsys.readouterr().out
    assert cli.main(["inspect", str(tmp_path / "lora"), "--config", str(tmp_path / "nothing.json")]) == 2
    assert "no file" in capsys.readouterr().err
