// The grid: samples with the heatmap of one class over each, filtered and sorted by the server.

import { inOrder } from "./answers.js";
import { address, ask, change, el, go, link, picture, plain, remark, scrolls, state, thumbnail, url } from "./dom.js";
import { badges, bytes, given, kind, legend, paint } from "./marks.js";
import * as selection from "./selection.js";

export const KEYS = {
  "← → ↑ ↓": "move in the grid", "Enter": "open a sample", "] [": "next and previous page", "/": "filter by key",
  "h": "heat on and off", "+ −": "larger and smaller tiles", ...selection.KEYS,
};
const LEAST = 24;
const MOST = 200;
const GAP = 12;
const TEXT = 66;
const SIDES = { min: 80, max: 400, step: 20, value: 180 };
const SORTS = {
  surprise: "surprise: unlabelled, high score",
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
  const asked = { ...query(values), run: number, against: values.against };
  // Answers that are on their way are shown.
  await inOrder(() => {});
  const listing = await ask("samples", { ...asked, offset, count: tilesShown() });
  total = listing.total;
  clearTimeout(waiting);
  if (listing.pending) waiting = setTimeout(() => dispatchEvent(new Event("state")), 2000);
  prefetch(asked, offset, run);
  const tiles = listing.items.map((pair, position) => tile(pair, run, number, offset + position));
  const grid = el("ul", { className: `grid ${values.heat === "no" ? "cold" : ""}`, id: "grid" }, tiles);
  grid.style.setProperty("--columns", columns());
  return el("section", { className: "samples" },
    el("h1", { className: "unseen" }, "Samples"),
    filters(values, run),
    el("div", { className: "summary" },
      el("span", {}, summary(run)), legend(listing.items, listing.items.some((pair) => pair.heat)), tools(asked, listing)),
    run.note ? remark("how far to trust these scores", run.note) : null,
    grid,
    listing.items.length ? null : el("p", { className: "empty" }, empty(listing, run)),
    pages(offset),
    selection.selectable(grid, { run, number, items: listing.items }));
}

// The tile from which somebody went to its sample has the focus again.
export function shown() {
  if (state().place === undefined) return;
  document.querySelector(`.tile a[data-place="${Number(state().place)}"]`)?.focus();
  change({ place: null });
}

function empty(listing, run) {
  if (listing.pending) return listing.failure || "The runs are being compared.";
  return run.indexed === null ? "The index is being built." : "No sample matches.";
}

export function leave() {
  clearTimeout(waiting);
}

function summary(run) {
  const shown = `${plain(total)} of ${plain(run.samples)} samples`;
  return run.indexed === null ? shown : `${shown}, snapshot ${run.indexed}${run.indexed === run.shown ? "" : `; the run is at ${run.shown}`}`;
}

function tile(pair, run, number, place) {
  const canvas = el("canvas", { ariaHidden: "true" });
  if (pair.heat) paint(canvas, bytes(pair.heat), run.side);
  const side = tileSide() > 256 ? 512 : 256;
  return el("li", { className: "tile" },
    link({ page: "sample", row: pair.row, focus: pair.class, place, offset: null }, undefined, { title: pair.key, "data-place": place },
      el("span", { className: "frame" }, picture(thumbnail(number, pair.row, side, run.data), pair.key, canvas)),
      el("span", { className: `label ${kind(pair)}` },
        badges(pair), el("span", { className: "name" }, run.classes[pair.class]), el("b", {}, pair.score.toFixed(2))),
      el("span", { className: "given" }, "given: ", given(pair, run.classes)),
      el("span", { className: "key" }, pair.key, pair.change >= 0.005 ? ` Δ ${pair.change.toFixed(2)}` : null)),
    el("input", { type: "checkbox", className: "pick", ariaLabel: `select ${pair.key}` }));
}

// The size of tiles is a choice of the screen, not of the address. All rows of a page are full.

const tileSide = () => Number(localStorage.getItem("tile")) || SIDES.value;

function columns() {
  const room = document.getElementById("main");
  const { paddingLeft, paddingRight } = getComputedStyle(room);
  const width = room.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
  return Math.max(width < 500 ? 2 : 1, Math.floor((width + GAP) / (tileSide() + GAP)));
}

export function tilesShown() {
  const rows = Math.max(LEAST / columns(), innerHeight / (tileSide() + TEXT));
  return columns() * Math.max(1, Math.min(Math.ceil(rows), Math.floor(MOST / columns())));
}

function resize(side) {
  localStorage.setItem("tile", Math.min(SIDES.max, Math.max(SIDES.min, side)));
  again();
}

function again() {
  clearTimeout(waiting);
  document.getElementById("grid")?.style.setProperty("--columns", columns());
  waiting = setTimeout(() => dispatchEvent(new Event("state")), 250);
}

let width = innerWidth;
addEventListener("resize", () => {
  if (document.getElementById("grid") && innerWidth !== width) again();
  width = innerWidth;
});

