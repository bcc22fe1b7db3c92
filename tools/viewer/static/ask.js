// Questions: one image and one class at a time, answered with a key. The next images are fetched before they are asked.

import { address, ask, el, large, mayWrite, plain, send, thumbnail, url } from "./dom.js";
import { bytes, paint } from "./heat.js";

export const KEYS = { "y": "yes, it is there", "n": "no", "s": "skip", "u": "undo the last one", "h": "heat on and off" };
const AHEAD = 6;
const TRAIL = 8;
let shown = null;

export async function show({ run, number }) {
  const page = { run, number, queue: [], done: [], told: {}, waiting: Promise.resolve(), busy: false };
  shown = page;
  await more(page);
  page.section = el("section", { className: "ask" });
  draw(page);
  return page.section;
}

const same = (a, b) => a.row === b.row && a.class === b.class;

// Questions that are shown or on their way stay first: the queue behind them follows the answers.
async function more(page) {
  const found = await ask("questions", { run: page.number, count: AHEAD + 2 });
  page.told = found;
  const [current] = page.queue;
  const open = found.items.filter((one) => !page.done.some((done) => same(done, one)) && !(current && same(current, one)));
  page.queue = (current ? [current, ...open] : open).slice(0, AHEAD);
  page.queue.forEach((one) => { one.image ??= Object.assign(new Image(), { src: source(page, one) }); });
}

const source = (page, one) => url("image", { run: page.number, row: one.row, data: page.run.data });

function draw(page) {
  const [one] = page.queue;
  page.section.replaceChildren(...(one ? question(page, one) : [el("p", { className: "empty" }, page.told.progress || page.run.indexed === null ? "The index is being built." : "No question is left.")]), foot(page));
}

function question(page, one) {
  const canvas = el("canvas");
  if (one.heat) paint(canvas, bytes(one.heat), page.run.side);
  const name = el("strong", {}, page.run.classes[one.class]);
  const button = (text, key, what) => el("button", { className: `answer ${what}`, onclick: () => act(page, key) }, text, " ", el("kbd", {}, key));
  return [
    el("h1", {}, ...(one.annotated ? ["The label says ", name, ". Is it there?"] : ["Is there: ", name, "?"])),
    large(source(page, one), one.key, canvas),
    el("p", { className: "faint" }, `${one.key}, score ${one.score.toFixed(2)}, hottest ${one.peak.toFixed(2)}`),
    mayWrite()
      ? el("div", { className: "answers" }, button("yes", "y", "yes"), button("no", "n", "no"), button("skip", "s", "skip"), button("undo", "u", "undo"))
      : el("p", { className: "failure" }, "To answer, open the address that bigscl view printed: it has the token."),
  ];
}

function foot(page) {
  const { yes = 0, no = 0, conflicts = 0 } = page.told;
  const who = el("input", { id: "who", value: name(page), onchange: (event) => localStorage.setItem("who", event.target.value) });
  return el("div", { className: "foot" },
    el("ol", { className: "trail" }, page.done.slice(-TRAIL).map((one) => el("li", { className: one.said },
      el("img", { src: thumbnail(page.number, one.row, 96, page.run.data), alt: "" }),
      el("span", {}, `${page.run.classes[one.class]}: ${one.said}`)))),
    el("p", { className: "faint" }, `${plain(yes)} yes, ${plain(no)} no in the file`, conflicts ? `; ${plain(conflicts)} in conflict` : "", " – answers are those of ", who));
}

const name = (page) => localStorage.getItem("who") || page.told.who || "";

// Answers are sent one after the other, while the next question is already there.

function act(page, key) {
  if (!mayWrite()) return;
  if (key === "u") return undo(page);
  const one = page.queue.shift();
  if (!one) return;
  const said = { y: "yes", n: "no", s: "skipped" }[key];
  page.done.push({ ...one, said });
  draw(page);
  later(page, said === "skipped" ? () => send("skip", pair(page, one)) : () => send("answers", { ...pair(page, one), yes: key === "y", who: name(page) }));
}

function undo(page) {
  const one = page.done.pop();
  if (!one) return;
  page.queue.unshift(one);
  draw(page);
  later(page, one.said === "skipped" ? () => send("skip", { ...pair(page, one), again: true }) : () => send("answers", { ...pair(page, one), yes: null, who: name(page) }));
}

const pair = (page, one) => ({ run: page.number, row: one.row, class: one.class });

function later(page, write) {
  page.waiting = page.waiting.then(write).then(() => more(page)).then(() => { if (shown === page) draw(page); }).catch((error) => {
    if (shown !== page) return;
    page.section.prepend(el("p", { className: "failure", role: "alert" }, `not saved: ${error.message} `, el("a", { href: address({}) }, "load the page again")));
  });
}

export function leave() {
  shown = null;
}

export function key(event) {
  if (!shown) return false;
  if (event.key === "h") shown.section.classList.toggle("cold");
  else if ("ynsu".includes(event.key)) act(shown, event.key);
  else return false;
  return true;
}
