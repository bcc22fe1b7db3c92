// One sample: heatmaps over the image, scores as bars, boxes, views, and how it came about over the epochs.

import { address, ask, change, el, go, picture, state, url } from "./dom.js";
import { badges, bytes, hottest, kind, legend, paint } from "./marks.js";
import { FILTERS, query, tilesShown } from "./samples.js";
import * as zoom from "./zoom.js";

export const KEYS = {
  "← →": "previous and next sample of the list", "↑ ↓": "class above and below", ", .": "epoch before and after",
  "h": "heat on and off", "m": "smooth or cells", "b": "boxes", "v": "views of the last epochs", "Esc": "back to the grid", ...zoom.KEYS,
};
const VIEW_COLORS = ["#56b4e9", "#009e73", "#f0e442", "#e69f00", "#cc79a7"];
let sides = [];
let focus = null;
let epochs = [];

export async function show({ state: values, runs, number }) {
  const other = values.against && runs[number].same_samples.includes(Number(values.against)) ? Number(values.against) : null;
  const numbers = other === null ? [number] : [number, other];
  const asked = { row: values.row, at: other === null ? values.at : null };
  sides = await Promise.all(numbers.map(async (side) => {
    const [sample, past] = await Promise.all([ask("sample", { ...asked, run: side }), ask("history", { run: side, row: values.row })]);
    return { number: side, run: runs[side], sample, past: past.epochs };
  }));
  epochs = Object.keys(sides[0].past).map(Number).filter((epoch) => sides.some((side) => side.past[epoch]?.maps)).sort((a, b) => a - b);
  focus = Number(values.focus ?? sides[0].sample.classes[0].class);
  const articles = el("div", { className: `sides sides-${sides.length}` }, sides.map(sideOf));
  const section = el("section", { className: "sample" }, title(values), controls(values, zoom.zoomable([...articles.querySelectorAll(".picture")])), articles);
  draw(section);
  return section;
}

// The page of the grid that has this sample.
function back() {
  const at = Number(state().place);
  const offset = at >= 0 ? tilesShown() * Math.floor(at / tilesShown()) : null;
  return { page: "samples", row: null, focus: null, epoch: null, at: null, offset: offset || null };
}

function title(values) {
  const [{ sample, number, run }] = sides;
  return el("div", { className: "title" },
    el("a", { href: address(back()), className: "button", onclick: (event) => { event.preventDefault(); go(back()); } }, "‹ grid"),
    el("h1", {}, sample.key),
    sample.path ? el("span", { className: "faint" }, sample.path) : null,
    el("span", { className: "faint" }, `${sample.shard}, row ${sample.row}, ${sample.visited < 0 ? "never visited" : `last visited in epoch ${sample.visited + 1}`}`),
    el("a", { href: url("image", { run: number, row: values.row, data: run.data }), target: "_blank", rel: "noopener" }, "original"));
}

function controls(values, zooming) {
  const check = (name, label, fallback) =>
    el("label", { className: "check" }, el("input", {
      id: name, type: "checkbox", checked: (values[name] ?? fallback) === "yes",
      onchange: ({ target }) => { change({ [name]: target.checked ? "yes" : "no" }); draw(); },
    }), label);
  const { snapshots } = sides[0].sample;
  return el("div", { className: "controls" },
    zooming,
    el("label", {}, "heat ", el("input", {
      id: "opacity", type: "range", min: 0, max: 100, value: values.opacity ?? 70,
      oninput: ({ target }) => { change({ opacity: target.value }); draw(); },
    })),
    check("smooth", "smooth", "yes"), check("boxes", "boxes", "yes"), check("views", "views", "no"),
    epochs.length ? el("label", { className: "wide" }, "epoch ", el("input", {
      id: "epoch", type: "range", min: 0, max: epochs.length, value: epochs.indexOf(Number(values.epoch)) < 0 ? epochs.length : epochs.indexOf(Number(values.epoch)),
      oninput: ({ target }) => { change({ epoch: epochs[target.value] }); draw(); },
    }), el("output", { id: "epoch-shown" })) : null,
    sides.length === 1 && snapshots.length > 1 ? el("label", {}, "snapshot ", el("select", { onchange: ({ target }) => go({ at: target.value }) },
      [["", "newest"], ...snapshots.map((each) => [String(each), each])].map(([value, text]) => el("option", { value, selected: value === (values.at ?? "") }, text)))) : null);
}

function sideOf(side) {
  const { sample, run } = side;
  const source = url("image", { run: side.number, row: sample.row, data: run.data });
  const over = el("svg", { class: "over", viewBox: "0 0 1 1", preserveAspectRatio: "none", "aria-hidden": "true" });
  return el("article", { className: "side", ariaLabel: run.name },
    sides.length > 1 ? el("h2", {}, run.name) : null,
    el("div", { className: "frame" }, sample.unreadable
      ? el("p", { className: "failure" }, sample.unreadable)
      : picture(source, sample.key, el("canvas", { ariaHidden: "true" }), over)),
    el("p", { className: "told" }, el("span", { className: "heat-of" }), legend(sample.classes, sample.maps !== null)),
    el("ol", { className: "bars" }));
}

// What changes with the controls is drawn again, without a request.

