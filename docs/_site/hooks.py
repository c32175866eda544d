"""What `make docs` adds to the guides: the reference from the docstrings, a page for each example, the papers at the root, equations
as MathML.

Everything is checked while it is built: a public name without a docstring, a room that the navigation forgets, or an equation
that cannot be rendered ends the build.
"""

from __future__ import annotations

import html
import importlib
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import latex2mathml.converter
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File

import gnomon

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "tools"))
import example_outputs  # noqa: E402

# Pages at the root of the repository, which people look for there.
AT_ROOT = {"ARCHITECTURE.md": "architecture.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md",
           "SECURITY.md": "security.md"}  # fmt: skip


def on_files(files: Any, config: Any) -> Any:
    """Add the pages that are written nowhere."""
    listed = {Path(page).stem for page in _pages(config["nav"]) if page.startswith("reference/")}
    if listed != {"gnomon", *gnomon._ROOMS}:
        raise PluginError(f"the navigation's reference pages and the rooms of gnomon differ: {listed ^ {'gnomon', *gnomon._ROOMS}}")
    for name in sorted(listed):
        content = _top() if name == "gnomon" else _room(name)
        files.append(File.generated(config, f"reference/{name}.md", content=content))
    for file in sorted(example_outputs.EXAMPLES.glob("*.py")):
        files.append(File.generated(config, f"examples/{file.stem}.md", content=_example(file)))
    for source, page in AT_ROOT.items():
        if (ROOT / source).exists():
            files.append(File.generated(config, page, content=(ROOT / source).read_text("utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Links that are right in the repository, made right on the site; and what stands beside a page."""
    here = page.file.src_uri
    # Code wants room: the first page has no pages beside it, an example no contents.
    if here == "index.md" or here.startswith("examples/"):
        page.meta["hide"] = ["navigation" if here == "index.md" else "toc"]
    if here in AT_ROOT.values():
        return re.sub(r"\]\(docs/", "](", markdown).replace("](LICENSE)", "](https://www.apache.org/licenses/LICENSE-2.0)")
    up = "../" * here.count("/")
    for source, target in AT_ROOT.items():
        markdown = markdown.replace(f"]({up}../{source}", f"]({up}{target}")
    return re.sub(rf"\]\({re.escape(up)}\.\./examples/(\w+)\.py\)", rf"]({up}examples/\1.md)", markdown)


def on_page_content(content: str, page: Any, **_: Any) -> str:
    """The equations that `arithmatex` found, as MathML, which browsers draw without a script or a font of ours."""
    def mathml(found: re.Match) -> str:
        source = html.unescape(found["tex"]).strip()
        block = source.startswith("\\[")
        try:
            return latex2mathml.converter.convert(source[2:-2].strip(), display="block" if block else "inline")
        except Exception as error:
            raise PluginError(f"{page.file.src_uri}: this equation cannot be rendered ({error!r}): {source}") from error

    content = re.sub(r'<(?P<tag>div|span) class="arithmatex">(?P<tex>.*?)</(?P=tag)>', mathml, content, flags=re.DOTALL)
    text = re.sub(r"<(pre|code|math)\b.*?</\1>", "", content, flags=re.DOTALL)
    if left := re.search(r"\$\$|\\\(|\\\[|\\frac|\\theta", text):
        raise PluginError(f"{page.file.src_uri} has an equation that is not rendered: …{text[left.start() : left.end() + 60]}…")
    return content


def _pages(nav: Any) -> list[str]:
    if isinstance(nav, str):
        return [nav]
    return [page for item in (nav.values() if isinstance(nav, dict) else nav) for page in _pages(item)]


def _top() -> str:
    """What `import gnomon` offers: rooms, and names taken from them."""
    rooms = [f"| [`gnomon.{room}`]({room}.md) | {_first_line(importlib.import_module(f'gnomon.{room}'))} |" for room in gnomon._ROOMS]
    names = []
    for name in gnomon.__all__:
        if name in gnomon._ROOMS or name.startswith("__"):
            continue
        found = getattr(gnomon, name)
        path = f"{found.__module__}.{found.__qualname__}"
        room = found.__module__.split(".")[1]
        names.append(f"| [`gnomon.{name}`]({room}.md#{path}) | {_first_line(found)} |" if room in gnomon._ROOMS
                     else f"| `gnomon.{name}` | {_first_line(found)} |")  # fmt: skip
    head = f"# gnomon\n\n{inspect.getdoc(gnomon)}\n\n"
    table = "| name | what it is |\n| --- | --- |\n"
    return f"{head}## Rooms\n\n{table}" + "\n".join(rooms) + f"\n\n## At hand\n\n{table}" + "\n".join(names) + "\n"


def _room(room: str) -> str:
    module = importlib.import_module(f"gnomon.{room}")
    parts = [f"# gnomon.{room}\n\n{_documented(module, f'gnomon.{room}')}\n"]
    for name in module.__all__:
        found = getattr(module, name)
        if isinstance(found, ModuleType):
            parts += [f"## gnomon.{room}.{name} {{ #gnomon.{room}.{name} }}\n", _documented(found, found.__name__) + "\n"]
            parts += [_entry(getattr(found, inside)) for inside in _public(found)]
        elif inspect.isclass(found) or inspect.isroutine(found) or hasattr(found, "__wrapped__"):
            parts.append(_entry(found))
        else:
            parts.append(f"## {name} {{ #gnomon.{room}.{name} }}\n\n```python\n{_value(found)}\n```\n")
    # What `import gnomon` has at hand from further down.
    at_hand = [getattr(gnomon, name) for name in gnomon.__all__ if not name.startswith("__") and name not in gnomon._ROOMS]
    further = [_entry(found) for found in at_hand if found.__module__.startswith(f"gnomon.{room}.")]
    return "\n".join([*parts, *(entry for entry in further if entry not in parts)])


def _example(file: Path) -> str:
    """What an example says of itself, what it printed and drew, and its code: the files themselves."""
    said, code = example_outputs.parts(file)
    title, _, text = said.partition(": ")
    kept = example_outputs.KEPT / f"{file.stem}.txt"
    if not kept.exists():
        raise PluginError(f"{file.name} has no output: python tools/example_outputs.py {file.stem}")
    made, _, printed = kept.read_text("utf-8").partition("\n")
    picture = f"![What it draws]({file.stem}.svg)\n\n" * kept.with_suffix(".svg").exists()
    return (
        f"# {title}\n\n{text[0].upper()}{text[1:]}\n\n## What it prints\n\n```text\n{printed}```\n\n{picture}"
        f"One run: {made.partition('; code')[0]}. Elsewhere the last digits differ.\n\n"
        f"## `examples/{file.name}`\n\n```python\n{code}```\n"
    )


def _public(module: ModuleType) -> list[str]:
    """Functions and classes that a module defines, in the order of the file."""
    if hasattr(module, "__all__"):
        return [name for name in module.__all__ if inspect.isclass(getattr(module, name)) or inspect.isroutine(getattr(module, name))]
    names = [name for name, found in vars(module).items()
             if not name.startswith("_") and getattr(found, "__module__", None) == module.__name__
             and (inspect.isclass(found) or callable(found))]  # fmt: skip
    return [name for name in names if hasattr(vars(module)[name], "__qualname__")]


def _entry(found: Any) -> str:
    path = f"{found.__module__}.{found.__qualname__}"
    _documented(found, path)
    return f"::: {path}\n"


def _documented(found: Any, path: str) -> str:
    text = inspect.getdoc(found) if not inspect.isclass(found) else found.__doc__
    if not text:
        raise PluginError(f"{path} is public and has no docstring")
    return inspect.cleandoc(text)


def _first_line(found: Any) -> str:
    return (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")


def _value(found: Any) -> str:
    return ", ".join(map(repr, found)) if isinstance(found, (dict, tuple, list, set, frozenset)) else repr(found)
