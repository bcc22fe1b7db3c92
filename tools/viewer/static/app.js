// The page: which part of it is shown, the choice of runs, and the keyboard.

import { ask, change, el, go, link, notice, state } from "./dom.js";
import * as askPage from "./ask.js";
import * as classesPage from "./classes.js";
import * as runPage from "./run.js";
import * as samplePage from "./sample.js";
import * as samplesPage from "./samples.js";

const PAGES = {
  samples: { title: "Samples", page: samplesPage, key: "1" },
  classes: { title: "Classes", page: classesPage, key: "2" },
  run: { title: "Run", page: runPage, key: "3" },
  ask: { title: "Ask", page: askPage, key: "4" },
  sample: { title: "Sample", page: samplePage },
};
const KEYS = { "1 – 4": "samples, classes, run, ask", "?": "these keys", "r": "the next run" };
const SECONDS_BETWEEN_LOOKS = 5;

let runs = [];
let current = null;
let turn = 0;

const main = document.getElementById("main");
const name = () => (PAGES[state().page] ? state().page : "samples");
const number = () => Math.min(runs.length - 1, Math.max(0, Number.parseInt(state().run ?? "0", 10) || 0));

async function show() {
  const mine = ++turn;
  current?.leave?.();
  current = PAGES[name()].page;
  header();
  try {
    const made = await current.show({ state: state(), runs, number: number(), run: runs[number()] });
    if (mine !== turn) return;
    place(made);
    current.shown?.();
  } catch (error) {
    if (mine === turn) main.replaceChildren(el("p", { className: "failure" }, error.message));
  }
}

// Somebody who is typing in a filter keeps it when a page arrives, and the place if nothing is typed yet.
function place(made) {
  const field = document.activeElement;
  const form = field.closest("#main form.filters");
  const next = made.querySelector("form.filters");
  const typed = field.matches("input[name]:not([type=checkbox])") && (field.validity.badInput || field.value !== (state()[field.name] ?? ""));
  if (!form || !next || !typed) {
    const empty = form && field.matches("input[name]:not([type=checkbox])") && !field.value ? field.name : null;
    main.replaceChildren(made);
    if (empty) main.querySelector(`form.filters input[name=${empty}]`)?.focus();
    return;
  }
  const shown = form.parentElement;
  [...shown.children].filter((one) => one !== form).forEach((one) => one.remove());
  shown.append(...[...made.children].filter((one) => one !== next));
}

function header() {
  const base = { run: state().run, against: state().against };
  document.title = `${PAGES[name()].title} – bigscl view`;
  document.getElementById("pages").replaceChildren(
    ...Object.entries(PAGES).filter(([, one]) => one.key).map(([page, one]) =>
      link({ page }, base, {
        className: "page",
        ariaCurrent: page === name() || (page === "samples" && name() === "sample") ? "page" : null,
        title: `key ${one.key}`,
      }, one.title)));
  document.getElementById("choice").replaceChildren(...choice());
}

function choice() {
  const run = runs[number()];
  const others = run.same_samples;
  const pick = (value, numbers, label, changes) =>
    el("label", {}, `${label} `, el("select", { ariaLabel: label, onchange: (event) => go(changes(event.target.value)) },
      numbers.map((one) => el("option", { value: one, selected: String(one) === String(value) }, one === "" ? "–" : runs[one].name))));
  const found = [];
  if (runs.length > 1) found.push(pick(number(), runs.map((_, one) => one), "run", (one) => ({ run: one, against: null })));
  else found.push(el("span", { className: "name" }, run.name));
  if (others.length) found.push(pick(state().against ?? "", ["", ...others], "against", (one) => ({ against: one })));
  return found;
}

// Progress of the index, and newer snapshots

async function look() {
  try {
    const run = runs[number()];
    const before = run.indexed;
    Object.assign(run, await ask("state", { run: number() }));
    notice(noticed(run));
    if (run.indexed !== before && ["samples", "classes"].includes(name())) await show();
  } catch (error) {
    notice(`the server does not answer: ${error.message}`);
  }
}

function noticed(run) {
  if (run.progress) return `building the index of scores: ${run.progress[0]} of ${run.progress[1]} shards`;
  if (run.failure) return run.failure;
  if (run.indexed === null) return "building the index of scores";
  return "";
}

// Keyboard

function typing(target) {
  return target.closest?.("input:not([type=range]):not([type=checkbox]), textarea, select") !== null;
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (typing(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const page = Object.entries(PAGES).find(([, one]) => one.key === event.key)?.[0];
  if (page) go({ page }, { run: state().run, against: state().against });
  else if (event.key === "?") help();
  else if (event.key === "r" && runs.length > 1) go({ run: (number() + 1) % runs.length, against: null });
  else if (!current?.key?.(event)) return;
  event.preventDefault();
});

function help() {
  const dialog = document.getElementById("help");
  const rows = Object.entries({ ...KEYS, ...(current?.KEYS ?? {}) });
  dialog.replaceChildren(
    el("h2", {}, "Keys"),
    el("dl", {}, rows.map(([key, meaning]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, meaning)])),
    el("button", { onclick: () => dialog.close() }, "close"));
  dialog.showModal();
}

document.getElementById("help-button").addEventListener("click", help);
addEventListener("popstate", show);
addEventListener("state", show);

try {
  runs = await ask("runs");
  if (Number(state().run) >= runs.length) change({ run: null });
  await show();
  await look();
  setInterval(look, 1000 * SECONDS_BETWEEN_LOOKS);
} catch (error) {
  main.replaceChildren(el("p", { className: "failure" }, error.message));
}
