// The grid: samples with the heatmap of one class over each, filtered and sorted by the server.

import { MEANING, address, ask, badges, change, el, go, kind, link, plain, state, thumbnail } from "./dom.js";
import { bytes, paint } from "./heat.js";

export const KEYS = {
  "← → ↑ ↓": "move in the grid", "Enter": "open a sample", "] [": "next and previous page", "/": "filter by key",
  "h": "heat on and off",
};
const COUNT = 24;
const SORTS = {
  surprise: "surprise: unnamed and hot",
  change: "change since the last snapshot",
  heat: "scores against heatmaps",
  against: "disagreement of two runs",
  score: "score",
  row: "as in the shards",
};
export const FILTERS = ["sort", "class", "annotated", "expected", "present", "low", "high", "key", "reverse"];
let total = 0;
let waiting = null;

export const query = (values) => Object.fromEntries(FILTERS.map((name) => [name, values[name]]));

export async function show({ state: values, run, number }) {
  const offset = Number(values.offset ?? 0) || 0;
  const asked = { ...query(values), run: number, against: values.against, offset, count: COUNT };
  const found = await ask("samples", asked);
  total = found.total;
  clearTimeout(waiting);
  if (found.pending) waiting = setTimeout(() => dispatchEvent(new Event("state")), 2000);
  prefetch(asked, run);
  const tiles = found.items.map((one, place) => tile(one, run, number, offset + place));
  return el("section", { className: "samples" },
    filters(values, run),
    el("p", { className: "summary" }, summary(run), legend(run)),
    run.note ? el("p", { className: "faint" }, run.note) : null,
    el("div", { className: `grid ${values.heat === "no" ? "cold" : ""}`, id: "grid" }, tiles),
    found.items.length ? null : el("p", { className: "empty" }, empty(found, run)),
    pages(offset));
}

function empty(found, run) {
  if (found.pending) return found.failure || "The runs are being compared.";
  return run.indexed === null ? "The index is being built." : "No sample matches.";
}

export function leave() {
  clearTimeout(waiting);
}

function summary(run) {
  const shown = `${plain(total)} of ${plain(run.samples)} samples`;
  return run.indexed === null ? shown : `${shown}, snapshot ${run.indexed}${run.indexed === run.shown ? "" : `; the run is at ${run.shown}`}`;
}

const legend = (run) =>
  el("span", { className: "legend" },
    ["annotated", ...(run.full_labels ? ["unannotated", "negative"] : ["unknown", "negative"])].map((one) =>
      el("span", {}, el("span", { className: `dot ${one}` }), MEANING[one])),
    el("span", {}, el("span", { className: "mark" }, "✓"), "expected"));

function tile(one, run, number, place) {
  const canvas = el("canvas");
  if (one.heat) paint(canvas, bytes(one.heat), run.side);
  return link({ page: "sample", row: one.row, focus: one.class, place }, undefined, { className: "tile", title: one.key },
    el("span", { className: "picture" },
      el("img", { src: thumbnail(number, one.row, 256, run.data), alt: "", decoding: "async" }), canvas),
    el("span", { className: `label ${kind(one)}` },
      badges(one), el("span", { className: "name" }, run.classes[one.class]), el("b", {}, one.score.toFixed(2))),
    el("span", { className: "key" }, one.key, one.change >= 0.005 ? el("span", { className: "moved" }, ` Δ ${one.change.toFixed(2)}`) : null));
}

// Filters

