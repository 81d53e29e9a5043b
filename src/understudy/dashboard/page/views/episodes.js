// Episodes: all of them as thumbnails; filters are queries on the catalog.

import { get } from "../api.js";
import { stack } from "../chart.js";
import { empty, fill, h, throttle } from "../dom.js";
import { ago, count, plural, WHO } from "../format.js";
import { Grid } from "../grid.js";
import { labelDialog } from "../labels.js";
import { editEpisodes } from "../toast.js";

const CHOICES = {
  success: [["yes", "success"], ["no", "failure"], ["unknown", "no outcome"]],
  source: WHO.map((who) => [who, `by ${who}`]),
  time: [["3600", "last hour"], ["86400", "last day"], ["604800", "last week"]],
  deleted: [["only", "deleted only"], ["all", "with deleted"]],
  sort: [["newest", "newest first"], ["oldest", "oldest first"], ["longest", "longest first"], ["shortest", "shortest first"], ["reward", "most reward"], ["human", "most human steps"]],
};
const FACETS = ["task", "kind", "actor", "operator", "label", "state", "split", "value"];
const TITLES = { task: "any task", kind: "any kind", actor: "any actor", operator: "any operator", label: "any label", state: "any state", split: "any split", value: "any mean value", success: "any outcome", source: "any source", time: "any time", deleted: "not deleted", sort: "" };