function draw(section = document.querySelector(".sample")) {
  const values = state();
  const epoch = epochs.includes(Number(values.epoch)) && values.epoch ? Number(values.epoch) : null;
  const shown = section.querySelector("#epoch-shown");
  if (shown) shown.textContent = epoch === null ? "now" : epoch + 1;
  section.querySelectorAll(".side").forEach((article, number) => drawSide(article, sides[number], epoch, values));
}

function drawSide(article, side, epoch, values) {
  const { sample, run, past } = side;
  const then = epoch === null ? null : past[epoch] ?? { scores: {}, maps: null };
  const heat = mapOf(epoch === null ? sample.maps : then.maps, focus, run.side);
  const canvas = article.querySelector("canvas");
  if (canvas) {
    paint(canvas, heat, run.side);
    canvas.style.opacity = (values.opacity ?? 70) / 100;
    canvas.classList.toggle("cells", values.smooth === "no");
    canvas.hidden = values.heat === "no";
    drawOver(article.querySelector(".over"), sample, heat, run, values);
  }
  article.querySelector(".heat-of").textContent =
    `${run.classes[focus]}: ${heat ? `hottest ${(Math.max(...heat) / 255).toFixed(2)}` : "no heatmap is kept"}${epoch === null ? "" : `, after epoch ${epoch + 1}`}`;
  const inFocus = article.querySelector(".bars").contains(document.activeElement);
  article.querySelector(".bars").replaceChildren(...sample.classes.map((pair) => bar(pair, side, then)));
  if (inFocus) article.querySelector(".bars .focus button")?.focus();
}

function mapOf(maps, number, side) {
  const position = maps?.classes.indexOf(number) ?? -1;
  return position < 0 ? null : bytes(maps.heat).subarray(position * side * side, (position + 1) * side * side);
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
    sample.views.forEach(({ epoch, box, flip }, number) => {
      drawn.push(frame(...box, VIEW_COLORS[number], { class: "view", "stroke-dasharray": flip ? "6 4" : null }));
      drawn.at(-1).append(el("title", {}, `epoch ${epoch + 1}${flip ? ", mirrored" : ""}`));
    });
  }
  over.replaceChildren(...drawn);
}

function bar(pair, side, then) {
  const score = then === null ? pair.score : then.scores[pair.class] ?? null;
  const kept = side.sample.maps?.classes.includes(pair.class);
  return el("li", { className: `${kind(pair)} ${pair.class === focus ? "focus" : ""} ${kept ? "" : "cold"}` },
    el("button", { type: "button", ariaPressed: String(pair.class === focus), onclick: () => look(pair.class) },
      badges(pair), el("span", { className: "name" }, side.run.classes[pair.class]),
      el("span", { className: "track" }, el("span", { className: "fill", style: { width: `${100 * (score ?? 0)}%` } })),
      el("b", {}, score === null ? "–" : score.toFixed(2)), sparkline(side.past, pair.class)));
}

function sparkline(past, number) {
  const points = Object.entries(past).map(([epoch, then]) => [Number(epoch), then.scores[number]]).filter(([, score]) => score !== undefined);
  if (points.length < 2) return el("span", { className: "spark" });
  const first = points[0][0];
  const width = Math.max(1, points.at(-1)[0] - first);
  const path = points.map(([epoch, score], position) => `${position ? "L" : "M"}${(60 * (epoch - first)) / width},${15 - 14 * score}`).join("");
  return el("svg", { class: "spark", viewBox: "0 0 60 16", preserveAspectRatio: "none", "aria-hidden": "true" },
    el("path", { d: path, fill: "none", stroke: "currentColor", "stroke-width": 1.5, "vector-effect": "non-scaling-stroke" }),
    el("title", {}, points.map(([epoch, score]) => `${epoch + 1}: ${score.toFixed(2)}`).join("  ")));
}

function look(number) {
  focus = number;
  change({ focus: number });
  draw();
}

export function key(event) {
  const classes = sides[0]?.sample.classes.map((pair) => pair.class) ?? [];
  const toggles = { m: "smooth", b: "boxes", v: "views" };
  const slider = document.getElementById("epoch");
  if (event.target.type === "range" && event.key.startsWith("Arrow")) return false;
  if (event.key === "ArrowDown") look(classes[Math.min(classes.length - 1, classes.indexOf(focus) + 1)]);
  else if (event.key === "ArrowUp") look(classes[Math.max(0, classes.indexOf(focus) - 1)]);
  else if (event.key === "ArrowRight") step(1);
  else if (event.key === "ArrowLeft") step(-1);
  else if (event.key === "Escape") go(back());
  else if (event.key === "h") { change({ heat: state().heat === "no" ? null : "no" }); draw(); }
  else if (toggles[event.key]) document.getElementById(toggles[event.key]).click();
  else if (slider && (event.key === "," || event.key === ".")) {
    slider.value = Number(slider.value) + (event.key === "." ? 1 : -1);
    slider.dispatchEvent(new Event("input"));
  } else return zoom.key(event);
  return true;
}

async function step(by) {
  const values = state();
  const position = Number(values.place) + by;
  if (!(position >= 0)) return;
  const asked = Object.fromEntries(FILTERS.map((name) => [name, query(values)[name]]));
  const { items: [next] } = await ask("samples", { ...asked, run: values.run, against: values.against, offset: position, count: 1 });
  if (next) go({ row: next.row, focus: next.class, place: position, epoch: null, at: null });
}
