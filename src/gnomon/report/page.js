// Draws the charts in the colours of the reader's light or dark setting, and anew when a choice changes what is drawn.
// A chart says in `usermeta` what may be chosen: what lies along x, a logarithmic y, how far a mean reaches, which series.
"use strict";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const themes = JSON.parse(document.getElementById("themes").textContent);
const controls = document.getElementById("controls");
const figures = [...document.querySelectorAll("figure")].map((element) => ({ element, log: null, ...read(element) }));
const shared = { x: "", at: null };
const remembered = `gnomon ${location.pathname}`;
const SMOOTHING = [0, 0.005, 0.015, 0.03, 0.06, 0.12];

// The page keeps rows without repeating their keys.
function read(element) {
  const spec = JSON.parse(element.querySelector("script").textContent);
  const { columns, rows } = spec.data ?? {};
  if (columns) spec.data = { values: rows.map((row) => Object.fromEntries(columns.map((column, i) => [column, row[i]]))) };
  return { spec, meta: spec.usermeta ?? {} };
}

function choices() {
  return {
    x: controls.elements.x.value,
    logx: controls.elements.logx.checked,
    smooth: controls.elements.smooth.value === "" ? null : SMOOTHING[controls.elements.smooth.value],
    hidden: [...controls.querySelectorAll("#series input:not(:checked)")].map((box) => box.value),
  };
}

function encodings({ encoding = {}, layer = [] }) {
  return [encoding, ...layer.flatMap(encodings)];
}

const largest = (rows, field) => rows.reduce((most, row) => Math.max(most, row[field]), 1);

// Runs begin at 0, which has no logarithm: this scale is linear up to 1.
function logarithmic({ scale, axis }, most) {
  const steps = most < 100 ? [1, 2, 5] : [1];
  const ticks = [0, ...Array.from({ length: Math.floor(Math.log10(most)) + 1 }, (_, i) => steps.map((step) => step * 10 ** i)).flat()];
  return { scale: { ...scale, type: "symlog" }, axis: { ...axis, values: ticks } };
}

// The chart as chosen: a copy in which a few fields are exchanged, so that Vega-Lite does the rest.
function chosen({ spec, meta, log }, { x, logx, smooth, hidden }, width) {
  const { data, ...rest } = spec;
  const copy = { ...structuredClone(rest), data };
  if (meta.series && hidden.length) {
    const shown = { not: { field: meta.series, oneOf: hidden } };
    copy.transform = [{ filter: shown }, ...(copy.transform ?? [])];
  }
  if (!meta.x) return copy;
  const along = meta.x.find(({ field }) => field === x) ?? meta.x[0];
  for (const step of copy.transform) {
    if (step.as === "along") step.calculate = `datum[${JSON.stringify(along.field)}]`;
    if (step.window && smooth !== null) {
      const frame = Math.round(smooth * meta.points);
      step.frame = [-frame, frame];
      step.window[0].field = frame ? meta.mean : meta.raw;
      copy.layer.find((layer) => layer.name === "raw").mark.opacity = frame ? 0.28 : 0;
    }
  }
  for (const encoding of encodings(copy)) {
    for (const { legend } of [encoding.color ?? {}, encoding.strokeDash ?? {}]) {
      if (legend?.columns) legend.columns = Math.max(1, Math.floor((legend.columns * width) / meta.width));
    }
    if (encoding.x?.field === "along") {
      encoding.x.title = along.title;
      if (logx && meta.x.length > 1) Object.assign(encoding.x, logarithmic(encoding.x, largest(data.values, along.field)));
    }
    if (encoding.y?.field && log !== null) Object.assign(encoding.y, meta.y[log ? "log" : "linear"]);
  }
  return copy;
}

async function draw(figure) {
  const { element, meta } = figure;
  const place = element.querySelector(".chart");
  try {
    const now = choices();
    const { view } = await vegaEmbed(place, chosen(figure, now, place.clientWidth), {
      mode: "vega-lite",
      // The expression interpreter: the page's policy forbids code made from strings.
      ast: true,
      config: dark.matches ? themes.dark : themes.light,
      renderer: "svg",
      tooltip: { theme: dark.matches ? "dark" : "light" },
      actions: false,
      patch: followPointer,
    });
    figure.view?.finalize();
    figure.view = view;
    figure.along = meta.x && (meta.x.find(({ field }) => field === now.x) ?? meta.x[0]).field;
    if (meta.x) view.addSignalListener("at", (_, at) => link(figure, at));
  } catch (error) {
    place.textContent = `This chart could not be drawn: ${error.message}`;
    place.classList.add("failed");
  }
  place.dataset.theme = dark.matches ? "dark" : "light";
}

// A parameter of Vega-Lite follows no events; the signal that it becomes can.
function followPointer(vega) {
  const cursor = vega.signals?.find(({ name }) => name === "at");
  if (cursor) cursor.on = [{ events: "pointermove", update: "clamp(x(), 0, width) === x() ? invert('x', x()) : null" }];
  return vega;
}

// The cursor stands in all charts over the same x.
function link(from, at) {
  if (at === shared.at && from.along === shared.x) return;
  if (shared.x && from.along !== shared.x) setCursor(shared.x, null, from);
  Object.assign(shared, { x: from.along, at });
  setCursor(from.along, at, from);
}

function setCursor(x, at, except) {
  for (const figure of figures) {
    if (figure !== except && figure.along === x && figure.visible) figure.view?.signal("at", at).runAsync();
  }
}