const tools = (asked, listing) =>
  el("span", { className: "tools" },
    el("label", {}, "tiles ", el("input", { id: "tile-size", type: "range", ...SIDES, value: tileSide(), oninput: ({ target }) => resize(Number(target.value)) })),
    listing.items.length ? el("button", { type: "button", onclick: () => selection.selectAll() }, "select all") : null,
    listing.items.length ? el("a", { className: "button", href: url("samples.csv", asked), download: "samples.csv" }, "download CSV") : null);

// Filters

function filters(values, run) {
  const set = (changes) => go({ ...changes, offset: null });
  const choose = (name, label, options, fallback) =>
    el("label", {}, label, el("select", { name, onchange: ({ target }) => set({ [name]: target.value }) },
      options.map(([value, text]) => el("option", { value, selected: value === (values[name] ?? fallback) }, text))));
  const usable = (sort) => (sort !== "against" || values.against) && (sort !== "change" || run.before !== null) && (sort !== "score" || values.class);
  const sorts = Object.entries(SORTS).filter(([sort]) => usable(sort) || sort === values.sort);
  const answers = [["", "any"], ["yes", "yes"], ["no", "no"]];
  const bound = (name, label) =>
    el("label", {}, label, el("input", {
      name, type: "number", min: 0, max: 1, step: 0.05, value: values[name] ?? "", placeholder: name === "low" ? "0" : "1",
      onchange: ({ target }) => set({ [name]: target.value }),
    }));
  return scrolls(el("form", { className: "filters", ariaLabel: "filters", onsubmit: (event) => event.preventDefault() },
    choose("sort", "sort", sorts, "surprise"),
    choose("class", "class", [["", "any"], ...run.classes.map((name, number) => [String(number), name])], ""),
    choose("annotated", "annotated", answers, ""),
    choose("expected", "expected", answers, ""),
    run.full_labels ? choose("present", "really there", answers, "") : null,
    bound("low", "score from"), bound("high", "to"),
    el("label", {}, "key", el("input", { name: "key", id: "key", type: "search", value: values.key ?? "", onchange: ({ target }) => set({ key: target.value }) })),
    el("label", { className: "check" }, el("input", {
      name: "reverse", type: "checkbox", checked: values.reverse === "yes",
      onchange: ({ target }) => set({ reverse: target.checked ? "yes" : null }),
    }), "reversed"),
    Object.values(query(values)).some(Boolean) ? el("button", { type: "button", onclick: () => set(Object.fromEntries(FILTERS.map((name) => [name, null]))) }, "clear") : null));
}

// Pages

function neighbours(offset) {
  const count = tilesShown();
  return { previous: offset ? Math.max(0, offset - count) : null, next: offset + count < total ? offset + count : null };
}

function pages(offset) {
  const { previous, next } = neighbours(offset);
  const button = (target, text, title) =>
    target === null
      ? el("button", { type: "button", disabled: true }, text)
      : link({ offset: target || null }, undefined, { title, className: "button" }, text);
  const count = tilesShown();
  const last = Math.max(1, Math.ceil(total / count));
  return el("nav", { className: "pages", ariaLabel: "pages of samples" },
    button(previous, "‹ previous", "key ["), `page ${plain(Math.ceil(offset / count) + 1)} of ${plain(last)}`, button(next, "next ›", "key ]"));
}

function prefetch(asked, offset, run) {
  const { next } = neighbours(offset);
  if (next === null) return;
  // The browser keeps these images, so that the next page is there at once.
  setTimeout(() => {
    if (state().page && state().page !== "samples") return;
    ask("samples", { ...asked, offset: next, count: tilesShown() })
      .then(({ items }) => items.forEach((pair) => { new Image().src = thumbnail(asked.run, pair.row, tileSide() > 256 ? 512 : 256, run.data); }))
      .catch(() => {});
  }, 400);
}

// Keyboard

export function key(event) {
  const links = [...document.querySelectorAll(".tile a")];
  const { previous, next } = neighbours(Number(state().offset ?? 0) || 0);
  if (event.key === "]" && next !== null) go({ offset: next });
  else if (event.key === "[" && previous !== null) go({ offset: previous || null });
  else if (event.key === "/") document.getElementById("key")?.focus();
  else if (event.key === "h") {
    change({ heat: document.getElementById("grid").classList.toggle("cold") ? "no" : null });
    links.forEach((tile) => { tile.href = address({ heat: state().heat }, Object.fromEntries(new URL(tile.href).searchParams)); });
  } else if (["+", "=", "-"].includes(event.key)) resize(tileSide() + (event.key === "-" ? -1 : 1) * SIDES.step * 2);
  else if (event.key.startsWith("Arrow") && event.target.type !== "range") move(event, links);
  else return selection.key(event);
  return true;
}

function move(event, links) {
  const steps = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: columns(), ArrowUp: -columns() };
  const from = selection.focused();
  const target = from < 0 ? 0 : from + steps[event.key];
  if (!links[target]) return;
  links[target].focus();
  if (event.shiftKey) selection.extend(from, target);
}
