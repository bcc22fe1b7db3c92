// Elements, the state in the address, and requests. Text from the server only ever becomes a text node.

export function el(tag, properties = {}, ...children) {
  const svg = ["svg", "path", "line", "text", "g", "rect", "circle", "title"].includes(tag);
  const element = svg ? document.createElementNS("http://www.w3.org/2000/svg", tag) : document.createElement(tag);
  for (const [name, value] of Object.entries(properties)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(element.style, value);
    else if (name in element && !svg && name !== "list") element[name] = value;
    else element.setAttribute(name, value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// The state: parameters of the address. `go` makes a new entry of the history, `change` replaces the current one.

export const state = () => Object.fromEntries(new URLSearchParams(location.search));

export function address(changes, base = state()) {
  const merged = { ...base, ...changes };
  const kept = Object.entries(merged).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `/?${new URLSearchParams(kept)}`;
}

export function go(changes, base) {
  history.pushState(null, "", address(changes, base));
  dispatchEvent(new Event("state"));
}

export function change(changes) {
  history.replaceState(null, "", address(changes));
}

export const link = (changes, base, properties, ...children) =>
  el("a", {
    href: address(changes, base),
    onclick: (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey || event.button) return;
      event.preventDefault();
      go(changes, base);
    },
    ...properties,
  }, ...children);

// Requests

if (location.hash.length > 20) {
  sessionStorage.setItem("token", location.hash.slice(1));
  history.replaceState(null, "", location.pathname + location.search);
}
export const mayWrite = () => sessionStorage.getItem("token") !== null;

export async function ask(path, parameters = {}) {
  return answerOf(await fetch(url(path, parameters)));
}

export async function send(path, value) {
  const headers = { "Content-Type": "application/json", "X-Bigscl-Token": sessionStorage.getItem("token") ?? "" };
  return answerOf(await fetch(url(path, {}), { method: "POST", headers, body: JSON.stringify(value) }));
}

async function answerOf(response) {
  const found = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(found.error);
  return found;
}

export function url(path, parameters) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `/api/${path}?${new URLSearchParams(kept)}`;
}

export const thumbnail = (run, row, side, data) => url("thumbnail", { run, row, side, data });

// A large picture is as high as its room allows, and keeps its proportion, with whatever lies over it.
export function large(source, name, ...over) {
  const picture = el("div", { className: "picture large" },
    el("img", { src: source, alt: name, onload: (event) => {
      picture.style.setProperty("--ratio", event.target.naturalWidth / event.target.naturalHeight);
    } }), ...over);
  return picture;
}

export function notice(text) {
  const place = document.getElementById("notice");
  place.textContent = text;
  place.hidden = !text;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)}`);
export const plain = (number) => number.toLocaleString("en");

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  const step = bytes < 1 ? 0 : Math.min(4, Math.floor(Math.log10(bytes) / 3));
  return `${(bytes / 1000 ** step).toPrecision(3)} ${units[step]}`;
}

// What the labels say of a class in an image: colours are those of `bigscl render`.

export function kind(one) {
  if (one.annotated) return "annotated";
  if (one.present) return "unannotated";
  if (one.absent || (one.present === false && one.known !== false)) return "negative";
  return one.expected ? "expected" : "unknown";
}

export const MEANING = {
  annotated: "annotated",
  unannotated: "there, not annotated",
  expected: "expected, not annotated",
  negative: "not there",
  unknown: "not annotated",
};

export const badges = (one) =>
  el("span", { className: "badges" },
    el("span", { className: `dot ${kind(one)}`, title: MEANING[kind(one)] }),
    one.expected ? el("span", { className: "mark", title: "expected positive" }, "✓") : null);