function filters(values, run) {
  const set = (changes) => go({ ...changes, offset: null });
  const choose = (name, label, options, fallback) =>
    el("label", {}, label, el("select", { name, onchange: (event) => set({ [name]: event.target.value }) },
      options.map(([value, text]) => el("option", { value, selected: value === (values[name] ?? fallback) }, text))));
  const usable = (sort) => (sort !== "against" || values.against) && (sort !== "change" || run.before !== null) && (sort !== "score" || values.class);
  const sorts = Object.entries(SORTS).filter(([sort]) => usable(sort) || sort === values.sort);
  const answers = [["", "any"], ["yes", "yes"], ["no", "no"]];
  const bound = (name, label) =>
    el("label", {}, label, el("input", {
      name, type: "number", min: 0, max: 1, step: 0.05, value: values[name] ?? "", placeholder: name === "low" ? "0" : "1",
      onchange: (event) => set({ [name]: event.target.value }),
    }));
  return el("form", { className: "filters", onsubmit: (event) => event.preventDefault() },
    choose("sort", "sort", sorts, "surprise"),
    choose("class", "class", [["", "any"], ...run.classes.map((name, one) => [String(one), name])], ""),
    choose("annotated", "annotated", answers, ""),
    choose("expected", "expected", answers, ""),
    run.full_labels ? choose("present", "really there", answers, "") : null,
    bound("low", "score from"), bound("high", "to"),
    el("label", {}, "key", el("input", { name: "key", id: "key", type: "search", value: values.key ?? "", onchange: (event) => set({ key: event.target.value }) })),
    el("label", { className: "check" }, el("input", {
      name: "reverse", type: "checkbox", checked: values.reverse === "yes",
      onchange: (event) => set({ reverse: event.target.checked ? "yes" : null }),
    }), "reversed"),
    Object.values(query(values)).some(Boolean) ? el("button", { type: "button", onclick: () => set(Object.fromEntries(FILTERS.map((name) => [name, null]))) }, "clear") : null);
}

// Pages

const places = (offset) => ({ previous: offset ? Math.max(0, offset - COUNT) : null, next: offset + COUNT < total ? offset + COUNT : null });

function pages(offset) {
  const { previous, next } = places(offset);
  const button = (target, text, title) =>
    target === null ? el("span", { className: "off" }, text) : link({ offset: target || null }, undefined, { title, className: "button" }, text);
  const last = Math.max(1, Math.ceil(total / COUNT));
  return el("nav", { className: "pages" }, button(previous, "‹ previous", "key ["), `page ${plain(offset / COUNT + 1)} of ${plain(last)}`, button(next, "next ›", "key ]"));
}

function prefetch(asked, run) {
  if (asked.offset + COUNT >= total) return;
  // The browser keeps these images, so that the next page is there at once.
  setTimeout(() => {
    if (state().page && state().page !== "samples") return;
    ask("samples", { ...asked, offset: asked.offset + COUNT })
      .then((found) => found.items.forEach((one) => { new Image().src = thumbnail(asked.run, one.row, 256, run.data); }))
      .catch(() => {});
  }, 400);
}

export function key(event) {
  const tiles = [...document.querySelectorAll(".tile")];
  const at = tiles.indexOf(document.activeElement);
  const offset = Number(state().offset ?? 0) || 0;
  const { previous, next } = places(offset);
  if (event.key === "]" && next !== null) go({ offset: next });
  else if (event.key === "[" && previous !== null) go({ offset: previous || null });
  else if (event.key === "/") document.getElementById("key")?.focus();
  else if (event.key === "h") {
    change({ heat: document.getElementById("grid").classList.toggle("cold") ? "no" : null });
    tiles.forEach((tile) => { tile.href = address({ heat: state().heat }, Object.fromEntries(new URL(tile.href).searchParams)); });
  }
  else if (event.key === "ArrowRight") tiles[Math.min(tiles.length - 1, at + 1)]?.focus();
  else if (event.key === "ArrowLeft") tiles[Math.max(0, at - 1)]?.focus();
  else if (event.key === "ArrowDown" || event.key === "ArrowUp") tiles[below(tiles, at, event.key === "ArrowDown")]?.focus();
  else return false;
  return true;
}

function below(tiles, at, down) {
  if (at < 0) return 0;
  const from = tiles[at].getBoundingClientRect();
  const rows = tiles.map((one, place) => ({ place, box: one.getBoundingClientRect() }))
    .filter(({ box }) => (down ? box.top > from.top + 5 : box.top < from.top - 5));
  const row = down ? Math.min(...rows.map(({ box }) => box.top)) : Math.max(...rows.map(({ box }) => box.top));
  const near = rows.filter(({ box }) => Math.abs(box.top - row) < 5)
    .sort((a, b) => Math.abs(a.box.left - from.left) - Math.abs(b.box.left - from.left));
  return near[0]?.place ?? at;
}
