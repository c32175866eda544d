"""Build wheel and sdist, look into them, and use them as a stranger would: `make release-check`.

Environments are new ones. The core's is installed once; that of an extra lies on top of it, so that each extra is tried alone.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LIMIT = 3_000_000
FORBIDDEN = re.compile(r"(^|/)(tests|runs|\.venv|__pycache__|\.git)/|\.pyc$|/work/|/home/")
# What a user of the core alone meets where an extra is missing: a command, and the name it must give.
MISSING = {
    "report": ["inspect", "run", "--html", "report.html"],
    "eval": ["eval", "run", "--tasks", "piqa"],
    "hf": ["export", "run", "out"],
    "track": ["train", "tiny", "--out", "other", "--steps", "1", "--sink", "tensorboard"],
}
WORKS = {
    "report": ["inspect", "run", "--html", "report.html"],
    "data": ["data", "text.txt", "tokens", "--tokenizer", "byte"],
    "hf": ["export", "run", "out"],
    "gguf": ["doctor"],
}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--extras", nargs="*", default=list(WORKS), help="which to try")
    options.add_argument("--python", default=sys.executable, help="the Python of the environments")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        wheel, sdist = build(place / "dist")
        look_into(wheel, sdist)
        core = environment(place / "core", chosen.python)
        pip(core, str(wheel), "--constraint", str(ROOT / "constraints.txt"))
        try_core(core, place)
        for extra in chosen.extras:
            try_extra(extra, core, wheel, place, chosen.python)
    print("release-check: all well")


def build(out: Path) -> tuple[Path, Path]:
    run(sys.executable, "-m", "build", "--outdir", str(out), str(ROOT))
    (wheel,), (sdist,) = out.glob("*.whl"), out.glob("*.tar.gz")
    return wheel, sdist


def look_into(wheel: Path, sdist: Path) -> None:
    """Names, sizes, metadata: everything of the package in it, nothing else."""
    names = zipfile.ZipFile(wheel).namelist()
    source = {str(path.relative_to(ROOT / "src")) for path in (ROOT / "src" / "gnomon").rglob("*") if path.is_file()}
    source = {name for name in source if "__pycache__" not in name}
    check(source <= set(names), f"the wheel lacks {sorted(source - set(names))[:5]}")
    check("gnomon/py.typed" in names, "the wheel does not say that it is typed")
    for archive, inside in ((wheel, names), (sdist, tarfile.open(sdist).getnames())):
        strange = [name for name in inside if FORBIDDEN.search(name) and not (archive == sdist and "/tests/" in name)]
        check(not strange, f"{archive.name} holds {strange[:5]}")
        size = archive.stat().st_size
        check(size < LIMIT, f"{archive.name} has {size:,} bytes; the limit is {LIMIT:,}")
        print(f"{archive.name}: {len(inside)} files, {size / 1e6:.2f} MB")
    metadata = next(name for name in names if name.endswith("METADATA"))
    text = zipfile.ZipFile(wheel).read(metadata).decode()
    version = re.search(r'__version__ = "(.+?)"', (ROOT / "src/gnomon/__init__.py").read_text())[1]
    check(f"\nVersion: {version}\n" in text, "the wheel has another version than the package")
    check(f"version: {version}\n" in (ROOT / "CITATION.cff").read_text(), "CITATION.cff has another version")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    check(all(f"Provides-Extra: {extra}" in text for extra in extras), "an extra is missing in the metadata")


def try_core(python: Path, place: Path) -> None:
    """Trains, measures, and names the extra where one is missing."""
    small = ["--set", "model.layers=2", "model.width=32", "model.heads=2", "model.context=32", "data.batch=4"]
    told = gnomon(python, place, "train", "tiny", "--steps", "20", "--out", "run", *small)
    check((place / "run/checkpoints/latest").exists() and "gnomon[report]" in told, f"no checkpoint, or no word on the report: {told}")
    gnomon(python, place, "inspect", "run", "--json", "report.json")
    gnomon(python, place, "doctor")
    for extra, command in MISSING.items():
        told = gnomon(python, place, *command, wanted=2)
        check(f"gnomon[{extra}]" in told, f"{command} does not name its extra: {told}")
        print(f"  without {extra}: {told.strip().splitlines()[-1][:110]}")
    for line in ("import gnomon; gnomon.ManifoldMuon; gnomon.inspect",
                 "import gnomon\ntry: gnomon.register()\nexcept gnomon.UserError as e: assert 'gnomon[hf]' in str(e)\n"
                 "else: raise SystemExit(1)"):
        run(str(python), "-c", line)


def try_extra(extra: str, core: Path, wheel: Path, place: Path, base: str) -> None:
    """An environment of this extra alone, on top of the core's."""
    python = environment(place / extra, base)
    inside, below = (subprocess.check_output([str(one), "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
                     for one in (python, core))
    (Path(inside) / "core.pth").write_text(below + "\n")
    pip(python, f"gnomon[{extra}] @ {wheel.as_uri()}", "--constraint", str(ROOT / "constraints.txt"))
    (place / "text.txt").write_text("Some words. " * 2000)
    gnomon(python, place, *WORKS[extra])
    print(f"  with {extra} alone: gnomon {' '.join(WORKS[extra])}")


def environment(folder: Path, base: str) -> Path:
    run(base, "-m", "venv", str(folder))
    return folder / "bin" / "python"


def pip(python: Path, *arguments: str) -> None:
    run(str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *arguments)


def gnomon(python: Path, place: Path, *arguments: str, wanted: int | None = 0) -> str:
    """Run a command in `place`; returns what it says."""
    done = subprocess.run([str(python), "-m", "gnomon", *arguments], cwd=place, capture_output=True, text=True, env=clean())
    told = done.stdout + done.stderr
    check("Traceback" not in told, f"gnomon {' '.join(arguments)} ended with a traceback:\n{told[-2000:]}")
    check(wanted is None or done.returncode == wanted, f"gnomon {' '.join(arguments)} ended with {done.returncode}:\n{told[-2000:]}")
    return told


def run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, env=clean())
    check(done.returncode == 0, f"{' '.join(command[:6])} failed:\n{done.stdout[-1000:]}{done.stderr[-2000:]}")


def clean() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}


def check(holds: bool, otherwise: str) -> None:
    if not holds:
        sys.exit(f"release-check: {otherwise}")


if __name__ == "__main__":
    main()