let round = 0;
async function drawAll() {
  const mine = ++round;
  delete document.documentElement.dataset.drawn;
  for (const figure of [...figures.filter((f) => f.visible), ...figures.filter((f) => !f.visible)]) {
    if (mine !== round) return;
    await draw(figure);
    // Let the reader scroll and click in between.
    await new Promise((go) => setTimeout(go));
  }
  document.documentElement.dataset.drawn = figures.length;
}

// ---- what the reader can do ----------------------------------------------------------------------------------------

function rows(figure) {
  const all = figure.spec.data?.values ?? Object.values(figure.spec.datasets ?? {}).flat();
  const columns = [...new Set(all.flatMap(Object.keys))];
  return [columns, ...all.map((row) => columns.map((column) => row[column] ?? ""))];
}

const quoted = (value) => (/[",\n]/.test(value) ? `"${String(value).replaceAll('"', '""')}"` : value);
const joined = (lines, by, how = String) => lines.map((line) => line.map(how).join(by)).join("\n") + "\n";

function save(name, url) {
  Object.assign(document.createElement("a"), { href: url, download: name }).click();
}

async function copy(text, button) {
  const said = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = "the browser forbids it";
  }
  setTimeout(() => (button.textContent = said), 1500);
}

const doing = {
  copy: (figure, button) => copy(joined(rows(figure), "\t"), button),
  csv: (figure) => save(`${figure.element.dataset.name}.csv`, URL.createObjectURL(new Blob([joined(rows(figure), ",", quoted)]))),
  svg: async (figure) => save(`${figure.element.dataset.name}.svg`, await figure.view.toImageURL("svg")),
  png: async (figure) => save(`${figure.element.dataset.name}.png`, await figure.view.toImageURL("png", 2)),
  log: (figure, button) => {
    figure.log = !(figure.log ?? figure.meta.log);
    button.setAttribute("aria-pressed", figure.log);
    draw(figure);
  },
};

for (const figure of figures) {
  const { element, meta } = figure;
  for (const button of element.querySelectorAll("[data-do]")) {
    if (button.dataset.do === "log") {
      button.hidden = !meta.y?.log;
      button.setAttribute("aria-pressed", Boolean(meta.log));
    }
    button.addEventListener("click", () => doing[button.dataset.do](figure, button));
  }
  const chart = element.querySelector(".chart");
  if (!meta.x) continue;
  chart.tabIndex = 0;
  chart.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1, Escape: 0 }[event.key];
    if (by === undefined || !figure.view) return;
    event.preventDefault();
    const places = [...new Set(figure.spec.data.values.map((row) => row[figure.along]))].sort((a, b) => a - b);
    const here = figure.view.signal("at");
    const next = by > 0 ? places.findIndex((x) => here === null || x > here) : places.findLastIndex((x) => here === null || x < here);
    figure.view.signal("at", by && next >= 0 ? places[next] : by ? here : null).runAsync();
  });
  for (const end of ["pointerleave", "blur"]) chart.addEventListener(end, () => figure.view?.signal("at", null).runAsync());
}

for (const table of document.querySelectorAll(".scroll > table")) {
  const button = Object.assign(document.createElement("button"), { type: "button", className: "tool", textContent: "copy table" });
  const lines = () => [...table.rows].map((row) => [...row.cells].map((cell) => cell.textContent.trim()));
  button.addEventListener("click", () => copy(joined(lines(), "\t"), button));
  table.parentElement.after(button);
}

function setUpControls() {
  const metas = figures.map(({ meta }) => meta);
  const axes = new Map(metas.filter(({ x }) => x?.length > 1).flatMap(({ x }) => x.map(({ field, title }) => [field, title])));
  controls.elements.x.append(...[...axes].map(([field, title]) => new Option(title, field)));
  const series = new Set(figures.filter(({ meta }) => meta.series === "run").flatMap(({ spec }) => spec.data.values.map((row) => row.run)));
  for (const name of series) {
    const label = document.createElement("label");
    label.append(Object.assign(document.createElement("input"), { type: "checkbox", value: name, checked: true }), ` ${name}`);
    document.getElementById("series").append(label);
  }
  document.getElementById("series").hidden = series.size < 2;
  for (const [name, useful] of [["x", axes.size > 1], ["logx", axes.size > 1], ["smooth", metas.some(({ points }) => points > 50)]]) {
    controls.elements[name].closest("label").hidden = !useful;
  }
  controls.hidden = !controls.querySelector("label:not([hidden]), fieldset:not([hidden])");
  const before = JSON.parse(sessionStorage.getItem(remembered) ?? "{}");
  if (axes.has(before.x)) controls.elements.x.value = before.x;
  controls.elements.logx.checked = before.logx;
  if (before.smooth != null) controls.elements.smooth.value = SMOOTHING.indexOf(before.smooth);
  for (const box of controls.querySelectorAll("#series input")) box.checked = !before.hidden?.includes(box.value);
  controls.addEventListener("change", () => {
    sessionStorage.setItem(remembered, JSON.stringify(choices()));
    drawAll();
  });
}

setUpControls();
const watcher = new IntersectionObserver((entries) => {
  for (const { target, isIntersecting } of entries) figures.find(({ element }) => element === target).visible = isIntersecting;
  if (!round) drawAll();
}, { rootMargin: "200px" });
for (const { element } of figures) watcher.observe(element);
dark.addEventListener("change", drawAll);
