"""What this machine offers, and which fallbacks gnomon takes on it, each with its reason."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil

import torch

import gnomon


def findings() -> list[dict[str, str]]:
    """Rows of `what`, `found`, `means`."""
    rows = [
        ("gnomon", gnomon.__version__, ""),
        ("python", platform.python_version(), ""),
        ("torch", torch.__version__, ""),
        (
            "processors",
            f"{os.cpu_count()} ({torch.get_num_threads()} threads)",
            "set OMP_NUM_THREADS to share the machine",
        ),
        _device(),
        _bf16(),
        _compiler(),
        ("free disk here", f"{shutil.disk_usage('.').free / 1e9:.1f} GB", "checkpoints take about 12 bytes a weight"),
    ]
    return [dict(zip(("what", "found", "means"), row)) for row in (*rows, *_extras())]


def _extras() -> list[tuple[str, str, str]]:
    """One row for each extra that the installed package declares."""
    try:
        requirements = importlib.metadata.requires("gnomon") or []
    except importlib.metadata.PackageNotFoundError:
        return [("extras", "unknown: this gnomon is a folder, not an installed package", "pip install -e FOLDER")]
    extras: dict[str, list[str]] = {}
    for requirement in requirements:
        if found := re.match(r"([\w.-]+)[^;]*;.*\bextra == ['\"]([\w-]+)['\"]", requirement):
            extras.setdefault(found[2], []).append(found[1])
    rows = []
    for extra, packages in sorted(extras.items()):
        missing = [package for package in packages if not _is_installed(package)]
        rows.append((f"extra {extra}", "missing: " + ", ".join(missing) if missing else "installed",
                     f'pip install "gnomon[{extra}]"' if missing else ""))  # fmt: skip
    return rows


def _is_installed(package: str) -> bool:
    try:
        return bool(importlib.metadata.version(package))
    except importlib.metadata.PackageNotFoundError:
        return False


def _device() -> tuple[str, str, str]:
    if torch.cuda.is_available():
        return "device", torch.cuda.get_device_name(), "--device auto takes cuda"
    if torch.backends.mps.is_available():
        return "device", "Apple mps", "--device auto takes mps"
    why = "this torch is built without CUDA" if torch.version.cuda is None else "no CUDA device is visible"
    return "device", "cpu", f"--device auto takes cpu: {why}"


def _bf16() -> tuple[str, str, str]:
    if torch.cuda.is_available():
        there = torch.cuda.is_bf16_supported()
    else:
        capability = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)()
        there = bool(capability)
    return (
        "bf16 hardware",
        "yes" if there else "no",
        "" if there else "compute.precision=bf16 works but is emulated and slow",
    )


def _compiler() -> tuple[str, str, str]:
    if torch.cuda.is_available():
        there = importlib.util.find_spec("triton") is not None
        return "torch.compile", "triton" if there else "no triton", "" if there else "compute.compile=true will fail"
    found = next((c for c in (os.environ.get("CXX"), "g++", "clang++") if c and shutil.which(c)), None)
    return "torch.compile", found or "no C++ compiler", "" if found else "compute.compile=true needs g++ or clang++"
