// Line charts of several runs: smoothed, with the raw values behind, and the values at the pointer.

import { el, plain } from "./dom.js";

const MAX_POINTS = 600;
const WIDTH = 340;
const HEIGHT = 165;
const ROOM = { left: 42, right: 8, top: 8, bottom: 20 };

export function thinned(points) {
  if (points.length <= MAX_POINTS) return points;
  const step = points.length / MAX_POINTS;
  return Array.from({ length: MAX_POINTS }, (_, number) => {
    const part = points.slice(Math.floor(number * step), Math.floor((number + 1) * step));
    return [part.at(-1)[0], part.reduce((sum, [, value]) => sum + value, 0) / part.length];
  });
}

// A moving average without the pull of its start, as TensorBoard's. `weight` is that of what was before, from 0 to 1.
export function smoothed(points, weight) {
  let sum = 0;
  return points.map(([step, value], number) => {
    sum = weight * sum + (1 - weight) * value;
    return [step, sum / (1 - weight ** (number + 1))];
  });
}

// A curve is {name, color, points: [step, value], raw: the same, not smoothed}. `low` is a value that is always in view.
export function chart(title, curves, low) {
  const all = curves.flatMap(({ points, raw }) => [...points, ...raw]);
  const [x0, x1] = extent(all.map(([step]) => step));
  let [y0, y1] = extent([...(low === undefined ? [] : [low]), ...all.map(([, value]) => value)]);
  if (y0 === y1) y1 = y0 + (Math.abs(y0) || 1);
  const x = (step) => ROOM.left + ((WIDTH - ROOM.left - ROOM.right) * (step - x0)) / (x1 - x0 || 1);
  const y = (value) => HEIGHT - ROOM.bottom - ((HEIGHT - ROOM.top - ROOM.bottom) * (value - y0)) / (y1 - y0);
  const path = (points, color, className) =>
    el("path", { d: points.map(([a, b], number) => `${number ? "L" : "M"}${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(""), class: `${className} color-${color}` });
  const label = curves.map(({ name, raw }) => `${name} ${short(raw.at(-1)[1])}`).join(", ");
  const drawing = el("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}: ${label}` },
    ticks(y0, y1).flatMap((value) => [
      el("line", { x1: ROOM.left, x2: WIDTH - ROOM.right, y1: y(value), y2: y(value), class: "rule" }),
      el("text", { x: ROOM.left - 5, y: y(value) + 3.5, class: "tick", "text-anchor": "end" }, short(value))]),
    ticks(x0, x1).map((step) => el("text", { x: x(step), y: HEIGHT - 6, class: "tick", "text-anchor": "middle" }, short(step))),
    curves.filter(({ points, raw }) => raw !== points).map(({ raw, color }) => path(raw, color, "raw")),
    curves.map(({ points, color }) => path(points, color, "curve")),
    curves.map(({ points, color }) => el("circle", { cx: x(points.at(-1)[0]), cy: y(points.at(-1)[1]), r: 2.5, class: `end color-${color}` })));
  return el("figure", { className: "panel" }, el("figcaption", {}, title), drawing, readout(drawing, curves, { x, y, x0, x1 }));
}

function extent(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

// The last values, or those nearest to the pointer: as they were measured, not smoothed.
function readout(drawing, curves, { x, y, x0, x1 }) {
  const line = el("p", { className: "values" });
  const cursor = el("g", { class: "cursor" });
  drawing.append(cursor);
  const nearest = (points, step) => points.reduce((best, point) => (Math.abs(point[0] - step) < Math.abs(best[0] - step) ? point : best));
  const show = (step) => {
    const points = curves.map(({ raw }) => (step === null ? raw.at(-1) : nearest(raw, step)));
    line.replaceChildren(el("span", {}, step === null ? "last" : `step ${plain(points[0][0])}`),
      ...points.map(([, value], number) => el("b", { className: `color-${curves[number].color}`, title: curves[number].name }, short(value))));
    cursor.replaceChildren(...(step === null ? [] : [
      el("line", { x1: x(points[0][0]), x2: x(points[0][0]), y1: ROOM.top, y2: HEIGHT - ROOM.bottom }),
      ...points.map(([a, b], number) => el("circle", { cx: x(a), cy: y(b), r: 3, class: `end color-${curves[number].color}` }))]));
  };
  drawing.addEventListener("pointermove", (event) => {
    const box = drawing.getBoundingClientRect();
    const share = (((event.clientX - box.left) / box.width) * WIDTH - ROOM.left) / (WIDTH - ROOM.left - ROOM.right);
    show(x0 + Math.min(1, Math.max(0, share)) * (x1 - x0));
  });
  drawing.addEventListener("pointerleave", () => show(null));
  show(null);
  return line;
}

function ticks(low, high) {
  const rough = (high - low) / 4;
  if (!(rough > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const first = Math.ceil(low / step);
  return Array.from({ length: Math.floor(high / step) - first + 1 }, (_, number) => (first + number) * step);
}

const short = (value) => (value !== 0 && (Math.abs(value) < 0.001 || Math.abs(value) >= 1e5) ? value.toExponential(1) : String(Number(value.toPrecision(3))));
