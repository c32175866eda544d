"""Build wheel and sdist, look into them, and use them as a stranger would: `make release-check`.

Environments are new ones, one for every Python from 3.11 on that this computer has. The core is tried in each; extras in the first, each
alone: its environment lies on top of the core's. `--torch 2.9.1` tries another torch than that of constraints.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
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
    "eval": ["eval", "run", "--tasks", "lines", "--task-path", "tasks"],
    "track": ["train", "tiny", "--out", "tracked", "--steps", "1", "--sink", "tensorboard"],
}
MINORS = range(11, 15)
# A task of lm_eval that needs no network.
TASK = """
task: lines
dataset_path: json
dataset_kwargs: {data_files: {validation: DATA}}
output_type: loglikelihood_rolling
validation_split: validation
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}]
"""
SMALL = ["--set", "model.layers=2", "model.width=32", "model.heads=2", "model.context=32", "data.batch=4"]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--extras", nargs="*", default=list(WORKS), help="which to try")
    options.add_argument("--python", nargs="*", default=pythons(), help="the Pythons of the environments")
    options.add_argument("--torch", help="a version of torch; else that of constraints.txt")
    chosen = options.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        place = Path(temporary)
        pinned = constraints(place / "constraints.txt", chosen.torch)
        wheel, sdist = build(place / "dist")
        look_into(wheel, sdist)
        for number, python in enumerate(chosen.python):
            here = place / f"python{number}"
            core = environment(here / "core", python)
            pip(core, str(wheel), "--constraint", str(pinned))
            print(f"core with {version_of(core)}")
            try_core(core, here)
            for extra in chosen.extras if number == 0 else ():
                try_extra(extra, core, wheel, here, python, pinned)
    missing = [f"3.{minor}" for minor in MINORS if not any(f"3.{minor}" in version_of(python) for python in chosen.python)]
    print("release-check: all well" + f"; not tried, as it is not here: Python {', '.join(missing)}" * bool(missing))


def pythons() -> list[str]:
    """This one, and one of each other version: on the path, or among pyenv's, which puts names on the path for which nothing stands."""
    found = {sys.version_info.minor: sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for minor in MINORS:
        for other in (shutil.which(f"python3.{minor}"), *map(str, pyenv.glob(f"3.{minor}.*/bin/python"))):
            if other is not None and subprocess.run([other, "--version"], capture_output=True).returncode == 0:
                found.setdefault(minor, other)
    return list(found.values())


def version_of(python: str | Path) -> str:
    """Python's version, and torch's where it is installed."""
    code = ("import sys, importlib.metadata as m; found = [d.version for d in m.distributions() if d.name == 'torch']; "
            "print('Python', sys.version.split()[0], *('torch ' + version for version in found[:1]))")
    return subprocess.check_output([str(python), "-c", code], text=True, env=clean()).strip()


def constraints(path: Path, torch: str | None) -> Path:
    """constraints.txt, with another torch if one is asked for."""
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    path.write_text("\n".join(f"torch=={torch}" if torch and line.startswith("torch==") else line for line in lines) + "\n")
    return path


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
    told = gnomon(python, place, "train", "tiny", "--steps", "20", "--out", "run", *SMALL)
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


def try_extra(extra: str, core: Path, wheel: Path, place: Path, base: str, pinned: Path) -> None:
    """An environment of this extra alone, on top of the core's."""
    python = environment(place / extra, base)
    inside, below = (subprocess.check_output([str(one), "-c", "import site; print(site.getsitepackages()[0])"], text=True).strip()
                     for one in (python, core))
    (Path(inside) / "core.pth").write_text(below + "\n")
    pip(python, f"gnomon[{extra}] @ {wheel.as_uri()}", "--constraint", str(pinned))
    (place / "text.txt").write_text("Some words. " * 2000)
    (place / "tasks").mkdir(exist_ok=True)
    (place / "lines.jsonl").write_text('{"text": "Some words."}\n')
    (place / "tasks/lines.yaml").write_text(TASK.replace("DATA", json.dumps(str(place / "lines.jsonl"))))
    gnomon(python, place, *WORKS[extra], *(SMALL if WORKS[extra][0] == "train" else ()))
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
