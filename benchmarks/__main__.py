"""`python -m benchmarks [NAME …]`: run the benchmarks and print one table each; all of them without a name."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

from gnomon import report

ALL = sorted(path.stem.removeprefix("bench_") for path in Path(__file__).parent.glob("bench_*.py"))


def main() -> None:
    for name in sys.argv[1:] or ALL:
        if name not in ALL:
            sys.exit(f"no benchmark {name!r}; there are: {', '.join(ALL)}")
        module = importlib.import_module(f"benchmarks.bench_{name}")
        print(f"\n{name}: {(module.__doc__ or '').strip()}\n")
        report.show(module.rows())


main()
