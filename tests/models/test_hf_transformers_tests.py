"""transformers' own tests of models pass on our classes: those of the installed version, fetched and not copied.

They are not in the wheel. `GNOMON_TRANSFORMERS_TESTS` may name a checkout of transformers, in which all of them are; else the
source distribution is asked of the package index, which has the common tests of models and none of generation.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

transformers = pytest.importorskip("transformers")

CASES = Path(__file__).parents[1] / "transformers_cases.py"

# What the common tests import and the source distribution has not.
STAND_INS = {
    "__init__.py": "",
    "exporters/__init__.py": "",
    "exporters/test_export.py": "class ExportTesterMixin: pass",
    "generation/__init__.py": "",
    "generation/test_utils.py": "class GenerationTesterMixin: pass",
    "utils/__init__.py": "",
    "utils/test_configuration_utils.py": "config_common_kwargs = {}",
}


def pip(*arguments: object) -> None:
    done = subprocess.run([sys.executable, "-m", "pip", *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"pip {arguments[0]} {arguments[-1]}: {(done.stderr.strip() or 'failed').splitlines()[-1]}")


def fetch_tests(folder: Path) -> None:
    """Put transformers' `tests` into the folder."""
    checkout = os.environ.get("GNOMON_TRANSFORMERS_TESTS")
    if checkout:
        shutil.copytree(Path(checkout) / "tests", folder / "tests")
    else:
        wanted = f"transformers=={transformers.__version__}"
        pip("download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation", "-d", folder, wanted)
        with tarfile.open(next(folder.glob("transformers-*.tar.gz"))) as archive:
            inside = [member for member in archive if re.match(r"[^/]+/tests/", member.name)]
            archive.extractall(folder, inside, filter="data")
        shutil.move(next(folder.glob("transformers-*/tests")), folder / "tests")
    for name, text in STAND_INS.items():
        if not (folder / "tests" / name).exists():
            (folder / "tests" / name).parent.mkdir(exist_ok=True)
            (folder / "tests" / name).write_text(text)


@pytest.mark.slow
def test_their_tests_pass(tmp_path):
    fetch_tests(tmp_path)
    pip("install", "-q", "--no-deps", "--target", tmp_path / "packages", "parameterized")
    shutil.copy(CASES, tmp_path / "tests" / "test_gnomon.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    paths = [*filter(None, sys.path), str(tmp_path / "packages"), str(tmp_path)]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=short", "--disable-warnings", "tests/test_gnomon.py"],
        cwd=tmp_path, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join(paths)},
    )  # fmt: skip
    print(done.stdout[-20000:])
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    # 117 a case with the tests of generation, some 60 without.
    assert passed is not None and int(passed[1]) >= 5 * 50
