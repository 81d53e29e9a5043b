// Makes elements: h("p", { class: "soft" }, "text", child). Data is never parsed as markup.

const SVG = "http://www.w3.org/2000/svg";

export function h(tag, props, ...children) {
  return build(document.createElement(tag), props, children);
}

export function svg(tag, props, ...children) {
  return build(document.createElementNS(SVG, tag), props, children);
}

function build(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "vars") for (const [key, item] of Object.entries(value)) node.style.setProperty(key, item);
    else if (name in PROPERTIES) node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const PROPERTIES = { value: 1, checked: 1, disabled: 1, textContent: 1, title: 1, selected: 1, hidden: 1 };

// Replaces the children of a node. Where one of them had the focus, its successor gets it.
export function fill(node, ...children) {
  const focused = node.contains(document.activeElement) ? document.activeElement : node;
  const alike = () => [...node.querySelectorAll(focused.localName)].filter((one) => label(one) === label(focused));
  const at = focused === node ? 0 : alike().indexOf(focused);
  node.replaceChildren(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  if (focused !== node && !focused.isConnected) (alike()[at] ?? alike()[0])?.focus({ preventScroll: true });
  return node;
}

const label = (node) => node.getAttribute("href") ?? node.getAttribute("aria-label") ?? node.textContent;

// A function that runs at most once in `ms`, and once more if it was called in between, or failed: there may be no next call.
export function throttle(ms, act) {
  let timer = null, again = false, running = false;
  const run = async () => {
    running = true;
    try { await act(); } catch { again = true; } finally {
      running = false;
      timer = setTimeout(() => { timer = null; if (again) { again = false; run(); } }, ms);
    }
  };
  return () => { if (running || timer !== null) again = true; else run(); };
}

export function card(title, { note, wide, tools } = {}, ...children) {
  return h("section", { class: wide ? "card wide" : "card" },
    h("header", {}, h("h2", {}, title), note ? h("span", { class: "soft" }, note) : null, tools ?? null), ...children);
}

export function empty(title, ...advice) {
  return h("div", { class: "empty" }, h("h2", {}, title), ...advice.map((line) => (typeof line === "string" ? h("p", {}, line) : line)));
}

export function tile(name, value, note, kind) {
  return h("div", { class: `tile ${kind ?? ""}` }, h("dt", {}, name), h("dd", {}, value), note ? h("small", {}, note) : null);
}
