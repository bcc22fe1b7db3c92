// Marks of an image: heat over it, what the labels say of its classes, and the legend of those that are shown.

import { el, plain } from "./dom.js";

// Heat comes as bytes and is coloured here. The canvas has one pixel per cell; the browser scales it.
// Inferno without its darkest colours, as `bigscl render` draws it: every 16th of 0.3 to 1.
const STOPS = [
  [106, 23, 110], [125, 30, 109], [143, 36, 105], [160, 42, 99], [177, 50, 90], [193, 58, 80], [210, 70, 68],
  [223, 83, 55], [234, 99, 42], [242, 116, 28], [248, 135, 14], [251, 157, 7], [252, 178, 22], [249, 199, 47],
  [244, 221, 79], [241, 241, 121], [252, 255, 164],
];

const COLORS = Array.from({ length: 256 }, (_, value) => {
  const position = (value / 255) * (STOPS.length - 1);
  const low = Math.min(STOPS.length - 2, Math.floor(position));
  return STOPS[low].map((color, channel) => color + (STOPS[low + 1][channel] - color) * (position - low));
});

export function bytes(text) {
  return Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
}

// Where it is cold, the image is clear: the opacity of a cell is its value.
export function paint(canvas, heat, width, height = width) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const image = context.createImageData(width, height);
  for (let cell = 0; cell < width * height; cell += 1) {
    const value = heat ? heat[cell] : 0;
    image.data.set(COLORS[value], 4 * cell);
    image.data[4 * cell + 3] = value;
  }
  context.putImageData(image, 0, 0);
  return canvas;
}

export function hottest(heat, side) {
  let best = 0;
  for (let cell = 1; cell < side * side; cell += 1) if (heat[cell] > heat[best]) best = cell;
  return heat[best] ? { x: ((best % side) + 0.5) / side, y: (Math.floor(best / side) + 0.5) / side } : null;
}

export const heatBar = () =>
  el("span", { className: "heat-bar" }, "heat 0", paint(el("canvas", { ariaHidden: "true" }), Uint8Array.from({ length: 256 }, (_, value) => value), 256, 1), "1");

// Colours of labels are those of `bigscl render`.

export function kind(pair) {
  if (pair.annotated) return "annotated";
  if (pair.present) return "unannotated";
  if (pair.absent || (pair.present === false && pair.known !== false)) return "negative";
  return pair.expected ? "expected" : "unknown";
}

const MEANING = {
  annotated: "annotated",
  unannotated: "there, not annotated",
  expected: "expected, not annotated",
  negative: "not there",
  unknown: "not annotated",
};

const dot = (name) => el("span", { className: `dot ${name}`, title: MEANING[name] });
const tick = () => el("span", { className: "mark", title: "expected positive" }, "✓");

export const badges = (pair) => el("span", { className: "badges" }, dot(kind(pair)), pair.expected ? tick() : null);

// Only what is on the page: the kinds of these pairs, and heat if there is any.
export function legend(pairs, hasHeat) {
  const kinds = Object.keys(MEANING).filter((name) => pairs.some((pair) => kind(pair) === name));
  return el("span", { className: "legend" },
    kinds.map((name) => el("span", {}, dot(name), MEANING[name])),
    pairs.some((pair) => pair.expected) ? el("span", {}, tick(), "expected") : null,
    hasHeat ? heatBar() : null);
}

export const given = (pair, names) =>
  pair.given.length ? pair.given.map((number) => names[number]).join(", ") + (pair.more_given ? ` and ${plain(pair.more_given)} more` : "") : "none";
