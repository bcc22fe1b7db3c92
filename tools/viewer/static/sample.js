// One sample: heatmaps over the image, scores as bars, boxes, views, and how it came about over the epochs.

import { address, ask, badges, change, el, go, kind, large, state, url } from "./dom.js";
import { bytes, hottest, paint } from "./heat.js";
import { FILTERS, query } from "./samples.js";

export const KEYS = {
  "← →": "previous and next sample of the list", "↑ ↓": "class above and below", ", .": "epoch before and after",
  "h": "heat on and off", "m": "smooth or cells", "b": "boxes", "v": "views of the last epochs", "Esc": "back to the grid",
};
const VIEW_COLORS = ["#56b4e9", "#009e73", "#f0e442", "#e69f00", "#cc79a7"];
let sides = [];
let focus = null;
let epochs = [];

export async function show({ state: values, runs, number }) {
  const other = values.against && runs[number].same_samples.includes(Number(values.against)) ? Number(values.against) : null;
  const numbers = other === null ? [number] : [number, other];
  const asked = { row: values.row, at: other === null ? values.at : null };
  const found = await Promise.all(numbers.map(async (one) => {
    const [sample, past] = await Promise.all([ask("sample", { ...asked, run: one }), ask("history", { run: one, row: values.row })]);
    return { number: one, run: runs[one], sample, past: past.epochs };
  }));
  sides = found;
  epochs = Object.keys(found[0].past).map(Number).filter((epoch) => found.some((side) => side.past[epoch]?.maps)).sort((a, b) => a - b);
  focus = Number(values.focus ?? found[0].sample.classes[0].class);
  const section = el("section", { className: "sample" }, title(found[0], values), controls(values, found),
    el("div", { className: "sides" }, found.map((side) => sideOf(side, found.length > 1))));
  draw(section);
  return section;
}

function title(side, values) {
  const { sample } = side;
  const back = { page: "samples", row: null, focus: null, place: null, epoch: null, at: null };
  return el("div", { className: "title" },
    el("a", { href: address(back), onclick: (event) => { event.preventDefault(); go(back); } }, "‹ grid"),
    el("h1", {}, sample.key),
    sample.path ? el("span", { className: "faint" }, sample.path) : null,
    el("span", { className: "faint" }, `${sample.shard}, row ${sample.row}, ${sample.visited < 0 ? "never visited" : `last visited in epoch ${sample.visited + 1}`}`),
    el("a", { href: url("image", { run: side.number, row: values.row, data: side.run.data }), target: "_blank", rel: "noopener" }, "original"));
}

function controls(values, found) {
  const check = (name, label, fallback) =>
    el("label", { className: "check" }, el("input", {
      id: name, type: "checkbox", checked: (values[name] ?? fallback) === "yes",
      onchange: (event) => { change({ [name]: event.target.checked ? "yes" : "no" }); draw(); },
    }), label);
  const snapshots = found[0].sample.snapshots;
  return el("div", { className: "controls" },
    el("label", {}, "opacity", el("input", {
      id: "opacity", type: "range", min: 0, max: 100, value: values.opacity ?? 75,
      oninput: (event) => { change({ opacity: event.target.value }); draw(); },
    })),
    check("smooth", "smooth", "yes"), check("boxes", "boxes", "yes"), check("views", "views", "no"),
    epochs.length ? el("label", { className: "wide" }, "epoch", el("input", {
      id: "epoch", type: "range", min: 0, max: epochs.length, value: epochs.indexOf(Number(values.epoch)) < 0 ? epochs.length : epochs.indexOf(Number(values.epoch)),
      oninput: (event) => { change({ epoch: epochs[event.target.value] }); draw(); },
    }), el("output", { id: "epoch-shown" })) : null,
    found.length === 1 && snapshots.length > 1 ? el("label", {}, "snapshot", el("select", { onchange: (event) => go({ at: event.target.value }) },
      [["", "newest"], ...snapshots.map((one) => [String(one), one])].map(([value, text]) => el("option", { value, selected: value === (values.at ?? "") }, text)))) : null);
}

function sideOf(side, several) {
  const { sample, run } = side;
  const source = url("image", { run: side.number, row: sample.row, data: run.data });
  const over = el("svg", { class: "over", viewBox: "0 0 1 1", preserveAspectRatio: "none" });
  const picture = sample.unreadable
    ? el("p", { className: "failure" }, sample.unreadable)
    : large(source, sample.key, el("canvas"), over);
  return el("article", { className: "side" },
    several ? el("h2", {}, run.name) : null,
    el("div", { className: "both" }, el("div", { className: "frame" }, picture, el("p", { className: "told" })), el("ol", { className: "bars" })));
}

// What changes with the controls is drawn again, without a request.

function draw(section = document.querySelector(".sample")) {
  const values = state();
  const epoch = epochs.includes(Number(values.epoch)) && values.epoch ? Number(values.epoch) : null;
  const shown = section.querySelector("#epoch-shown");
  if (shown) shown.textContent = epoch === null ? "now" : epoch + 1;
  section.querySelectorAll(".side").forEach((article, place) => drawSide(article, sides[place], epoch, values));
}

