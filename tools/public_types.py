"""What an editor is told of gnomon's names: the type of each is known, or stands here with the reason. `make lint` runs it.

    python tools/public_types.py

It reads what `pyright --verifytypes` says of every module of the package, rooms and what lies below them alike.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
# Beginnings of names whose types are left open, and why.
OPEN = {
    "gnomon.models.hf.": "attributes that transformers types, or makes of the config, itself",
}


def symbols() -> list[dict]:
    """Every symbol of the package, as pyright's JSON has it. Pyright looks for packages where the first `python` of the path does."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    command = [sys.executable, "-m", "pyright", "--verifytypes", "gnomon", "--ignoreexternal", "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT / "src")})
    try:
        found = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    except (ValueError, KeyError):
        sys.exit(f"pyright gave no answer ({done.returncode}):\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    return [symbol for symbol in found if symbol["isExported"]]


def left_open(symbol: dict) -> bool:
    return not symbol["isTypeKnown"] or symbol["isTypeAmbiguous"]


def main() -> None:
    found = symbols()
    wrong = [symbol for symbol in found if left_open(symbol) and not symbol["name"].startswith(tuple(OPEN))]
    for symbol in wrong:
        print(symbol["name"], *(f"\n    {said['message']}" for said in symbol["diagnostics"]))
    unused = [name for name in OPEN if not any(left_open(symbol) and symbol["name"].startswith(name) for symbol in found)]
    excused = sum(map(left_open, found)) - len(wrong)
    print(f"{len(found)} public symbols, {len(wrong)} without a known type, {excused} left open for a reason")
    if wrong or unused or len(found) < 1000:
        sys.exit(f"public_types: {len(wrong)} to write down; no longer open: {unused}")


if __name__ == "__main__":
    main()
