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
  const answer = await response.json().catch(() => ({ error: `the server answered ${response.status}` }));
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

export function url(path, parameters) {
  const kept = Object.entries(parameters).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return `/api/${path}?${new URLSearchParams(kept)}`;
}

export const thumbnail = (run, row, side, data) => url("thumbnail", { run, row, side, data });

// An image in the room that its parent leaves, at its own proportion, with whatever lies over it.
export function picture(source, alt, ...over) {
  const frame = el("span", { className: "picture" }, el("span", { className: "layers" },
    el("img", { src: source, alt, decoding: "async", onload: ({ target }) => {
      frame.style.setProperty("--ratio", target.naturalWidth / target.naturalHeight);
    } }), ...over));
  return frame;
}

// What is wider than its room scrolls, shows at its edges that it does, and can be scrolled with the keyboard.
export function scrolls(element) {
  const look = () => {
    const hidden = element.scrollWidth - element.clientWidth;
    element.classList.toggle("more-left", element.scrollLeft > 1);
    element.classList.toggle("more-right", hidden - element.scrollLeft > 1);
    if (hidden > 1) element.tabIndex = 0;
    else element.removeAttribute("tabindex");
  };
  element.classList.add("scrolls");
  element.addEventListener("scroll", look, { passive: true });
  new ResizeObserver(look).observe(element);
  return element;
}

export const tableOf = (name, ...children) =>
  scrolls(el("div", { className: "table", role: "region", ariaLabel: name }, el("table", {}, ...children)));

// A long remark: closed on a phone, where it would be most of the screen.
export const remark = (title, text) =>
  el("details", { className: "note", open: innerWidth > 720 }, el("summary", {}, title), el("p", {}, text));

export function notice(text) {
  const line = document.getElementById("notice");
  line.textContent = text;
  line.hidden = !text;
}

export const percent = (share) => (share === null || share === undefined ? "–" : `${(100 * share).toFixed(1)}`);
export const plain = (number) => number.toLocaleString("en");

export function size(bytes) {
  if (bytes === null || bytes === undefined) return "–";
  const units = ["B", "KB", "MB", "GB", "TB"];
  const step = bytes < 1 ? 0 : Math.min(4, Math.floor(Math.log10(bytes) / 3));
  return `${(bytes / 1000 ** step).toPrecision(3)} ${units[step]}`;
}
