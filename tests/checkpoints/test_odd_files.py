"""Three hundred files that are not what they should be: each is read, or refused in a sentence; none hangs or fills the memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import random
import resource
import signal
import struct
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file

from gnomon.continuity import inspect
from gnomon.errors import UserError, printable

LIMIT = 30  # seconds a file
ROOM = 1 << 30  # bytes more than the file
CONFIG = {"model_type": "llama", "hidden_size": 16, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2}

Odd = tuple[str, Callable[[Path], Path | None]]


def model(cast=lambda t: t, prefix="model.layers.{}."):
    g = torch.Generator().manual_seed(0)
    shapes = {"self_attn.q_proj": (16, 16), "self_attn.k_proj": (8, 16), "mlp.up_proj": (24, 16), "mlp.down_proj": (16, 24)}
    return {
        f"{prefix.format(layer)}{name}.weight": cast(torch.randn(shape, generator=g))
        for layer in range(2)
        for name, shape in shapes.items()
    }


def as_torch(value, **how) -> bytes:
    torch.save(value, file := io.BytesIO(), **how)
    return file.getvalue()


def as_gguf() -> bytes:
    def text(value):
        return struct.pack("<Q", len(value)) + value.encode()

    tensors = {"blk.0.attn_q.weight": (16, 16), "blk.1.attn_q.weight": (16, 16)}
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), 3)
    head += text("general.architecture") + struct.pack("<I", 8) + text("llama")
    head += text("llama.attention.head_count") + struct.pack("<II", 4, 4)
    head += text("tokenizer.ggml.tokens") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    for place, (name, shape) in enumerate(tensors.items()):
        head += text(name) + struct.pack("<IQQIQ", 2, *shape, 0, 1024 * place)
    return head + bytes(-len(head) % 32) + b"\0\0\x80\x3f" * 512


def file(name: str, data: bytes, config: object = None) -> Callable[[Path], Path]:
    def write(folder: Path) -> Path:
        (folder / name).write_bytes(data)
        if config is not None:
            (folder / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
        return folder

    return write


def header(value: object, data: bytes = bytes(64)) -> bytes:
    text = value if isinstance(value, bytes) else json.dumps(value).encode()
    return len(text).to_bytes(8, "little") + text + data


def repacked(compression=zipfile.ZIP_DEFLATED, **members: bytes) -> bytes:
    """A torch file packed again, with some members replaced."""
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(as_torch(model()))) as whole, zipfile.ZipFile(out, "w", compression) as again:
        for name in whole.namelist():
            again.writestr(name, members.get(name.rpartition("/")[2].replace(".", "_"), whole.read(name)))
    return out.getvalue()


def damaged(kind: str, name: str, data: bytes, count: int, seed: int) -> Iterator[Odd]:
    """Cut, with bytes flipped near the beginning, near the end and anywhere, with pieces twice or left out."""
    rng = random.Random(seed)
    for i in range(count):
        raw, how = bytearray(data), ("cut", "start", "end", "any", "twice", "gone")[i % 6]
        if how == "cut":
            raw = raw[: rng.randrange(len(raw))]
        elif how in ("twice", "gone"):
            at, length = rng.randrange(len(raw)), rng.randrange(1, 200)
            raw[at : at + (length if how == "gone" else 0)] = b"" if how == "gone" else raw[at : at + length]
        else:
            reach = {"start": range(min(400, len(raw))), "end": range(max(0, len(raw) - 400), len(raw))}.get(how, range(len(raw)))
            for _ in range(rng.randrange(1, 6)):
                raw[rng.choice(reach)] = rng.randrange(256)
        yield f"{kind} {how} {i}", file(name, bytes(raw), CONFIG)


def strange_safetensors() -> Iterator[Odd]:
    good = {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]}
    for name, value in {
        "a header of nothing": b"", "an empty object": {}, "a list": [good], "deep": b"[" * 100_000,
        "a shape of a million axes": {"w": {**good, "shape": [1 << 61] * 1_000_000}}, "huge": {"w": {**good, "shape": [1 << 61, 4]}},
        "a long name": {"layers.0.q_proj" + "x" * 100_000: good}, "escape codes": {"\x1b[31mred\x07.0.weight": good},
        "a layer number of 6,000 digits": {f"layers.{'9' * 6000}.q_proj.weight": good},
        "surrogates": b'{"\\ud800.0.weight": ' + json.dumps(good).encode() + b"}", "no shape": {"w": {"dtype": "F32"}},
        "a scalar weight": {"layers.0.q_proj.weight": {"dtype": "F32", "shape": [], "data_offsets": [0, 4]}},
        "seven axes": {"layers.0.q_proj.weight": {**good, "shape": [1, 1, 1, 2, 2, 2, 2]}},
        "zero sizes": {"layers.0.q_proj.weight": {"dtype": "F32", "shape": [0, 4], "data_offsets": [0, 0]}},
        "dtype F4": {"layers.0.q_proj.weight": {"dtype": "F4", "shape": [4, 4], "data_offsets": [0, 64]}},
    }.items():  # fmt: skip
        yield f"safetensors: {name}", file("model.safetensors", header(value, bytes(0 if name == "zero sizes" else 64)))
    for name, length in {"2^63": 1 << 63, "the file": 72, "zero": 0}.items():
        yield f"safetensors: length {name}", file("model.safetensors", length.to_bytes(8, "little") + bytes(64))
    for value in (float("nan"), float("inf"), 3e38, 0.0, 1e-45):
        yield f"safetensors: all {value}", file("model.safetensors", save(model(lambda t, v=value: torch.full_like(t, v))), CONFIG)


def strange_torch() -> Iterator[Odd]:
    loop: dict = dict(model())
    loop["self"] = loop
    wrapped: dict = {}
    wrapped["model"] = wrapped
    laughs: dict = {"x": torch.ones(2)}
    for _ in range(60):
        laughs = {"a": laughs, "b": laughs}
    deep: dict = dict(model())
    for _ in range(300):
        deep = {"in": deep}
    meta = torch.empty(4, 4, device="meta")
    for name, value in {
        "loop": loop, "wraps itself": wrapped, "laughs": laughs, "deep": deep, "a list": [1, 2], "nothing": {}, "a number": 3,
        "sparse": {"layers.0.q_proj.weight": torch.eye(4).to_sparse()}, "bfloat": model(lambda t: t.bfloat16()),
        "meta": {"layers.0.q_proj.weight": meta, "layers.1.q_proj.weight": meta}, "keys": {1: torch.ones(4, 4), (2, 3): torch.ones(4)},
        "repeated": {f"layers.{i}.q_proj.weight": torch.zeros(1).expand(1 << 20, 1 << 20) for i in range(2)},
        "complex": model(lambda t: t.to(torch.complex64)), "conjugate": model(lambda t: t.to(torch.complex64).conj()),
        "bool": model(lambda t: t > 0), "int64": model(lambda t: t.long()), "transposed": model(lambda t: t.T),
        "steps": model(lambda t: torch.stack([t, t], -1)[..., 0]), "empty": model(lambda t: torch.empty(0)),
    }.items():  # fmt: skip
        yield f"torch: {name}", file("pytorch_model.bin", as_torch(value), CONFIG)
        if name not in ("loop", "wraps itself"):
            yield f"old torch: {name}", file("model.pt", as_torch(value, _use_new_zipfile_serialization=False), CONFIG)
    yield "torch: deflated", file("pytorch_model.bin", repacked())
    yield "torch: a bomb", file("pytorch_model.bin", repacked(data_pkl=b"\x80\x02" + b"]" * 50_000_000))
    yield "torch: other bytes", file("pytorch_model.bin", repacked(zipfile.ZIP_STORED, byteorder=b"big"))
    yield "torch: no pickle", file("pytorch_model.bin", repacked(zipfile.ZIP_STORED, data_pkl=b""))
    yield "torch: a program", file("model.pt", repacked(zipfile.ZIP_STORED) + b"tail")
    code = b"cos\nsystem\n(S'true'\ntR."
    for name, data in {"pickle": pickle.dumps({"a": 1}), "of code": code, "cut": b"\x80\x02]", "nul": bytes(9)}.items():
        yield f"torch: {name}", file("model.bin", data)


def strange_gguf() -> Iterator[Odd]:
    for name, tail in {
        "counts without end": struct.pack("<IQQ", 3, 1 << 60, 1 << 60), "version 9": struct.pack("<IQQ", 9, 0, 0), "nothing more": b"",
        "other byte order": struct.pack(">IQQ", 3, 0, 0), "no tensors": struct.pack("<IQQ", 3, 0, 0),
        "an array without end": struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 0, 1 << 60),
        "arrays in arrays": struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<IIQ", 9, 9, 1) * 2000,
        "text without end": struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1 << 62),
        "an unknown type": struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 77),
        "a tensor too large": struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"a" + struct.pack("<IQQIQ", 2, 1 << 40, 1 << 40, 0, 0),
        "a thousand axes": struct.pack("<IQQ", 3, 1, 0) + struct.pack("<Q", 1) + b"a" + struct.pack("<I", 1000) + bytes(9000),
    }.items():  # fmt: skip
        yield f"gguf: {name}", file("model.gguf", b"GGUF" + tail)


def strange_settings() -> Iterator[Odd]:
    data = save(model())
    for key, value in {
        "num_attention_heads": "four", "hidden_size": None, "num_key_value_heads": 0, "head_dim": -3, "num_hidden_layers": 1 << 80,
        "text_config": [1], "quantization_config": "fp8", "model_type": 7, "architectures": {}, "layer_types": 3,
        "intermediate_size": [3], "vision_config": "none", "rope_scaling": 1,
    }.items():  # fmt: skip
        yield f"config: {key}", file("model.safetensors", data, CONFIG | {key: value})
    for text in ("", "[]", "{", "null", '{"a": ' * 5000, '{"hidden_size": 1' + "0" * 5000 + "}", '{"hidden_size": NaN}', "\ufeff{}"):
        yield f"config: {text[:19]!r}", file("model.safetensors", data, text)
    eights = model(lambda t: t.to(torch.float8_e4m3fn))
    for key, value in {"weight_block_size": ["x", 1], "config_groups": [3], "group_size": "all", "quant_method": None, "bits": -1}.items():
        yield f"quantised: {key}", file("model.safetensors", save(eights), CONFIG | {"quantization_config": {key: value}})
    names = list(model())
    for name, beside in {
        "scales of another shape": {f"{n}_scale": torch.ones(7, 3) for n in names}, "no scales": {},
        "empty scales": {f"{n}_scale": torch.ones(0, 2) for n in names},
        "scales of truth": {f"{n}_scale": torch.ones(2, dtype=torch.bool) for n in names},
    }.items():  # fmt: skip
        yield f"int8: {name}", file("model.safetensors", save(model(lambda t: t.to(torch.int8)) | beside), CONFIG)
    def ones(*shape, dtype=torch.int32):
        return torch.ones(shape, dtype=dtype)

    def four_bits(state: bytes):
        told = torch.tensor(list(state), dtype=torch.uint8)
        numbers = {"weight": ones(8, 1, dtype=torch.uint8), "weight.absmax": torch.ones(1), "weight.quant_map": torch.ones(16)}
        return numbers | {"weight.quant_state.bitsandbytes__nf4": told}

    for name, tensors in {
        "gptq": {"qweight": ones(2, 16), "qzeros": ones(1, 9), "scales": torch.ones(1, 16)},
        "gptq order": {"qweight": ones(2, 16), "qzeros": ones(1, 2) * 0x77777777, "scales": torch.ones(1, 16), "g_idx": ones(16) * 99},
        "awq": {"qweight": ones(16, 2), "qzeros": ones(9, 2), "scales": torch.ones(5, 16)},
        "packed": {"weight_packed": ones(4, 2), "weight_scale": torch.ones(4, 0), "weight_shape": torch.tensor([1 << 40, 16])},
        "bnb": four_bits(b'{"shape": [1048576, 1048576], "blocksize": 1099511627776}'),
        "bnb block": four_bits(b'{"shape": [4, 4], "blocksize": 0}'),
        "bnb state": four_bits(b"{"),
        "hqq": {"W_q": ones(8, 2, dtype=torch.uint8), "scale": torch.ones(1), "shape": torch.tensor([-4, 4])},
        "lora alone": {"lora_A.weight": torch.ones(2, 16)},
        "lora misfit": {"lora_A.weight": torch.ones(2, 16), "lora_B.weight": torch.ones(16, 3)},
        "lora empty": {"lora_A.weight": torch.ones(0, 16), "lora_B.weight": torch.ones(16, 0)},
        "weight norm": {"parametrizations.weight.original0": torch.zeros(3, 1), "parametrizations.weight.original1": torch.zeros(4, 16)},
    }.items():  # fmt: skip
        full = {f"model.layers.{i}.self_attn.q_proj.{end}": tensor.clone() for i in range(2) for end, tensor in tensors.items()}
        yield f"layout: {name}", file("model.safetensors", save(full), CONFIG)


def strange_folders() -> Iterator[Odd]:
    def of(*steps: Callable[[Path], object], open_: str = "") -> Callable[[Path], Path]:
        def write(folder: Path) -> Path:
            for step in steps:
                step(folder)
            return folder / open_

        return write

    data, index = save(model()), "model.safetensors.index.json"
    yield "folder: empty", of()
    yield "folder: gone", of(open_="nowhere")
    yield "folder: a pipe", of(lambda f: os.mkfifo(f / "model.safetensors"))
    yield "file: a pipe", of(lambda f: os.mkfifo(f / "model.bin"), open_="model.bin")
    yield "folder: config a pipe", of(file("model.safetensors", data), lambda f: os.mkfifo(f / "config.json"))
    yield "folder: a link to nothing", of(lambda f: (f / "model.safetensors").symlink_to("gone"))
    yield "file: a link to nothing", of(lambda f: (f / "model.gguf").symlink_to("gone"), open_="model.gguf")
    yield "folder: a link to itself", of(lambda f: (f / "model.safetensors").symlink_to("model.safetensors"))
    yield "folder: config a link to nothing", of(file("model.safetensors", data), lambda f: (f / "config.json").symlink_to("gone"))
    yield "folder: weights a folder", of(lambda f: (f / "model.safetensors").mkdir())
    yield "folder: config a folder", of(file("model.safetensors", data), lambda f: (f / "config.json").mkdir())
    yield "file: a device", lambda folder: Path("/dev/zero")
    for text in ("", "{}", '{"weight_map": []}', '{"weight_map": {}}', '{"weight_map": {"a": "../x"}}', '{"weight_map": {"a": "\\u0000"}}',
                 '{"weight_map": {"a": "model.safetensors"}}', "[" * 100_000, '{"weight_map": {"a": "' + "n" * 5000 + '"}}'):  # fmt: skip
        yield f"index: {text[:30]!r}", of(file("model.safetensors", data), file(index, text.encode()))
    yield "shards: some", of(file("model-00001-of-00003.safetensors", data), file("model-00003-of-00003.safetensors", data))
    yield "shards: a number too large", of(file("model-00001-of-99999.safetensors", data), file("model-00002-of-99999.safetensors", data))
    yield "run: no checkpoint", of(file("recipe.json", b"{}"), lambda f: (f / "checkpoints").mkdir())
    yield "run: an empty checkpoint", of(file("recipe.json", b"{}"), lambda f: (f / "checkpoints" / "step-00000001").mkdir(parents=True))
    yield "adapter: config a list", of(file("adapter_model.safetensors", data), file("adapter_config.json", b"[]"))
    for metadata in (b"", b"\x80\x04.", pickle.dumps({"a": 1}), b"cos\nsystem\n(S'true'\ntR.", pickle.dumps(3)):
        yield f"dcp: {metadata[:9]!r}", of(file(".metadata", metadata), file("__0_0.distcp", b"x"))
    kinds = {
        "page": b"<html>", "404": b"<!DOCTYPE html><html>404</html>", "pointer": b"version https://git-lfs.github.com/spec/v1\n",
        "gzip": b"\x1f\x8b" + bytes(30), "nothing": b"", "safetensors": data, "torch": as_torch({"a": torch.ones(2)}), "gguf": as_gguf(),
    }  # fmt: skip
    for suffix in (".safetensors", ".bin", ".pt", ".gguf", ".json", ".onnx", ".h5", ".txt", ""):
        for name, start in kinds.items():
            if suffix in (".safetensors", ".bin", ".gguf") or name in ("nothing", "torch"):
                yield f"{name} as {suffix}", of(file(f"model{suffix}", start), open_=f"model{suffix}")


def odd_files() -> list[Odd]:
    known = [*strange_safetensors(), *strange_torch(), *strange_gguf(), *strange_settings(), *strange_folders()]
    bases = {
        "safetensors": ("model.safetensors", save(model())), "torch": ("pytorch_model.bin", as_torch(model())),
        "old torch": ("pytorch_model.bin", as_torch(model(), _use_new_zipfile_serialization=False)), "gguf": ("model.gguf", as_gguf()),
        "fp8": ("model.safetensors", save(model(lambda t: t.to(torch.float8_e4m3fn)) | {f"{n}_scale": torch.ones(1) for n in model()})),
    }  # fmt: skip
    rest = [odd for seed, (kind, (name, data)) in enumerate(bases.items()) for odd in damaged(kind, name, data, 24, seed)]
    return known + rest


@contextlib.contextmanager
def limited(seconds: int):
    def late(*_):
        raise TimeoutError(f"more than {seconds} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def tried(odds: list[Odd], folder: Path) -> tuple[list[str], int]:
    """What went wrong, and how many were read."""
    wrong, read = [], 0
    for number, (name, write) in enumerate(odds):
        place = folder / str(number)
        place.mkdir()
        path = write(place) or place
        size = path.stat().st_size if path.is_file() else 0
        before = peak()
        try:
            with limited(LIMIT):
                report = inspect(path, k=2)
                json.dumps(report.to_dict(), allow_nan=False)
                read += 1
        except UserError as error:
            if len(printable(str(error))) > 6000 or not str(error):
                wrong.append(f"{name}: a message of {len(str(error))} characters")
        except BaseException as error:
            wrong.append(f"{name}: {type(error).__name__}: {str(error)[:150]}")
        if peak() - before > ROOM + size:
            wrong.append(f"{name}: {(peak() - before) >> 20} MB")
    return wrong, read


def test_all_of_them(tmp_path):
    odds = odd_files()
    assert len(odds) >= 300 and len({name for name, _ in odds}) == len(odds)
    wrong, read = tried(odds, tmp_path)
    assert wrong == [] and 20 < read < len(odds) - 100


def test_the_base_files_themselves_are_read(tmp_path):
    for name, data in {"model.safetensors": save(model()), "model.bin": as_torch(model()), "model.gguf": as_gguf()}.items():
        (tmp_path / name).write_bytes(data)
        assert inspect(tmp_path / name, k=2, config=CONFIG).rows
    save_file(model(), tmp_path / "x.safetensors")


def test_no_permission(tmp_path, monkeypatch):
    """As root everything may be read: the system's answer is put in its place."""
    save_file(model(), path := tmp_path / "model.safetensors")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(UserError, match="model.safetensors: no permission to read it"):
        inspect(path)
    monkeypatch.setattr(Path, "iterdir", lambda self: (_ for _ in ()).throw(PermissionError(13, "Permission denied", str(self))))
    with pytest.raises(UserError, match="Permission denied. See who may read"):
        inspect(tmp_path)
