// Questions: one image and one class at a time, answered with a key. The next images are fetched before they are asked.

import { answer, give, inOrder, needsToken, notSaved, personField } from "./answers.js";
import { address, ask, el, mayWrite, picture, plain, send, thumbnail, url } from "./dom.js";
import { bytes, given, heatBar, paint } from "./marks.js";

export const KEYS = { "y": "yes, it is there", "n": "no", "s": "skip", "u": "undo the last one", "h": "show the heat of this image, or hide it" };
const AHEAD = 6;
const TRAIL = 8;
let shown = null;

export async function show({ run, number }) {
  const page = { run, number, queue: [], done: [], counts: {}, heat: false };
  shown = page;
  await more(page);
  page.section = el("section", { className: "ask" });
  draw(page);
  return page.section;
}

const same = (a, b) => a.row === b.row && a.class === b.class;

// Questions that are shown or on their way stay first: the queue behind them follows the answers.
async function more(page) {
  page.counts = await ask("questions", { run: page.number, count: AHEAD + 2 });
  const [current] = page.queue;
  const open = page.counts.items.filter((pair) => !page.done.some((done) => same(done, pair)) && !(current && same(current, pair)));
  page.queue = (current ? [current, ...open] : open).slice(0, AHEAD);
  page.queue.forEach((pair) => { pair.image ??= Object.assign(new Image(), { src: source(page, pair) }); });
}

const source = (page, pair) => url("image", { run: page.number, row: pair.row, data: page.run.data });

function draw(page) {
  const [pair] = page.queue;
  page.section.replaceChildren(...(pair ? question(page, pair) : nothing(page)));
}

function nothing(page) {
  const isBuilt = !page.counts.progress && page.run.indexed !== null;
  return [el("h1", {}, "Questions"), el("p", { className: "empty" }, isBuilt ? "No question is left." : "The index is being built."), foot(page)];
}

function question(page, pair) {
  const canvas = el("canvas", { ariaHidden: "true" });
  if (pair.heat) paint(canvas, bytes(pair.heat), page.run.side);
  canvas.hidden = !page.heat;
  const name = el("strong", {}, page.run.classes[pair.class]);
  return [
    el("div", { className: "frame" }, picture(source(page, pair), pair.key, canvas)),
    el("div", { className: "panel" },
      el("h1", {}, ...(pair.annotated ? ["The label says ", name, ". Is it there?"] : ["Is there: ", name, "?"])),
      needsToken() ?? el("div", { className: "answers" },
        button(page, "yes", "y", "answer yes"), button(page, "no", "n", "answer no"),
        button(page, "skip", "s", "answer"), button(page, "undo", "u", "answer", !page.done.length)),
      el("div", { className: "look" },
        button(page, page.heat ? "hide heat" : "show heat", "h", "", !pair.heat), page.heat ? heatBar() : null),
      el("dl", { className: "facts" }, fact("key", pair.key), fact("given", given(pair, page.run.classes)), fact("score", pair.score.toFixed(2)), fact("hottest", pair.peak.toFixed(2))),
      foot(page)),
  ];
}

const fact = (name, value) => el("div", {}, el("dt", {}, name), el("dd", {}, value));

const button = (page, text, key, className, disabled = false) =>
  el("button", { type: "button", className, disabled, onclick: () => act(page, key) }, text, el("kbd", {}, key));

function foot(page) {
  const { yes = 0, no = 0, conflicts = 0 } = page.counts;
  return el("div", { className: "foot" },
    el("p", { className: "faint" }, `${plain(yes)} yes, ${plain(no)} no in the file`, conflicts ? `; ${plain(conflicts)} in conflict` : ""),
    mayWrite() ? personField(page.run) : null,
    el("ol", { className: "trail" }, page.done.slice(-TRAIL).reverse().map((pair) => el("li", { className: pair.said },
      el("img", { src: thumbnail(page.number, pair.row, 96, page.run.data), alt: pair.key }),
      el("span", {}, `${page.run.classes[pair.class]}: ${pair.said}`)))));
}

// Answers are sent one after the other, while the next question is already there.

function act(page, key) {
  if (key === "h") {
    page.heat = !page.heat;
    return draw(page);
  }
  if (!mayWrite()) return;
  const pair = key === "u" ? page.done.pop() : page.queue.shift();
  if (!pair) return;
  const said = key === "u" ? pair.said : { y: "yes", n: "no", s: "skipped" }[key];
  if (key === "u") page.queue.unshift(pair);
  else page.done.push({ ...pair, said });
  // Each image is clear at first.
  page.heat = false;
  draw(page);
  const yes = key === "u" ? null : said === "yes";
  saved(page, said === "skipped" ? skip(page, pair, key === "u") : give(page.run, page.number, [answer(pair, yes)]));
}

const skip = (page, { row, class: number }, again) => inOrder(() => send("skip", { run: page.number, row, class: number, again }));

function saved(page, writing) {
  writing.then(() => more(page)).then(() => { if (shown === page) draw(page); }).catch((error) => {
    if (shown !== page) return;
    page.section.prepend(notSaved(error), el("a", { href: address({}) }, "load the page again"));
  });
}

export function leave() {
  shown = null;
}

export function key(event) {
  if (!shown || !(event.key in KEYS)) return false;
  act(shown, event.key);
  return true;
}
