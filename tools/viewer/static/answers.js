// Answers of a person to questions about pairs of image and class: their name, sending, and what undoes them.

import { el, mayWrite, send } from "./dom.js";

let last = Promise.resolve();

// Writes reach the server in the order in which they were made, while the page is already further.
export function inOrder(write) {
  last = last.catch(() => {}).then(write);
  return last;
}

export const personOf = (run) => (localStorage.getItem("who") || run.user).trim();

export const personField = (run) =>
  el("label", { className: "person" }, "answers are those of",
    el("input", { id: "who", value: personOf(run), maxLength: 100, onchange: ({ target }) => localStorage.setItem("who", target.value) }));

export function give(run, number, answers) {
  const who = personOf(run);
  return inOrder(() => send("answers", { run: number, who, answers }));
}

export const answer = (pair, yes) => ({ row: pair.row, class: pair.class, yes });

// A later answer of a person stands: the one before is given again, and withdrawn if there was none of theirs.
export const undoing = (run, pair) =>
  answer(pair, typeof pair.answer === "boolean" && pair.who === personOf(run) ? pair.answer : null);

export const needsToken = () =>
  mayWrite() ? null : el("p", { className: "failure" }, "To answer, open the address that bigscl view printed: it has the token.");

export const notSaved = (error) => el("p", { className: "failure", role: "alert" }, `not saved: ${error.message}`);
