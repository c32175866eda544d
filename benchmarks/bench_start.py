"""How soon the command line answers: CPU seconds of `gnomon --help` as a process of its own, beside bare Python."""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys


def cpu_seconds(*command: str) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def rows() -> list[dict]:
    commands = {
        "python -c pass": (sys.executable, "-c", "pass"),
        "import gnomon": (sys.executable, "-c", "import gnomon"),
        "gnomon --help": (sys.executable, "-m", "gnomon", "--help"),
        "gnomon train --help": (sys.executable, "-m", "gnomon", "train", "--help"),
    }
    return [
        {
            "what": name,
            "CPU seconds": statistics.median(cpu_seconds(*command) for _ in range(7)),
            "target": {"gnomon --help": 0.15, "gnomon train --help": 0.25}.get(name),
        }
        for name, command in commands.items()
    ]


if __name__ == "__main__":
    from gnomon import report

    report.show(rows())
