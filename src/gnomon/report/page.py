"""One report as one HTML file that needs no network: text, tables, charts, facts and flags, as they come."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gnomon.files import atomic, flatten
from gnomon.report import tables
from gnomon.report.chart_parts import need
from gnomon.report.theme import theme

_HERE = Path(__file__).parent


class Page:
    """Collects blocks and writes them as a page. Every method that adds returns the page itself.

    >>> page = Page("Pre-LN against the sphere")
    >>> page.section("Loss").text("Both runs saw the **same** batches.")
    >>> page.chart(curves(rows, "tokens", "loss", "run"), "Lower is better.")
    >>> page.write("report.html")

    All text is escaped: nothing a caller passes in becomes markup or script. With `refresh` a browser that has the page open
    reads it anew every so many seconds.
    """

    def __init__(self, title: str, subtitle: str = "", refresh: int = 0):
        self.refresh = refresh
        self.title: str = title
        self.subtitle: str = subtitle
        self._sections: list[dict[str, Any]] = [{"title": "", "id": "top", "blocks": []}]
        self._figures: dict[str, dict] = {}

    def section(self, title: str) -> Page:
        """Start a section; with more than four of them the page gets a table of contents."""
        place = _slug(title, "section", [section["id"] for section in self._sections])
        self._sections.append({"title": title, "id": place, "blocks": []})
        return self

    def text(self, text: str) -> Page:
        """Paragraphs parted by empty lines, with `**bold**`, `*italic*` and `` `code` ``.

        Lines that all start with `- ` make a list; a line `## Title` starts a section, as `section` does.
        """
        for paragraph in re.split(r"\n\s*\n", text.strip()):
            first, _, rest = paragraph.partition("\n")
            if first.startswith("## "):
                self.section(first[3:].strip())
                paragraph = rest
            lines = [line.strip() for line in paragraph.splitlines()]
            if lines and all(line.startswith("- ") for line in lines):
                self._add("list", items=[_spans(line[2:]) for line in lines])
            elif lines:
                self._add("text", spans=_spans(" ".join(lines)))
        return self

    def table(self, rows: Sequence[Mapping[str, Any]], columns: tables.Columns = None, title: str = "",
              formats: Mapping[str, tables.Format] | None = None, folded: bool = False) -> Page:
        """A table as `report.table` draws it; `folded` hides it behind its title until that is clicked."""
        head = tables.headers(rows, columns)
        body = tables.cells(rows, head, formats)
        return self._add("table", title=title, head=list(zip(head.values(), tables.rights(body, len(head)))),
                         body=body, folded=folded)

    def chart(self, chart: Any, caption: str = "", name: str = "", width: float = 1) -> Page:
        """An altair chart. `name` names its files; `width` is its share of the line (1, 1/2 or 1/3)."""
        spec = chart.to_dict(validate=False)  # tests check every kind of chart, see `unchecked`
        title = spec.get("title", "")
        title = title.get("text", "") if isinstance(title, dict) else title
        name = _slug(name or title or caption, "figure", self._figures)
        self._figures[name] = spec
        return self._add("chart", name=name, caption=_spans(caption), label=title or caption or name,
                         part="full" if width > 0.6 else "half" if width > 0.4 else "third")

    def facts(self, facts: Mapping[str, Any], title: str = "", folded: bool = False) -> Page:
        """Names and values; nested dicts are shown with dotted names."""
        rows = [(name, _shown(value)) for name, value in flatten(facts).items()]
        return self._add("facts", title=title, rows=rows, folded=folded)

    def flags(self, flags: Iterable[str | Mapping[str, Any]], title: str = "",
              level: str = "warning") -> Page:
        """A box of remarks: `level` is "error" (red), "warning" (amber) or "note". No remarks, no box."""
        items = [flag if isinstance(flag, str) else " · ".join(f"{key}: {_shown(flag[key])}" for key in flag)
                 for flag in flags]
        return self._add("flags", title=title, items=items, level=level) if items else self

    def write(self, path: str | os.PathLike[str], figures: bool = True) -> Path:
        """Write the page; with `figures` also PNG, SVG and CSV of every chart into `figures/` beside it.

        Raises:
            UserError: the extra `report` is not installed.
        """
        path = Path(path)
        text = self.html()
        with atomic(path, "w") as file:
            file.write(text)
        for name, spec in self._figures.items() if figures else ():
            _write_figure(path.parent / "figures" / name, spec)
        return path

    def html(self) -> str:
        """The whole page as text."""
        jinja = need("jinja2")
        environment = jinja.Environment(loader=jinja.FileSystemLoader(_HERE), autoescape=True,
                                        trim_blocks=True, lstrip_blocks=True)
        scripts = [_bundle(need("vl_convert"), _version()), _read("page.js")] if self._figures else []
        sections = [section for section in self._sections if section["title"] or section["blocks"]]
        named = [section for section in sections if section["title"]]
        clear = {mode: {**theme(mode == "dark"), "background": None} for mode in ("light", "dark")}
        return environment.get_template("page.html").render(
            title=self.title, subtitle=self.subtitle, sections=sections, refresh=self.refresh,
            contents=named if len(named) > 4 else [], style=_read("page.css"), scripts=scripts,
            policy=_policy(scripts), themes=_json(clear),
            figures={name: _json(_for_page(spec)) for name, spec in self._figures.items()})

    def _add(self, kind: str, **block: Any) -> Page:
        self._sections[-1]["blocks"].append({"kind": kind, **block})
        return self


def _shown(value: Any) -> str:
    return tables.cells([{"value": value}], ["value"])[0][0].text


def _spans(text: str) -> list[tuple[str, str]]:
    """Text cut into (tag, text); the template escapes the text and writes the tag."""
    spans, end = [], 0
    for found in re.finditer(r"\*\*(?P<strong>[^*]+)\*\*|\*(?P<em>[^*\s][^*]*)\*|`(?P<code>[^`]+)`", text):
        tag = str(found.lastgroup)
        spans += [("", text[end : found.start()]), (tag, found[tag])]
        end = found.end()
    return [span for span in [*spans, ("", text[end:])] if span[1]]


def _slug(text: str, otherwise: str, taken: Collection[str]) -> str:
    """A name for a file or an anchor, unlike those `taken`."""
    slug = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:60] or otherwise
    number = 2
    name = slug
    while name in taken:
        name, number = f"{slug}-{number}", number + 1
    return name


def _read(name: str) -> str:
    return (_HERE / name).read_text("utf-8")


def _policy(scripts: Iterable[str]) -> str:
    """A Content-Security-Policy by which the browser runs these scripts, no other, and fetches nothing."""
    digests = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    allowed = " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"
    return (f"default-src 'none'; script-src {allowed}; style-src 'unsafe-inline'; img-src data: blob:; "
            "base-uri 'none'; form-action 'none'")


def _version() -> str:
    """The Vega-Lite version that altair writes, as vl-convert names it: `6.4`."""
    return ".".join(need("altair").SCHEMA_VERSION.lstrip("v").split(".")[:2])


@functools.cache
def _bundle(vl_convert: Any, version: str) -> str:
    """Vega and Vega-Lite as one script, which takes vl-convert a second to put together."""
    return vl_convert.javascript_bundle(vl_version=version)


def _json(value: Any) -> str:
    """JSON that may stand inside a script element: no `<`, no NaN.

    Numbers that are not finite become null here and are not `spelled`: Vega leaves a null out, and would draw a word.
    """
    finite = json.loads(json.dumps(value), parse_constant=lambda _: None)
    return json.dumps(finite, separators=(",", ":")).replace("<", "\\u003c")


def _for_page(spec: dict) -> dict:
    """The chart as the page keeps it: colours left to the page, width to the reader's window, rows packed."""
    spec = dict(spec)
    if spec.get("usermeta", {}).get("theme") == "gnomon":
        del spec["config"]
    if isinstance(spec.get("width"), (int, float)):
        spec["width"] = "container"
    rows = list(_rows(spec))
    if rows and "datasets" not in spec:
        columns = list(dict.fromkeys(key for row in rows for key in row))
        spec["data"] = {"columns": columns, "rows": [[row.get(key) for key in columns] for row in rows]}
    return spec


def _rows(spec: dict) -> Iterator[dict]:
    """The rows a chart draws: JSON in our charts, lists of dicts or named sets in those made elsewhere."""
    values = spec.get("data", {}).get("values", ())
    yield from json.loads(values) if isinstance(values, str) else values
    for dataset in spec.get("datasets", {}).values():
        yield from dataset


def _write_figure(stem: Path, spec: dict) -> None:
    vl_convert = need("vl_convert")
    svg = vl_convert.vegalite_to_svg(spec, vl_version=_version())
    with atomic(stem.with_name(f"{stem.name}.svg"), "w") as file:
        file.write(svg)
    with atomic(stem.with_name(f"{stem.name}.png")) as file:
        file.write(vl_convert.svg_to_png(svg, scale=2))
    tables.csv(stem.with_name(f"{stem.name}.csv"), list(_rows(spec)))
