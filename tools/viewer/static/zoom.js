// Zoom into images that show the same sample: they move together. With buttons, keys, a double click, the wheel with
// Ctrl, two fingers; what is larger than its frame is dragged.

import { el } from "./dom.js";

export const KEYS = { "+ − 0": "zoom in, out, and to the whole image" };
const MOST = 12;
const STEP = 1.5;
let frames = [];
let view = { scale: 1, x: 0, y: 0 };

// Each frame hides what is beyond it; its layers are moved. x and y are shares of the frame's size.
export function zoomable(all) {
  [frames, view] = [all, { scale: 1, x: 0, y: 0 }];
  frames.forEach(listen);
  draw();
  const button = (text, label, act) => el("button", { type: "button", ariaLabel: label, title: label, onclick: act }, text);
  return el("span", { className: "zoom", role: "group", ariaLabel: "zoom" },
    button("−", "zoom out", () => zoom(1 / STEP)), el("output", { className: "zoom-shown" }, "100%"),
    button("+", "zoom in", () => zoom(STEP)), button("whole", "whole image", () => zoom(0)));
}

// `at` stays where it is: a point of the frame, from 0 to 1.
function zoom(by, at = { x: 0.5, y: 0.5 }) {
  const scale = Math.min(MOST, Math.max(1, view.scale * by));
  const held = (offset, point) => point - ((point - offset) * scale) / view.scale;
  move({ scale, x: held(view.x, at.x), y: held(view.y, at.y) });
}

function move({ scale, x, y }) {
  const bound = (offset) => Math.min(0, Math.max(1 - scale, offset));
  view = { scale, x: bound(x), y: bound(y) };
  draw();
}

function draw() {
  for (const frame of frames) {
    const [left, top, size] = [view.x, view.y, view.scale].map((share) => `${100 * share}%`);
    Object.assign(frame.querySelector(".layers").style, { left, top, width: size, height: size });
    frame.classList.toggle("zoomed", view.scale > 1);
  }
  const shown = document.querySelector(".zoom-shown");
  if (shown) shown.textContent = `${Math.round(100 * view.scale)}%`;
}

function pointIn(frame, event) {
  const box = frame.getBoundingClientRect();
  return { x: (event.clientX - box.left) / box.width, y: (event.clientY - box.top) / box.height };
}

function listen(frame) {
  const fingers = new Map();
  frame.addEventListener("dblclick", (event) => zoom(view.scale > 1 ? 0 : STEP ** 2, pointIn(frame, event)));
  frame.addEventListener("wheel", (event) => {
    if (!(event.ctrlKey || event.metaKey)) return;
    event.preventDefault();
    zoom(Math.exp(-event.deltaY / 200), pointIn(frame, event));
  }, { passive: false });
  frame.addEventListener("pointerdown", (event) => {
    fingers.set(event.pointerId, pointIn(frame, event));
    if (view.scale > 1 || fingers.size > 1) frame.setPointerCapture(event.pointerId);
  });
  frame.addEventListener("pointermove", (event) => {
    if (!fingers.has(event.pointerId)) return;
    const old = [...fingers.values()];
    fingers.set(event.pointerId, pointIn(frame, event));
    follow(old, [...fingers.values()]);
  });
  for (const end of ["pointerup", "pointercancel"]) frame.addEventListener(end, (event) => fingers.delete(event.pointerId));
}

function follow(old, now) {
  const middle = (points, axis) => points.reduce((sum, point) => sum + point[axis], 0) / points.length;
  if (now.length === 2) {
    const apart = ([a, b]) => Math.hypot(a.x - b.x, a.y - b.y);
    zoom(apart(now) / (apart(old) || 1), { x: middle(now, "x"), y: middle(now, "y") });
  }
  move({ ...view, x: view.x + middle(now, "x") - middle(old, "x"), y: view.y + middle(now, "y") - middle(old, "y") });
}

export function key(event) {
  const by = { "+": STEP, "=": STEP, "-": 1 / STEP, "0": 0 }[event.key];
  if (by === undefined) return false;
  zoom(by);
  return true;
}
