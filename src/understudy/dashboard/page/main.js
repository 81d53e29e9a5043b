// The frame of the page: chooses the target and the view, and passes on changes.

import { get, listen, post, ApiError } from "./api.js";
import { empty, fill, h } from "./dom.js";

const VIEWS = {
  overview: ["Overview", "M4 19V11M10 19V5M16 19v-9M22 19V8"],
  episodes: ["Episodes", "M4 4h7v7H4zM13 4h7v7h-7zM4 13h7v7H4zM13 13h7v7h-7z"],
  interventions: ["Interventions", "M12 3v8M8 6v6M16 6v6M20 9v5a8 8 0 0 1-16 0v-3"],
  replay: ["Replay", "M4 7c0-2 16-2 16 0s-16 2-16 0zm0 0v10c0 2 16 2 16 0V7M4 12c0 2 16 2 16 0"],
  cluster: ["Cluster", "M4 4h16v6H4zM4 14h16v6H4zM8 7h.01M8 17h.01M12 10v4"],
  health: ["Health", "M3 12h4l3-8 4 16 3-8h4"],
  runs: ["Runs", "M4 18c4 0 4-12 8-12s4 8 8 8M4 12c5 0 5-6 8-6"],
};
const STAMPS = ["metrics", "inbox", "config", "health", "commit", "newest", "renewals", "being_written", "cluster"];

const side = { target: document.getElementById("target"), nav: document.getElementById("nav"), link: document.getElementById("link") };
const root = document.getElementById("view");
let targets = [];
let current = null; // { name, number, rest, view, missed: the changes while the view opens }
let stamps = [];
let showing = 0;
let connected = null; // null: not yet

async function begin() {
  if (location.hash.startsWith("#token=")) {
    const token = decodeURIComponent(location.hash.slice(7));
    history.replaceState(null, "", "#/");
    try { await post("enter", { token }); } catch (error) { return locked(error.message); }
  }
  try {
    ({ targets } = await get("targets"));
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) return locked();
    onLink(false);
    showBusy(false);
    fill(root, empty("The server cannot be reached", "Check that `understudy watch` is still running. This page tries again every two seconds."));
    setTimeout(begin, 2000);
    return;
  }
  window.addEventListener("hashchange", route);
  listen(onChange, onLink);
  route();
}

function locked(why) {
  document.body.classList.add("locked");
  showBusy(false);
  const field = h("input", { type: "password", placeholder: "token", autocomplete: "off", "aria-label": "token" });
  const form = h("form", { onsubmit: async (event) => {
    event.preventDefault();
    try { await post("enter", { token: field.value }); location.reload(); } catch (error) { problem.textContent = error.message; }
  } }, field, h("button", { class: "solid" }, "Enter"));
  const problem = h("p", { class: "bad" }, why ?? "");
  fill(root, empty("This page needs a token", "Open the full address that `understudy watch` printed, or enter the token here.", form, problem));
}

// ---- the address: #/TARGET/VIEW/REST

export function parse(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?");
  const [number = "0", name = "overview", rest = ""] = path.split("/");
  return { number: Number(number) < targets.length ? Number(number) : 0, name: name in VIEWS || name === "episode" ? name : "overview", rest, query: new URLSearchParams(query) };
}

async function route() {
  const wanted = parse(location.hash);
  if (current && current.name === wanted.name && current.number === wanted.number && current.rest === wanted.rest) {
    current.view?.move?.(wanted.query);
    return;
  }
  const turn = ++showing;
  current?.view?.close?.();
  current = { ...wanted, view: null, missed: new Set() };
  drawSide();
  drawLink();
  showBusy(true);
  root.className = `view-${wanted.name}`;
  const target = targets[wanted.number];
  document.title = `${target.name} · ${VIEWS[wanted.name]?.[0] ?? `Episode ${wanted.rest}`}`;
  try {
    const { open } = await import(`./views/${wanted.name}.js`);
    if (turn !== showing) return;
    const page = h("div", { class: "page" });
    fill(root, page);
    root.scrollTop = 0;
    const view = await open(page, { target: wanted.number, info: target, rest: wanted.rest, query: wanted.query, root });
    if (turn !== showing) return view?.close?.();
    current.view = view;
    showBusy(false);
    if (current.missed.size) view?.update?.([...current.missed], stamps[wanted.number]); // it may have read what was there before
  } catch (error) {
    if (turn === showing) failed(error);
  }
}

// While a view opens, its empty cards are hidden, which would say that there is no data.
function showBusy(busy) {
  root.setAttribute("aria-busy", String(busy));
}

function failed(error) {
  showBusy(false);
  if (error instanceof ApiError && error.status === 401) return locked();
  console.error(error);
  fill(root, h("div", { class: "page" }, empty("This view failed", error.message,
    h("button", { onclick: () => { current = null; route(); } }, "Try again"))));
}

function drawSide() {
  const { number, name } = current;
  const chooser = targets.length > 1
    ? h("select", { "aria-label": "Run or store", onchange: (event) => { location.hash = `#/${event.target.value}/${name === "episode" ? "episodes" : name}`; } },
      targets.map((target, at) => h("option", { value: String(at), selected: at === number }, target.name)))
    : h("strong", { title: targets[0].path }, targets[0].name);
  fill(side.target, chooser);
  const hasCluster = name === "cluster" || targets[number].cluster || stamps[number]?.cluster; // a run on one machine has no cluster view
  fill(side.nav, Object.entries(VIEWS).filter(([key]) => key !== "cluster" || hasCluster).map(([key, [title, path]]) => {
    const shape = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    shape.setAttribute("viewBox", "0 0 24 24");
    const line = document.createElementNS("http://www.w3.org/2000/svg", "path");
    line.setAttribute("d", path);
    shape.append(line);
    const here = key === name || (key === "episodes" && name === "episode");
    return h("a", { href: `#/${number}/${key}`, class: here ? "here" : "", "aria-current": here ? "page" : null, "data-view": key }, shape, h("span", {}, title));
  }));
}

document.getElementById("skip").addEventListener("click", () => root.focus());

// ---- changes

function onChange(received) {
  const before = stamps;
  stamps = received;
  drawLink();
  const { number } = current ?? {};
  if (number === undefined || !stamps[number]) return;
  if (!before[number]?.cluster !== !stamps[number].cluster) drawSide();
  const shown = current.name === "runs" ? [...stamps.keys()] : [number]; // that view shows all targets
  const changed = STAMPS.filter((key) => shown.some((at) => before[at]?.[key] !== stamps[at][key]));
  if (!current.view) for (const key of changed) current.missed.add(key);
  else if (changed.length) current.view.update?.(changed, stamps[number]);
}

function onLink(on) {
  connected = on;
  drawLink();
}

// The dot is about the connection; the word, about what comes through it.
function drawLink() {
  const now = stamps[current?.number];
  const [state, text] = connected === false ? ["lost", "not connected"] : !connected || !now ? ["", "loading"] : ["on", now.at_work ? "live" : "up to date"];
  side.link.className = state;
  if (side.link.lastChild.textContent !== text) side.link.lastChild.textContent = text; // it is read aloud
  side.link.title = state === "on" && !now.at_work ? "connected; nothing is running" : "";
}

begin();
