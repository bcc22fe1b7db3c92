// The run as a whole: its curves, which grow while it trains, its store, snapshots, lease and disk.

import { ask, el, plain, size } from "./dom.js";

export const KEYS = {};
const SECONDS = 2;
const SECONDS_STORE = 15;
const PANELS = {
  "losses": { kind: "train", fields: ["loss", "base", "consistency"], low: 0 },
  "validation": { kind: "val", fields: ["map", "map_with_map_pooling", "top1"] },
  "waits, share of the step": { kind: "train", fields: ["wait_data", "wait_heatmaps", "wait_writeback"], low: 0 },
  "images per second": { kind: "train", fields: ["images_per_second"], low: 0 },
  "learning rate": { kind: "train", fields: ["learning_rate"], low: 0 },
  "gamma": { kind: "train", fields: ["gamma"], low: 0 },
};
const MAX_POINTS = 600;
let watched = [];
let timers = [];

export async function show({ state, runs, number }) {
  const numbers = [number, ...runs[number].same_samples.filter((one) => String(one) === state.against)];
  watched = numbers.map((one) => ({ number: one, name: runs[one].name, next: 0, lines: [] }));
  await more();
  const section = el("section", { className: "run" },
    watched.length > 1 ? el("p", { className: "legend" }, watched.map((one, place) => el("span", {}, el("span", { className: `dash run-${place}` }), one.name))) : null,
    el("div", { className: "panels" }, Object.keys(PANELS).map((title) => el("figure", { className: "panel" }, el("figcaption", {}, title), el("div", { className: "plot" })))),
    el("div", { id: "store" }));
  draw(section);
  store(section.querySelector("#store"), number);
  timers = [
    setInterval(async () => { if (!document.hidden && (await more().catch(() => false))) draw(section); }, 1000 * SECONDS),
    setInterval(() => { if (!document.hidden) store(section.querySelector("#store"), number); }, 1000 * SECONDS_STORE),
  ];
  return section;
}

export function leave() {
  timers.forEach(clearInterval);
  timers = [];
}

async function more() {
  let grown = false;
  for (const run of watched) {
    for (let again = true; again;) {
      const found = await ask("curves", { run: run.number, after: run.next });
      if (found.start < run.next) run.lines = [];
      grown ||= found.next !== run.next;
      again = found.lines.length > 0 && found.next !== run.next;
      run.next = found.next;
      run.lines.push(...found.lines);
    }
  }
  return grown;
}

// Curves

function draw(section) {
  section.querySelectorAll(".panel").forEach((figure, place) => {
    const { kind, fields, low } = Object.values(PANELS)[place];
    const curves = watched.flatMap((run, number) => fields.map((field, color) => ({
      field, number, color: fields.length > 1 ? color : 0,
      points: thinned(run.lines.filter((line) => line.kind === kind && Number.isFinite(line[field])).map((line) => [line.step, line[field]])),
    }))).filter((curve) => curve.points.length);
    figure.hidden = !curves.length;
    figure.querySelector(".plot").replaceChildren(...(curves.length ? [chart(curves, low), names(curves, fields)] : []));
  });
}

function thinned(points) {
  if (points.length <= MAX_POINTS) return points;
  const step = points.length / MAX_POINTS;
  return Array.from({ length: MAX_POINTS }, (_, place) => {
    const part = points.slice(Math.floor(place * step), Math.floor((place + 1) * step));
    return [part.at(-1)[0], part.reduce((sum, [, value]) => sum + value, 0) / part.length];
  });
}

const WIDTH = 420;
const HEIGHT = 180;
const ROOM = { left: 46, right: 8, top: 8, bottom: 22 };