function drawSide(article, side, epoch, values) {
  const { sample, run, past } = side;
  const then = epoch === null ? null : past[epoch] ?? { scores: {}, maps: null };
  const heat = mapOf(epoch === null ? sample.maps : then.maps, focus, run.side);
  const canvas = article.querySelector("canvas");
  if (canvas) {
    paint(canvas, heat, run.side);
    canvas.style.opacity = (values.opacity ?? 75) / 100;
    canvas.classList.toggle("cells", values.smooth === "no");
    canvas.hidden = values.heat === "no";
    drawOver(article.querySelector(".over"), sample, heat, run, values);
  }
  article.querySelector(".told").textContent =
    `${run.classes[focus]}: ${heat ? `hottest ${(Math.max(...heat) / 255).toFixed(2)}` : "no heatmap is kept"}${epoch === null ? "" : `, after epoch ${epoch + 1}`}`;
  article.querySelector(".bars").replaceChildren(...sample.classes.map((one) => bar(one, side, then)));
}

function mapOf(maps, number, side) {
  const place = maps?.classes.indexOf(number) ?? -1;
  return place < 0 ? null : bytes(maps.heat).subarray(place * side * side, (place + 1) * side * side);
}

function drawOver(over, sample, heat, run, values) {
  const frame = (x, y, width, height, color, extra) =>
    el("rect", { x, y, width, height, fill: "none", stroke: color, "stroke-width": 2, "vector-effect": "non-scaling-stroke", ...extra });
  const drawn = [];
  const boxes = sample.boxes.filter(([number]) => number === focus);
  if (values.boxes !== "no") {
    for (const [number, x0, y0, x1, y1] of sample.boxes) {
      drawn.push(frame(x0, y0, x1 - x0, y1 - y0, number === focus ? "white" : "#ffffff66", { class: number === focus ? "box" : "box other" }));
    }
  }
  const peak = heat && values.heat !== "no" ? hottest(heat, run.side) : null;
  if (peak && boxes.length) {
    const inside = boxes.some(([, x0, y0, x1, y1]) => x0 <= peak.x && peak.x <= x1 && y0 <= peak.y && peak.y <= y1);
    drawn.push(frame(peak.x - 0.008, peak.y - 0.008, 0.016, 0.016, inside ? "white" : "#ff3b3b", { class: "peak" }));
  }
  if (values.views === "yes") {
    sample.views.forEach(({ epoch, box, flip }, place) => {
      drawn.push(frame(...box, VIEW_COLORS[place], { class: "view", "stroke-dasharray": flip ? "6 4" : null }));
      drawn.at(-1).append(el("title", {}, `epoch ${epoch + 1}${flip ? ", mirrored" : ""}`));
    });
  }
  over.replaceChildren(...drawn);
}

function bar(one, side, then) {
  const score = then === null ? one.score : then.scores[one.class] ?? null;
  const kept = side.sample.maps?.classes.includes(one.class);
  return el("li", {
    className: `${kind(one)} ${one.class === focus ? "focus" : ""} ${kept ? "" : "cold"}`, tabIndex: 0,
    onclick: () => look(one.class), onkeydown: (event) => { if (event.key === "Enter") look(one.class); },
  },
  badges(one), el("span", { className: "name" }, side.run.classes[one.class]),
  el("span", { className: "track" }, el("span", { className: "fill", style: { width: `${100 * (score ?? 0)}%` } })),
  el("b", {}, score === null ? "–" : score.toFixed(2)), sparkline(side.past, one.class));
}

function sparkline(past, number) {
  const points = Object.entries(past).map(([epoch, one]) => [Number(epoch), one.scores[number]]).filter(([, score]) => score !== undefined);
  if (points.length < 2) return el("span", { className: "spark" });
  const first = points[0][0];
  const width = Math.max(1, points.at(-1)[0] - first);
  const path = points.map(([epoch, score], place) => `${place ? "L" : "M"}${(60 * (epoch - first)) / width},${15 - 14 * score}`).join("");
  return el("svg", { class: "spark", viewBox: "0 0 60 16", preserveAspectRatio: "none" },
    el("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" }),
    el("title", {}, points.map(([epoch, score]) => `${epoch + 1}: ${score.toFixed(2)}`).join("  ")));
}

function look(number) {
  focus = number;
  change({ focus: number });
  draw();
}

export function key(event) {
  const classes = sides[0]?.sample.classes.map((one) => one.class) ?? [];
  const toggles = { m: "smooth", b: "boxes", v: "views" };
  const slider = document.getElementById("epoch");
  if (event.target.type === "range" && event.key.startsWith("Arrow")) return false;
  if (event.key === "ArrowDown") look(classes[Math.min(classes.length - 1, classes.indexOf(focus) + 1)]);
  else if (event.key === "ArrowUp") look(classes[Math.max(0, classes.indexOf(focus) - 1)]);
  else if (event.key === "ArrowRight") step(1);
  else if (event.key === "ArrowLeft") step(-1);
  else if (event.key === "Escape") go({ page: "samples", row: null, focus: null, place: null, epoch: null, at: null });
  else if (event.key === "h") { change({ heat: state().heat === "no" ? null : "no" }); draw(); }
  else if (toggles[event.key]) document.getElementById(toggles[event.key]).click();
  else if (slider && (event.key === "," || event.key === ".")) {
    slider.value = Number(slider.value) + (event.key === "." ? 1 : -1);
    slider.dispatchEvent(new Event("input"));
  } else return false;
  return true;
}

async function step(by) {
  const values = state();
  const place = Number(values.place) + by;
  if (!(place >= 0)) return;
  const asked = Object.fromEntries(FILTERS.map((name) => [name, query(values)[name]]));
  const found = await ask("samples", { ...asked, run: values.run, against: values.against, offset: place, count: 1 });
  if (found.items.length) go({ row: found.items[0].row, focus: found.items[0].class, place, epoch: null, at: null, offset: 24 * Math.floor(place / 24) || null });
}
