// The selection of tiles, by click, shift and keyboard, and the bar that answers for all of them at once.

import { answer, give, needsToken, notSaved, personField, personOf, undoing } from "./answers.js";
import { el, mayWrite, plain } from "./dom.js";

export const KEYS = {
  "x, Space": "select the tile in focus; with Shift up to it", "Shift + ← → ↑ ↓": "select while moving", "a": "select all, or none",
  "y, n": "answer for the selected tiles, or the one in focus: the class that they name is there, or not", "u": "undo the last answers",
  "Esc": "select nothing",
};
let grid = null;
let bar = null;
let page = null;
let chosen = new Set();
let anchor = 0;
const given = [];

// `shown` has the run, its number, and the pairs in the order of the tiles.
export function selectable(tiles, shown) {
  [grid, page, chosen, anchor] = [tiles, shown, new Set(), 0];
  bar = el("div", { className: "bulk", role: "region", ariaLabel: "answers for selected tiles" });
  grid.addEventListener("click", clicked, true);
  page.items.forEach(mark);
  draw();
  return bar;
}

const tileAt = (position) => grid.children[position];
export const focused = () => [...grid.children].findIndex((tile) => tile.contains(document.activeElement));

// A click on a box selects; on an image it does so with Shift, or when there is a selection, and else opens it, as Enter
// (a click without a button, whose detail is 0) always does.
function clicked(event) {
  const position = [...grid.children].indexOf(event.target.closest(".tile"));
  const isBox = event.target.matches(".pick");
  if (position < 0 || event.ctrlKey || event.metaKey || !(isBox || (event.detail && (event.shiftKey || chosen.size)))) return;
  const on = isBox ? event.target.checked : !chosen.has(position);
  if (!isBox) event.preventDefault();
  event.stopPropagation();
  if (event.shiftKey) select(range(anchor, position), true);
  else select([position], on);
  anchor = position;
}

const range = (from, to) => Array.from({ length: Math.abs(to - from) + 1 }, (_, step) => Math.min(from, to) + step);

function select(positions, on) {
  positions.forEach((position) => (on ? chosen.add(position) : chosen.delete(position)));
  draw();
}

export function extend(from, to) {
  select([from, to].filter((position) => position >= 0), true);
  anchor = to;
}

export function selectAll(on = chosen.size < page.items.length) {
  select(range(0, page.items.length - 1), on);
}

function draw(said = "") {
  [...grid.children].forEach((tile, position) => {
    tile.classList.toggle("chosen", chosen.has(position));
    tile.querySelector(".pick").checked = chosen.has(position);
  });
  grid.classList.toggle("choosing", chosen.size > 0);
  const button = (text, key, act, className = "") => el("button", { type: "button", className, onclick: act }, text, el("kbd", {}, key));
  const error = needsToken();
  bar.hidden = !(chosen.size || given.length || said);
  bar.replaceChildren(
    el("strong", {}, chosen.size ? `${plain(chosen.size)} selected` : ""),
    ...(chosen.size && !error ? [button("there", "y", () => answerAll(true), "answer yes"), button("not there", "n", () => answerAll(false), "answer no")] : [error ?? ""]),
    chosen.size ? button("clear", "Esc", () => selectAll(false)) : "",
    el("span", { role: "status", className: "faint" }, said),
    given.length ? button("undo", "u", undo) : "",
    error ? "" : personField(page.run));
}

function mark(pair, position) {
  const said = { true: "yes", false: "no" }[pair.answer];
  const tile = tileAt(position);
  tile.querySelector(".said")?.remove();
  if (said) tile.querySelector(".frame").append(el("span", { className: `said ${said}`, title: `answered by ${pair.who}` }, said === "yes" ? "✓ yes" : "✗ no"));
}

// Answers: all at once in one request, and shown before they are saved.

function answerAll(yes) {
  const positions = chosen.size ? [...chosen] : [focused()].filter((position) => position >= 0);
  if (!positions.length || !mayWrite()) return draw();
  const pairs = positions.map((position) => page.items[position]);
  const done = { ...page, pairs, old: pairs.map((pair) => ({ ...pair })) };
  given.push(done);
  chosen.clear();
  set(pairs, () => ({ answer: yes, who: personOf(page.run) }));
  draw(`${plain(pairs.length)} answered ${yes ? "yes" : "no"}`);
  return give(page.run, page.number, pairs.map((pair) => answer(pair, yes))).catch((error) => {
    given.splice(given.indexOf(done), 1);
    failed(error, done);
  });
}

function undo() {
  const done = given.pop();
  if (!done) return;
  set(done.pairs, (_, number) => done.old[number]);
  draw(`${plain(done.pairs.length)} undone`);
  give(done.run, done.number, done.old.map((pair) => undoing(done.run, pair))).catch((error) => {
    given.push(done);
    failed(error, done);
  });
}

function failed(error, done) {
  set(done.pairs, (_, number) => done.old[number]);
  draw();
  bar.hidden = false;
  bar.prepend(notSaved(error));
}

// The tiles may be made anew meanwhile: what is shown of the same pairs changes.
function set(pairs, values) {
  pairs.forEach((pair, number) => {
    const { answer: yes, who } = values(pair, number);
    Object.assign(pair, { answer: yes, who });
    const position = page.items.findIndex((item) => item.row === pair.row && item.class === pair.class);
    if (position < 0) return;
    Object.assign(page.items[position], { answer: yes, who });
    mark(page.items[position], position);
  });
}

export function key(event) {
  const position = focused();
  const isBox = event.target.matches?.(".pick");
  if (event.key === "y" || event.key === "n") answerAll(event.key === "y");
  else if (event.key === "u") undo();
  else if (event.key === "a") selectAll();
  else if (event.key === "Escape" && chosen.size) selectAll(false);
  else if ((event.key === "x" || event.key === "X" || (event.key === " " && !isBox)) && position >= 0) {
    if (event.shiftKey) select(range(anchor, position), true);
    else select([position], !chosen.has(position));
    anchor = position;
  } else return false;
  return true;
}
