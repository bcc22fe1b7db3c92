// The run as a whole: its curves beside those of other runs, which grow while they train; store, snapshots, lease, disk.

import { ask, change, el, plain, size, tableOf } from "./dom.js";
import { chart, smoothed, thinned } from "./chart.js";

export const KEYS = {};
const SECONDS = 2;
const SECONDS_STORE = 15;
const COLORS = 8;
// Title, kind of line, field, and a value that is always in view.
const CHARTS = [
  ["loss", "train", "loss", 0],
  ["base loss", "train", "base", 0],
  ["consistency", "train", "consistency", 0],
  ["validation mAP", "val", "map"],
  ["validation mAP, map pooling", "val", "map_with_map_pooling"],
  ["validation top-1", "val", "top1"],
  ["images per second", "train", "images_per_second", 0],
  ["learning rate", "train", "learning_rate", 0],
  ["gamma", "train", "gamma", 0],
  ["waiting for data, share of the step", "train", "wait_data", 0],
  ["waiting for heatmaps", "train", "wait_heatmaps", 0],
  ["waiting for the writeback", "train", "wait_writeback", 0],
];
let curvesOf = [];
let timers = [];

export async function show({ state: values, runs, number }) {
  curvesOf = runs.map((run, color) => ({ number: color, name: run.name, color: color % COLORS, next: 0, lines: [], hidden: isHidden(values, color, number) }));
  await more();
  const charts = el("div", { className: "panels" });
  const stored = el("div", { id: "store" });
  const redraw = () => draw(charts, Number(smoothing.value) / 100);
  const smoothing = el("input", {
    id: "smoothing", type: "range", min: 0, max: 99, value: values.smoothing ?? 0,
    oninput: ({ target }) => { change({ smoothing: target.value === "0" ? null : target.value }); redraw(); },
  });
  redraw();
  store(stored, number);
  timers = [
    setInterval(async () => { if (!document.hidden && (await more().catch(() => false))) redraw(); }, 1000 * SECONDS),
    setInterval(() => { if (!document.hidden) store(stored, number); }, 1000 * SECONDS_STORE),
  ];
  return el("section", { className: "run" },
    el("h1", { className: "unseen" }, "Run"),
    el("div", { className: "controls" }, choice(redraw), el("label", {}, "smoothing ", smoothing)),
    el("h2", { className: "unseen" }, "Curves"), charts,
    el("h2", {}, `Store of ${runs[number].name}`), stored);
}

export function leave() {
  timers.forEach(clearInterval);
  timers = [];
}

// Which runs have curves: all, but those that were unticked.

const isHidden = (values, run, current) => run !== current && (values.without ?? "").split(",").includes(String(run));

const choice = (redraw) =>
  el("fieldset", { className: "runs" }, el("legend", { className: "unseen" }, "runs with curves"), curvesOf.map((run) =>
    el("label", { className: "check" },
      el("input", { type: "checkbox", checked: !run.hidden, onchange: ({ target }) => {
        run.hidden = !target.checked;
        change({ without: curvesOf.filter(({ hidden }) => hidden).map((each) => each.number).join(",") || null });
        redraw();
      } }),
      el("span", { className: `dash color-${run.color}` }), run.name)));

async function more() {
  let grown = false;
  for (const run of curvesOf) {
    for (let again = true; again;) {
      const part = await ask("curves", { run: run.number, after: run.next });
      if (part.start < run.next) run.lines = [];
      grown ||= part.next !== run.next;
      again = part.lines.length > 0 && part.next !== run.next;
      run.next = part.next;
      run.lines.push(...part.lines);
    }
  }
  return grown;
}

function draw(charts, weight) {
  const shown = curvesOf.filter(({ hidden }) => !hidden);
  const drawn = CHARTS.map(([title, kind, field, low]) => [title, low, shown.map((run) => {
    const all = run.lines.filter((line) => line.kind === kind && Number.isFinite(line[field])).map((line) => [line.step, line[field]]);
    const raw = thinned(all);
    return { name: run.name, color: run.color, raw, points: weight ? thinned(smoothed(all, weight)) : raw };
  }).filter(({ points }) => points.length)]).filter(([, , curves]) => curves.length);
  charts.replaceChildren(...drawn.map(([title, low, curves]) => chart(title, curves, low)));
  if (!drawn.length) charts.append(el("p", { className: "empty" }, "No curves: there is no metrics.jsonl with lines of these runs."));
}

// Store

async function store(room, number) {
  const facts = await ask("store", { run: number }).catch((error) => ({ error: error.message }));
  if (facts.error) return room.replaceChildren(el("p", { className: "failure" }, facts.error));
  const total = Object.values(facts.bytes).reduce((a, b) => a + b, 0);
  const named = [
    ["store", facts.url], ["layout", `${facts.layout.layout}${facts.layout.top ? ` ${facts.layout.top}` : ""}, ${facts.layout.slots} slots`],
    ["lease", lease(facts.lease)], ["size", size(total)], ["free disk", size(facts.free)],
  ];
  const heads = ["snapshot", "epoch", "step", "time", "arrays", "notes"];
  const rows = facts.snapshots.map((each) => [
    each.id, each.epoch + 1, plain(each.step), new Date(1000 * each.time).toLocaleString(), each.group,
    [each.id === facts.shown ? "shown" : "", each.selection ? "selection" : "", each.mid_epoch ? "mid-epoch" : "", ...each.checkpoints].filter(Boolean).join(", "),
  ]);
  const isOpen = room.querySelector("details")?.open ?? false;
  room.replaceChildren(
    el("dl", { className: "facts" }, named.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)))),
    tableOf("snapshots", el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
      el("tbody", {}, rows.map((row) => el("tr", {}, row.map((value) => el("td", {}, value)))))),
    el("details", { open: isOpen }, el("summary", {}, "bytes by array"),
      tableOf("bytes by array", el("tbody", {}, Object.entries(facts.bytes).sort().map(([name, bytes]) =>
        el("tr", {}, el("th", { scope: "row" }, name), el("td", { className: "number" }, size(bytes))))))));
}

function lease(holder) {
  if (!holder) return "free";
  const lives = holder.alive === null ? "on another host" : holder.alive ? "alive" : "dead";
  return `run ${holder.run}, ${holder.host}, pid ${holder.pid} (${lives})`;
}

export const key = () => false;
