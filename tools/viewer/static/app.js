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
const KEYS = { "1 – 4": "samples, classes, run, ask", "?": "this help", "r": "the next run" };
const WORDS = {
  annotated: "A label that training was given, or that a person has confirmed.",
  expected: "A class that the memory expects in the image: its score reaches the cut, so training does not count it as absent.",
  cut: "The score from which on a class is expected. Each class has its own, such that as many images reach it as K says.",
  mined: "Expected and not annotated: a label that was found.",
  surprise: "The highest score of an image among the classes that no label names. Sorted by it, what the labels most likely leave out comes first.",
  heat: "Where in the image the class was seen, averaged over the epochs: clear is 0, bright yellow is 1. Hottest is the highest value.",
  "Δ": "How far the score moved since the snapshot before.",
};
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
    fill(made);
    current.shown?.();
  } catch (error) {
    if (mine === turn) main.replaceChildren(el("p", { className: "failure" }, error.message));
  }
}

// Somebody who is typing in a filter keeps it when a page arrives, and the focus if nothing is typed yet.
function fill(made) {
  const field = document.activeElement;
  const form = field.closest("#main form.filters");
  const next = made.querySelector("form.filters");
  const isText = field.matches("input[name]:not([type=checkbox])");
  const typed = isText && (field.validity.badInput || field.value !== (state()[field.name] ?? ""));
  if (!form || !next || !typed) {
    main.replaceChildren(made);
    if (form && isText && !field.value) main.querySelector(`form.filters input[name=${field.name}]`)?.focus();
    return;
  }
  const shown = form.parentElement;
  [...shown.children].filter((part) => part !== form).forEach((part) => part.remove());
  shown.append(...[...made.children].filter((part) => part !== next));
}

function header() {
  const base = { run: state().run, against: state().against };
  document.title = `${PAGES[name()].title} – bigscl view`;
  document.getElementById("pages").replaceChildren(
    ...Object.entries(PAGES).filter(([, { key }]) => key).map(([page, { title, key }]) =>
      link({ page }, base, {
        className: "page",
        ariaCurrent: page === name() || (page === "samples" && name() === "sample") ? "page" : null,
        title: `key ${key}`,
      }, title)));
  document.getElementById("choice").replaceChildren(...choice());
}

function choice() {
  const run = runs[number()];
  const pick = (value, numbers, label, changes) =>
    el("label", {}, `${label} `, el("select", { onchange: ({ target }) => go(changes(target.value)) },
      numbers.map((each) => el("option", { value: each, selected: String(each) === String(value) }, each === "" ? "–" : runs[each].name))));
  return [
    runs.length > 1
      ? pick(number(), runs.map((_, each) => each), "run", (each) => ({ run: each, against: null }))
      : el("span", { className: "name" }, run.name),
    run.same_samples.length ? pick(state().against ?? "", ["", ...run.same_samples], "against", (each) => ({ against: each })) : "",
  ];
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
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  if (typing(event.target)) {
    if (event.key === "Escape") event.target.blur();
    return;
  }
  const page = Object.entries(PAGES).find(([, { key }]) => key === event.key)?.[0];
  if (page) go({ page }, { run: state().run, against: state().against });
  else if (event.key === "?") help();
  else if (event.key === "r" && runs.length > 1) go({ run: (number() + 1) % runs.length, against: null });
  else if (!current?.key?.(event)) return;
  event.preventDefault();
});

function help() {
  const dialog = document.getElementById("help");
  const list = (entries, wrap) => el("dl", {}, Object.entries(entries).map(([term, meaning]) => [el("dt", {}, wrap(term)), el("dd", {}, meaning)]));
  dialog.replaceChildren(
    el("h2", {}, "Words"), list(WORDS, (word) => word),
    el("div", { className: "keys" }, el("h2", {}, "Keys"), list({ ...KEYS, ...(current?.KEYS ?? {}) }, (key) => el("kbd", {}, key))),
    el("button", { type: "button", onclick: () => dialog.close() }, "close"));
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
