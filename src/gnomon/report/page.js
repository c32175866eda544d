// Draws every chart in the colours of the reader's light or dark setting, and again when that changes.
"use strict";
const dark = window.matchMedia("(prefers-color-scheme: dark)");
const themes = JSON.parse(document.getElementById("themes").textContent);
const drawn = new Map();

// The page keeps rows without repeating their keys.
function unpack({ columns, rows }) {
  return { values: rows.map((row) => Object.fromEntries(columns.map((column, i) => [column, row[i]]))) };
}

async function draw(figure) {
  const place = figure.querySelector(".chart");
  place.textContent = "";
  const spec = JSON.parse(figure.querySelector("script").textContent);
  if (spec.data?.columns) spec.data = unpack(spec.data);
  drawn.get(figure)?.finalize();
  try {
    const result = await vegaEmbed(place, spec, {
      mode: "vega-lite",
      // The expression interpreter: the page's policy forbids code made from strings.
      ast: true,
      config: dark.matches ? themes.dark : themes.light,
      renderer: "canvas",
      tooltip: { theme: dark.matches ? "dark" : "light" },
      actions: { export: true, source: false, compiled: false, editor: false },
      downloadFileName: figure.dataset.name,
    });
    drawn.set(figure, result);
  } catch (error) {
    place.textContent = `This chart could not be drawn: ${error.message}`;
    place.classList.add("failed");
  }
  place.dataset.theme = dark.matches ? "dark" : "light";
}

async function drawAll() {
  for (const figure of document.querySelectorAll("figure")) await draw(figure);
}

dark.addEventListener("change", drawAll);
drawAll();