export async function open(page, { target, query, root, info }) {
  let wanted = new URLSearchParams(query), upto = 0, newest = 0, store = "", controller = new AbortController();
  const selected = new Set();
  let anchor = null;
  const search = h("input", { type: "search", placeholder: "Search text, labels, number", "aria-label": "Search", value: wanted.get("text") ?? "", oninput: () => choose("text", search.value) });
  const selects = Object.fromEntries([...FACETS, ...Object.keys(CHOICES)].map((name) => [name, h("select", { "aria-label": name, "data-filter": name, onchange: (event) => choose(name, event.target.value) })]));
  const summary = h("div", { class: "count", role: "status" }), fresh = h("button", { class: "fresh", hidden: true, onclick: () => follow() });
  const clear = h("button", { class: "plain", hidden: true, onclick: () => { wanted = new URLSearchParams(); search.value = ""; apply(); } }, "Clear filters");
  const bar = h("div", { class: "selection", hidden: true }), none = h("div", {});
  const more = h("button", { class: "plain filters", "aria-expanded": "false", onclick: () => { const open = tools.classList.toggle("open"); more.setAttribute("aria-expanded", String(open)); } }, "Filters");
  const tools = h("div", { class: "tools" }, search, more, h("div", { class: "selects" }, Object.values(selects)));
  const grid = new Grid({ scroller: root, makeCard, fillCard, fetchPage: (offset, limit) => get(`${target}/episodes?${parameters()}&offset=${offset}&limit=${limit}`, controller.signal) });
  fill(page, h("div", { class: "head sticky" }, h("div", { class: "title" }, h("h1", {}, "Episodes"), summary, fresh, clear), tools), none, grid.node, bar);

  function parameters() {
    const sent = new URLSearchParams(wanted);
    const time = sent.get("time");
    sent.delete("time");
    if (time) sent.set("since_s", String(Math.floor(Date.now() / 1000) - Number(time)));
    if (upto) sent.set("upto", String(upto));
    return sent.toString();
  }

  function choose(name, value) {
    if (value) wanted.set(name, value); else wanted.delete(name);
    apply();
  }

  function apply() {
    history.replaceState(null, "", `#/${target}/episodes${wanted.size ? `?${wanted}` : ""}`);
    selected.clear();
    drawBar();
    root.scrollTop = 0;
    upto = 0;
    load();
  }

  async function load() {
    controller.abort();
    controller = new AbortController();
    try {
      const first = await grid.reset();
      if (!first) return;
      ({ newest, store } = first);
      if (!upto) upto = newest; // newer episodes would shift the list
      summary.textContent = first.absent ? "" : `${plural(first.total, "episode")} · ${plural(first.steps, "step")}`;
      summary.dataset.total = first.total;
      clear.hidden = !wanted.size;
      fresh.hidden = newest <= upto;
      fill(none, first.total ? null : nothing(first));
      drawSelects();
    } catch (error) {
      if (error.name !== "AbortError") throw error;
    }
  }

  function nothing(first) {
    if (wanted.size) return empty("No episode matches", "Remove a filter or two.", h("button", { onclick: () => clear.click() }, "Clear filters"));
    return empty(first.absent ? "There is no store yet" : "The store is empty", "Episodes appear here while they are recorded. To record some:", h("pre", {}, `understudy record ${info.run ? `${info.path}/store` : info.path} --env toy:pick_red --successes 5`));
  }

  function follow() {
    upto = 0;
    load();
  }

  // ---- filters

  let facets = {};
  async function drawFacets() {
    facets = await get(`${target}/facets`);
    drawSelects();
  }

  function drawSelects() {
    for (const [name, select] of Object.entries(selects)) {
      const now = wanted.get(name) ?? "";
      const options = name in CHOICES ? CHOICES[name] : (facets[name] ?? []).map(([value, number]) => [value ?? "(none)", `${value ?? `no ${name}`} (${count(number)})`]);
      if (now && !options.some(([value]) => value === now)) options.unshift([now, now]);
      select.hidden = !(name in CHOICES) && options.length < (name === "label" || name === "value" ? 1 : 2) && !now;
      select.classList.toggle("set", Boolean(now) && !(name === "sort" && now === "newest"));
      if (document.activeElement !== select || select.options.length < 2) fill(select, TITLES[name] ? h("option", { value: "" }, TITLES[name]) : null, options.map(([value, text]) => h("option", { value, selected: value === now }, text)));
    }
  }

  // ---- cards

  function makeCard() {
    const image = h("img", { alt: "", decoding: "async", draggable: "false" });
    const node = h("a", { class: "episode" }, h("div", { class: "pic" }, image, h("span", { class: "nopic" }), h("span", { class: "mark" }), h("button", { class: "pick", "aria-label": "Select", "aria-pressed": "false", onclick: (event) => pick(event, node) })),
      h("div", { class: "who" }), h("div", { class: "line" }, h("b", {}), h("span", {})), h("div", { class: "line soft" }, h("span", {}), h("span", {})));
    node.image = image;
    image.addEventListener("error", () => node.classList.add("blank"));
    node.addEventListener("click", (event) => { if (selected.size || event.shiftKey) pick(event, node); });
    node.addEventListener("pointermove", (event) => scrub(event, node));
    node.addEventListener("pointerleave", () => { if (node.episode && node.scrubbed) { node.scrubbed = null; node.image.src = source(node.episode); } });
    return node;
  }

  const source = (row, at) => `api/${target}/thumbnail/${row.id}?v=${store}-${row.num_rows}${at === undefined ? "" : `&at=${at}`}`;

  function scrub(event, node) { // moving the mouse over a thumbnail moves through the episode
    const row = node.episode;
    if (!row?.cameras.length || event.pointerType !== "mouse" || event.buttons) return;
    const box = node.image.parentNode.getBoundingClientRect();
    const at = Math.round(10 * Math.min(Math.max((event.clientX - box.left) / box.width, 0), 1)) / 10;
    if (at !== node.scrubbed) { node.scrubbed = at; node.image.src = source(row, at); }
  }

  function fillCard(node, row, settled) {
    node.classList.toggle("loading", !row);
    if (!row) {
      node.episode = null;
      node.removeAttribute("href");
      node.image.removeAttribute("src");
      for (const one of node.querySelectorAll(".line > *")) one.textContent = "";
      return;
    }
    const had = node.episode;
    node.episode = row;
    node.href = `#/${target}/episode/${row.id}`;
    node.dataset.id = row.id;
    node.classList.toggle("selected", selected.has(row.id));
    const box = node.querySelector(".pick");
    box.setAttribute("aria-label", `Select episode ${row.id}`);
    box.setAttribute("aria-pressed", String(selected.has(row.id)));
    node.classList.toggle("deleted", row.deleted);
    node.classList.toggle("pending", row.pending);
    const hasImage = row.cameras.length && row.num_rows;
    if (had?.id !== row.id || had?.num_rows !== row.num_rows || !node.image.getAttribute("src")) {
      node.classList.toggle("blank", !hasImage);
      if (hasImage && settled) node.image.src = source(row); else node.image.removeAttribute("src");
    }
    const [pic, who, top, low] = node.children;
    pic.children[1].textContent = hasImage ? "" : `${row.num_steps}`;
    const mark = pic.children[2];
    mark.className = `mark ${row.state === "open" ? "now" : row.success === true ? "good" : row.success === false ? "bad" : ""}`;
    mark.textContent = row.pending ? (row.deleted ? "will be deleted" : "edit pending") : row.deleted ? "deleted" : row.state === "open" ? "now" : row.success === true ? "success" : row.success === false ? "failure" : row.state === "cut" ? "cut" : "";
    mark.hidden = !mark.textContent;
    fill(who, stack(WHO.map((name) => [name, row[`num_${name}`], `var(--${name})`])));
    top.children[0].textContent = row.task ?? "no task";
    top.children[1].textContent = `#${row.id}`;
    const tags = Object.keys(row.labels);
    low.children[0].textContent = tags.length ? tags.join(", ") : row.kind;
    low.children[0].className = tags.length ? "tags" : "";
    low.children[1].textContent = `${count(row.num_steps)} steps`;
    node.setAttribute("aria-label", `Episode ${row.id}, ${row.task ?? "no task"}, ${row.kind}, ${mark.textContent || "no outcome"}, ${plural(row.num_steps, "step")}`);
    node.title = `#${row.id} ${row.task ?? ""}, ${row.kind}, ${ago(row.begun_at)}`;
  }

  // ---- selection

  function pick(event, node) {
    event.preventDefault();
    event.stopPropagation();
    if (!node.episode) return;
    const index = node.index;
    if (event.shiftKey && anchor !== null) {
      for (let at = Math.min(anchor, index); at <= Math.max(anchor, index); at++) if (grid.row(at)) selected.add(grid.row(at).id);
    } else if (!selected.delete(node.episode.id)) selected.add(node.episode.id);
    anchor = index;
    grid.refresh();
    drawBar();
  }

  function drawBar() {
    bar.hidden = !selected.size;
    page.classList.toggle("picking", selected.size > 0);
    const episodes = [...selected], named = plural(episodes.length, "episode");
    const reload = () => { selected.clear(); drawBar(); refresh(); };
    const deleted = [...grid.cards.values()].some((card) => card.episode?.deleted && selected.has(card.episode.id));
    fill(bar, h("b", {}, `${named} selected`), h("span", { class: "fill" }),
      h("button", { onclick: () => labelDialog(named, (labels, text) => editEpisodes(target, { action: "label", episodes, labels }, `${named} ${text}`, reload), (facets.label ?? []).map(([name]) => name)) }, "Label"),
      deleted ? h("button", { onclick: () => editEpisodes(target, { action: "restore", episodes }, `${named} restored`, reload) }, "Restore") : null,
      h("button", { class: "bad", onclick: () => editEpisodes(target, { action: "delete", episodes }, `${named} deleted`, reload) }, "Delete"),
      h("button", { class: "plain", onclick: () => { selected.clear(); grid.refresh(); drawBar(); } }, "Cancel"));
  }

  const keys = (event) => {
    if (event.target.matches("input, select, textarea")) return;
    if (event.key === "Escape" && selected.size) { selected.clear(); grid.refresh(); drawBar(); }
    if (event.key === "/") { event.preventDefault(); search.focus(); }
  };
  window.addEventListener("keydown", keys);

  const refresh = throttle(400, () => load().then(drawFacets).catch(() => {}));
  await load();
  drawFacets().catch(() => {}); // after the thumbnails
  return {
    update(changed, stamps) {
      if (changed.includes("inbox")) refresh();
      if (!changed.includes("commit")) return;
      if (stamps.newest > upto && (root.scrollTop > 0 || selected.size)) {
        fresh.hidden = false;
        fresh.textContent = `${plural(stamps.newest - upto, "new episode")}`;
      } else { upto = 0; refresh(); }
    },
    move(next) { if (next.toString() !== wanted.toString()) { wanted = new URLSearchParams(next); search.value = wanted.get("text") ?? ""; apply(); } },
    close() { controller.abort(); grid.close(); window.removeEventListener("keydown", keys); },
  };
}
