// Classes: what is annotated, expected and found of each, and with what it is found.

import { ask, el, go, link, percent, plain, remark, state, tableOf } from "./dom.js";

export const KEYS = { "Enter": "open the class that is in focus" };

export async function show({ state: values, run, number }) {
  const { classes, note } = await ask("classes", { run: number });
  if (!classes) return el("p", { className: "empty" }, "The index is being built.");
  const chosen = values.class === undefined ? null : Number(values.class);
  return el("section", { className: "classes" },
    el("h1", { className: "unseen" }, "Classes"),
    totals(classes),
    remark("how far to trust what is mined", note),
    chosen === null ? null : await partners(run, number, chosen, classes),
    table(classes, run, values));
}

function totals(classes) {
  const sum = (name) => (classes[name] ? classes[name].reduce((a, b) => a + b, 0) : null);
  const facts = [["annotated", plain(sum("annotated"))], ["expected", plain(sum("expected"))], ["mined", plain(sum("mined"))]];
  if (classes.right) {
    facts.push(["precision", `${percent(sum("mined") ? sum("right") / sum("mined") : null)}%`],
      ["recall", `${percent(sum("missing") ? sum("right") / sum("missing") : null)}%`]);
  }
  return el("dl", { className: "facts" }, facts.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function table(classes, run, values) {
  const rows = run.classes.map((name, one) => ({
    one, name, annotated: classes.annotated[one], expected: classes.expected[one], mined: classes.mined[one], cut: classes.cut[one],
    precision: classes.right && classes.mined[one] ? classes.right[one] / classes.mined[one] : null,
    recall: classes.right && classes.missing[one] ? classes.right[one] / classes.missing[one] : null,
    histogram: classes.histogram[one],
  }));
  const columns = ["name", "annotated", "expected", "mined", "cut", ...(classes.right ? ["precision", "recall"] : [])];
  const by = columns.includes(values.by) ? values.by : null;
  if (by) rows.sort((a, b) => (by === "name" ? a.name.localeCompare(b.name) : (b[by] ?? -1) - (a[by] ?? -1)));
  const told = { precision: percent, recall: percent, cut: (cut) => (cut === null ? "–" : cut.toFixed(3)) };
  const cell = (row, column) => el("td", { className: column === "name" ? "" : "number" },
    column === "name"
      ? link({ class: row.one }, undefined, { className: state().class === String(row.one) ? "focus" : "" }, row.name)
      : (told[column] ?? plain)(row[column]));
  return tableOf("classes",
    el("thead", {}, el("tr", {}, columns.map((column) => el("th", { scope: "col", className: column === "name" ? "" : "number", ariaSort: by === column ? (column === "name" ? "ascending" : "descending") : null },
      el("button", { type: "button", onclick: () => go({ by: column }) }, column))), el("th", { scope: "col" }, "scores, 0 to 1"))),
    el("tbody", {}, rows.map((row) => el("tr", {}, columns.map((column) => cell(row, column)), el("td", {}, histogram(row))))));
}

function histogram({ histogram: counts, cut }) {
  // Most scores are near 0: the logarithm shows the others.
  const most = Math.max(...counts.map(Math.log1p), 1);
  const bars = counts.map((count, place) => {
    const height = (20 * Math.log1p(count)) / most;
    return el("rect", { x: (100 * place) / counts.length, y: 20 - height, width: 100 / counts.length - 0.8, height, class: "column" },
      el("title", {}, `${(place / counts.length).toFixed(2)} to ${((place + 1) / counts.length).toFixed(2)}: ${plain(count)}`));
  });
  const line = cut === null ? null : el("line", { x1: 100 * cut, x2: 100 * cut, y1: 0, y2: 20, class: "cut" }, el("title", {}, `cut ${cut.toFixed(3)}`));
  return el("svg", { class: "histogram", viewBox: "0 0 100 20", preserveAspectRatio: "none", role: "img", "aria-label": "histogram of scores" }, bars, line);
}

async function partners(run, number, chosen, classes) {
  const both = await ask("class", { run: number, class: chosen });
  const base = { run: state().run, against: state().against, page: "samples" };
  const list = (title, pairs) => {
    const most = Math.max(1, ...pairs.map(([, count]) => count));
    return el("div", {}, el("h3", {}, title), pairs.length ? el("ol", { className: "bars" }, pairs.map(([one, count]) => el("li", {},
      el("span", { className: "name" }, run.classes[one]),
      el("span", { className: "track" }, el("span", { className: "fill", style: { width: `${(100 * count) / most}%` } })),
      el("b", {}, plain(count))))) : el("p", { className: "faint" }, "none"));
  };
  return el("article", { className: "class" },
    el("h2", {}, run.classes[chosen]),
    el("p", { className: "actions" },
      link({ class: chosen, sort: "score", expected: "yes", annotated: "no" }, base, { className: "button" }, `${plain(classes.mined[chosen])} mined`),
      link({ class: chosen, sort: "score", annotated: "yes", reverse: "yes" }, base, { className: "button" }, "annotated, lowest score first"),
      classes.right ? link({ class: chosen, sort: "score", annotated: "no", expected: "no", present: "yes" }, base, { className: "button" }, "missed") : null),
    el("div", { className: "two" },
      list("mined in images that name it", both.found_with),
      list("named in images in which it is mined", both.named_with)));
}

export const key = () => false;