function chart(curves, low) {
  const all = curves.flatMap((curve) => curve.points);
  const [x0, x1] = [Math.min(...all.map(([x]) => x)), Math.max(...all.map(([x]) => x))];
  let [y0, y1] = [Math.min(low ?? Infinity, ...all.map(([, y]) => y)), Math.max(...all.map(([, y]) => y))];
  if (y0 === y1) y1 = y0 + (Math.abs(y0) || 1);
  const x = (value) => ROOM.left + ((WIDTH - ROOM.left - ROOM.right) * (value - x0)) / (x1 - x0 || 1);
  const y = (value) => HEIGHT - ROOM.bottom - ((HEIGHT - ROOM.top - ROOM.bottom) * (value - y0)) / (y1 - y0);
  const lines = ticks(y0, y1).flatMap((value) => [
    el("line", { x1: ROOM.left, x2: WIDTH - ROOM.right, y1: y(value), y2: y(value), class: "rule" }),
    el("text", { x: ROOM.left - 5, y: y(value) + 3.5, class: "tick", "text-anchor": "end" }, short(value))]);
  const steps = ticks(x0, x1).map((value) => el("text", { x: x(value), y: HEIGHT - 6, class: "tick", "text-anchor": "middle" }, short(value)));
  const paths = curves.map((curve) => el("path", {
    d: curve.points.map(([a, b], place) => `${place ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(""),
    class: `curve color-${curve.color} run-${curve.number}`,
  }));
  const dots = curves.flatMap((curve) => (curve.points.length > 40 ? [curve.points.at(-1)] : curve.points).map(([a, b]) =>
    el("circle", { cx: x(a), cy: y(b), r: 2, class: `dot-of color-${curve.color}` }, el("title", {}, `${curve.field} at step ${plain(a)}: ${b.toPrecision(4)}`))));
  return el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img" }, lines, steps, paths, dots);
}

function ticks(low, high) {
  const rough = (high - low) / 4;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((one) => one * power).find((one) => one >= rough);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, place) => (first + place) * step);
}

const short = (value) => (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e5) ? value.toExponential(0) : String(Number(value.toPrecision(3))));

const names = (curves, fields) =>
  el("p", { className: "legend" }, fields.filter((field) => curves.some((curve) => curve.field === field)).map((field) => {
    const mine = curves.filter((curve) => curve.field === field);
    return el("span", {}, el("span", { className: `dash color-${mine[0].color}` }), field.replaceAll("_", " "), " ",
      el("b", {}, mine.map((curve) => curve.points.at(-1)[1].toPrecision(3)).join(" / ")));
  }));

// Store

async function store(place, number) {
  const found = await ask("store", { run: number }).catch((error) => ({ error: error.message }));
  if (found.error) return place.replaceChildren(el("p", { className: "failure" }, found.error));
  const total = Object.values(found.bytes).reduce((a, b) => a + b, 0);
  const facts = [
    ["store", found.url], ["layout", `${found.layout.layout}${found.layout.top ? ` ${found.layout.top}` : ""}, ${found.layout.slots} slots`],
    ["lease", lease(found.lease)], ["size", size(total)], ["free disk", size(found.free)],
  ];
  const heads = ["snapshot", "epoch", "step", "time", "arrays", "notes"];
  const rows = found.snapshots.map((one) => [
    one.id, one.epoch + 1, plain(one.step), new Date(1000 * one.time).toLocaleString(), one.group,
    [one.id === found.shown ? "shown" : "", one.selection ? "selection" : "", one.mid_epoch ? "mid-epoch" : "", ...one.checkpoints].filter(Boolean).join(", "),
  ]);
  place.replaceChildren(
    el("dl", { className: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    el("div", { className: "scroll" }, el("table", {},
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", {}, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value) => el("td", {}, value))))))),
    el("details", {}, el("summary", {}, "bytes by array"), el("table", {}, el("tbody", {}, Object.entries(found.bytes).sort().map(([name, bytes]) =>
      el("tr", {}, el("td", {}, name), el("td", { className: "number" }, size(bytes))))))));
}

function lease(holder) {
  if (!holder) return "free";
  const lives = holder.alive === null ? "on another host" : holder.alive ? "alive" : "dead";
  return `run ${holder.run}, ${holder.host}, pid ${holder.pid} (${lives})`;
}

export const key = () => false;
