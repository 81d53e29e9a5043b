// The page: shows what the server sends, and reports what is held. What a key means is decided by the server.
"use strict";

const $ = (id) => document.getElementById(id);
const LETTERS = ["QWERTYUIOP", "ASDFGHJKL"];
const TOUCH = matchMedia("(pointer: coarse)"); // buttons for fingers are shown instead of keys
const MAX_SPARE = 180; // pixels by which those buttons grow, where the cameras leave room
const NO_PAD = { sticks: [0, 0, 0, 0], buttons: new Array(17).fill(0) };

const name = Array.from(crypto.getRandomValues(new Uint8Array(12)), (x) => x.toString(16).padStart(2, "0")).join("");
const token = new URLSearchParams(location.hash.slice(1)).get("token");

let socket = null;
let controls = null; // the server's key bindings
let known = new Set(); // the codes of keys that mean something
let state = { you_drive: false, free: false, driving: false, closed: false, speed: 1, num_pages: 0 };
let info = {};
let episode = -1;
let sources = []; // of each step of this episode
let refusal = null; // why the server refused this page
let ended = null; // what the program said when it closed the page, until another one serves it
let beat = null;

const held = new Set(); // codes of keys that are down, a finger on the screen included
let pad = NO_PAD;

// ---- the socket

function connect() {
  const url = new URL("socket", location.href.split("#")[0]);
  url.protocol = location.protocol === "https:" ? "wss:" : "ws:";
  socket = new WebSocket(url);
  socket.binaryType = "arraybuffer";
  socket.onopen = () => send({ type: "hello", page: name, token });
  socket.onmessage = ({ data }) => (typeof data === "string" ? receive(JSON.parse(data)) : show(data));
  socket.onclose = ({ code, reason }) => {
    controls = null;
    clearInterval(beat);
    letGo();
    if (code === 1001) ended = reason || "The session has ended";
    if (code === 1008) refusal = reason;
    else setTimeout(connect, 1000);
    render();
  };
}

function send(message) {
  if (socket.readyState === WebSocket.OPEN) socket.send(JSON.stringify(message));
}

function receive(message) {
  if (message.type === "ping") {
    send({ type: "pong", sent_s: message.sent_s, page_ms: performance.now() });
    $("hand").textContent = ms(message.input_ms);
    $("image").textContent = ms(message.image_ms);
    $("round-trip").textContent = ms(message.round_trip_ms);
  } else if (message.type === "welcome") {
    controls = message.controls;
    ended = null;
    clearInterval(beat);
    beat = setInterval(report, message.expiry_ms / 4);
    drawControls();
  } else if (message.type === "state") {
    if (state.you_drive && !message.you_drive) letGo();
    state = message;
  }
  if (message.type !== "ping") render();
}

const ms = (value) => (value == null ? "–" : `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`);

// ---- what is held

function report(made = performance.now()) {
  if (controls && state.you_drive) send({ type: "input", made_ms: made, keys: [...held], ...pad });
}

function press(code, made) {
  if (held.has(code)) return;
  held.add(code);
  report(made);
  light(code, true);
}

function lift(code, made) {
  if (!held.delete(code)) return;
  report(made);
  light(code, false);
}

function letGo() {
  for (const code of held) light(code, false);
  held.clear();
  pad = NO_PAD;
  report();
}

function light(code, down) {
  for (const element of document.querySelectorAll(`[data-code="${code}"]`)) element.classList.toggle("down", down);
}

addEventListener("keydown", (event) => {
  if (event.ctrlKey || event.metaKey || event.altKey) return letGo(); // a shortcut of the browser
  if (!known.has(event.code)) return;
  event.preventDefault();
  if (!event.repeat) press(event.code, event.timeStamp);
});
addEventListener("keyup", (event) => lift(event.code, event.timeStamp));
addEventListener("blur", () => { letGo(); render(); });
addEventListener("focus", () => render());
addEventListener("pagehide", letGo);
document.addEventListener("visibilitychange", () => { if (document.hidden) letGo(); });
document.addEventListener("contextmenu", (event) => { if (event.target.closest("#touch")) event.preventDefault(); });

function readPad() {
  requestAnimationFrame(readPad);
  const found = document.hasFocus() && navigator.getGamepads ? [...navigator.getGamepads()].find((p) => p && p.mapping === "standard") : null;
  const now = found
    ? { sticks: found.axes.slice(0, 4).map(rounded), buttons: NO_PAD.buttons.map((_, i) => (found.buttons[i] ? rounded(found.buttons[i].value) : 0)) }
    : NO_PAD;
  if (String(now.sticks) === String(pad.sticks) && String(now.buttons) === String(pad.buttons)) return;
  pad = now;
  const made = found ? found.timestamp : 0;
  report(performance.now() - made < 100 ? made : performance.now());
}

const rounded = (value) => Math.max(-1, Math.min(1, Math.round(value * 128) / 128));

addEventListener("gamepadconnected", drawPad);
addEventListener("gamepaddisconnected", drawPad);

// ---- frames

function show(data) {
  const length = new DataView(data).getUint32(0, true);
  const frame = JSON.parse(new TextDecoder().decode(new Uint8Array(data, 4, length)));
  let offset = 4 + length;
  const images = $("cameras");
  if (images.dataset.cameras !== JSON.stringify(frame.cameras)) layOut(frame.cameras);
  frame.cameras.forEach((camera, index) => {
    const size = camera.height * camera.width;
    paint(images.children[index].firstChild, new Uint8Array(data, offset, size * 3), camera);
    offset += size * 3;
  });
  info = frame.info;
  if (frame.episode !== episode || info.step === 0) sources = [];
  episode = frame.episode;
  if (info.step > 0 && info.source) sources[info.step - 1] = info.source;
  for (const [axis, bar] of Object.entries(bars)) push(bar, frame.pushes[axis] || 0);
  render();
  requestAnimationFrame(() => send({ type: "drawn", number: frame.number }));
}

function paint(canvas, rgb, { width, height }) {
  const context = canvas.getContext("2d", { alpha: false });
  const image = context.createImageData(width, height);
  const rgba = new Uint32Array(image.data.buffer);
  for (let i = 0, j = 0; i < rgba.length; i++, j += 3) rgba[i] = 0xff000000 | (rgb[j + 2] << 16) | (rgb[j + 1] << 8) | rgb[j];
  context.putImageData(image, 0, 0);
}

function layOut(cameras) {
  $("cameras").dataset.cameras = JSON.stringify(cameras);
  $("cameras").replaceChildren(...cameras.map((camera) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: camera.width, height: camera.height });
    const figure = document.createElement("figure");
    figure.append(canvas, Object.assign(document.createElement("figcaption"), { textContent: camera.name.replaceAll("/", " ") }));
    return figure;
  }));
  fit();
}

let spare = 0; // pixels of height that the cameras have left to the buttons

// The largest size at which all images fit, side by side or in rows.
function fit() {
  const box = $("cameras");
  const figures = [...box.children];
  if (!figures.length) return;
  const gap = 14;
  const room = box.parentElement.clientHeight - $("timeline").offsetHeight - gap + spare;
  const canvases = figures.map((figure) => figure.firstChild);
  const ratio = Math.max(...canvases.map((canvas) => canvas.width / canvas.height));
  let best = 0, used = 0;
  for (let columns = 1; columns <= figures.length; columns++) {
    const rows = Math.ceil(figures.length / columns);
    const height = (room - gap * (rows - 1)) / rows;
    const width = (box.clientWidth - gap * (columns - 1)) / columns;
    const size = Math.floor(Math.min(height, width / ratio));
    if (size > best) [best, used] = [size, size * rows + gap * (rows - 1)];
  }
  for (const canvas of canvases) {
    canvas.style.height = `${best}px`;
    canvas.style.width = `${Math.floor((best * canvas.width) / canvas.height)}px`;
  }
  spare = TOUCH.matches ? Math.min(Math.max(room - used, 0), MAX_SPARE) : 0; // of the height; what is wider does not fit
  $("touch").style.setProperty("--spare", `${spare}px`);
}
new ResizeObserver(() => { fit(); drawTimeline(); }).observe(document.querySelector(".stage"));

// ---- texts

function render() {
  const [who, title, advice] = inControl();
  document.body.dataset.who = who;
  $("who").textContent = title;
  $("advice").textContent = advice;
  $("drive").hidden = !(controls && state.free && !state.you_drive);
  $("leave").hidden = !(controls && state.you_drive && state.num_pages > 1);
  $("link").classList.toggle("on", Boolean(controls));
  $("link").title = controls ? "connected" : "not connected";
  $("pages").textContent = controls && state.num_pages > 1 ? `${state.num_pages} pages open` : "";
  $("task").hidden = !info.task;
  $("task").textContent = info.task || "";
  $("instruction").textContent = info.instruction || "\u00a0";
  drawCounters();
  drawTimeline();
  if (bars.grip) push(bars.grip, state.closed ? 2 : 0);
  for (const [code, speed] of Object.entries(controls ? controls.speeds : {})) {
    for (const key of document.querySelectorAll(`[data-code="${code}"]`)) key.classList.toggle("chosen", speed === state.speed);
  }
}

function inControl() {
  if (refusal) return ["lost", "Refused", refusal];
  if (!controls && ended) return ["done", ended, "You can close this page. If you record again, it connects by itself."];
  if (!controls) return ["lost", "Not connected", "Nothing you press arrives. Trying again."];
  if (state.driving && state.you_drive) return ["human", "You are driving", controls.discard ? (TOUCH.matches ? "Success or failure ends it." : "⏎ ends it as a success, ⌫ as a failure; 0 discards it and starts again.") : "Let go to give control back."];
  if (state.driving) return ["human", "A person is driving", "You are watching."];
  const acts = { policy: "The policy acts", script: "The script acts", random: "Chance acts", human: "Holding still" };
  const title = acts[info.source] || (controls.discard && state.you_drive ? "Waiting for you" : "Nobody acts yet"); // a demonstration begins with its operator
  const who = info.source in acts ? info.source : "nobody";
  if (!controls.axes.length) return [who, title, "You are watching."];
  if (!state.you_drive) return [who, title, state.free ? "Nobody is at the controls." : "You are watching; somebody else has the controls."];
  if (!document.hasFocus()) return [who, title, `${TOUCH.matches ? "Tap" : "Click on"} this page to drive.`];
  const hold = TOUCH.matches ? "Hold a button" : who === "nobody" || who === "human" ? "Press a key" : "Hold a key";
  return [who, title, `${hold} ${who === "nobody" || who === "human" ? "to move" : "to take over"}.`];
}

const COUNTERS = { successes: "recorded" };

function drawCounters() {
  const { task, instruction, source, success, episode, step, successes, reward, ...others } = info; // the first ones are elsewhere
  const shown = Object.entries({ episode, step, successes, reward, ...others }).filter(([, value]) => value !== undefined);
  const list = $("counters");
  if (list.dataset.names !== String(shown.map(([key]) => key))) {
    list.dataset.names = String(shown.map(([key]) => key));
    list.replaceChildren(...shown.map(([key]) => {
      const box = document.createElement("div");
      box.append(Object.assign(document.createElement("dt"), { textContent: COUNTERS[key] ?? key.replaceAll("_", " ") }), document.createElement("dd"));
      return box;
    }));
  }
  shown.forEach(([, value], index) => { list.children[index].lastChild.textContent = plain(value); });
}

function plain(value) {
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number" && !Number.isInteger(value)) return value.toFixed(2);
  return String(value);
}

function drawTimeline() {
  const canvas = $("timeline");
  const style = getComputedStyle(document.body);
  canvas.width = Math.max(1, canvas.clientWidth * devicePixelRatio);
  const context = canvas.getContext("2d");
  const width = canvas.width / Math.max(100, sources.length);
  sources.forEach((source, step) => {
    context.fillStyle = style.getPropertyValue(`--${source}`) || style.getPropertyValue("--nobody");
    context.fillRect(Math.floor(step * width), 0, Math.ceil(width), canvas.height);
  });
}

let bars = {};

function push(bar, value) {
  const size = Math.min(1, Math.abs(value) / (bar.parentElement.classList.contains("grip") ? 2 : 1));
  bar.style.width = `${size * (bar.parentElement.classList.contains("grip") ? 100 : 50)}%`;
  if (!bar.parentElement.classList.contains("grip")) bar.style.left = `${value < 0 ? 50 - size * 50 : 50}%`;
}

// ---- the controls, drawn as the server describes them

function drawControls() {
  known = new Set([controls.hold, controls.success, controls.failure, ...Object.keys(controls.speeds)]);
  if (controls.grip) known.add(controls.grip);
  if (controls.discard) known.add(controls.discard);
  for (const axis of controls.axes) known.add(axis.less.key).add(axis.more.key);
  for (const arrow of controls.arrows) known.add(arrow);
  document.body.classList.toggle("watch", !controls.axes.length);
  drawBars();
  drawKeyboard();
  drawTouch();
  drawPad();
}

function drawBars() {
  bars = {};
  $("axes").replaceChildren();
  for (const axis of [...controls.axes.map((a) => a.name), ...(controls.grip ? ["grip"] : [])]) {
    const bar = document.createElement("div");
    bar.className = axis === "grip" ? "bar grip" : "bar";
    bars[axis] = document.createElement("i");
    bar.append(bars[axis]);
    $("axes").append(Object.assign(document.createElement("span"), { textContent: axis }), bar);
  }
}

function drawKeyboard() {
  const labels = { [controls.grip]: "grip" };
  for (const { less, more } of controls.axes) Object.assign(labels, { [less.key]: less.label, [more.key]: more.label });
  const board = $("keyboard");
  board.replaceChildren();
  const add = (code, cap, label, row, from, to, used = true) => {
    const key = document.createElement("div");
    key.className = used ? "key used" : "key";
    key.dataset.code = code;
    key.append(Object.assign(document.createElement("b"), { textContent: cap }));
    if (label) key.append(Object.assign(document.createElement("small"), { textContent: label }));
    key.style.gridArea = `${row} / ${from} / ${row + 1} / ${to}`;
    board.append(key);
  };
  Object.entries(controls.speeds).forEach(([code, speed], i) => add(code, code.replace("Digit", ""), `${speed * 100} %`, 1, 1 + 4 * i, 5 + 4 * i));
  if (controls.discard) add(controls.discard, "0", "discard, again", 1, 15, 25);
  add(controls.failure, "⌫", "failure", 1, 26, 34);
  add(controls.success, "⏎", "success", 1, 34, 41);
  LETTERS.forEach((letters, row) => [...letters].forEach((letter, i) => {
    const code = `Key${letter}`;
    const from = 1 + 4 * i + row;
    add(code, letter, labels[code], row + 2, from, from + 4, code in labels);
  }));
  add(controls.hold, "space", "hold to take over and stand still", 4, 8, 34);
}

function drawPad() {
  const pads = navigator.getGamepads ? [...navigator.getGamepads()].filter(Boolean) : [];
  const good = pads.find((p) => p.mapping === "standard");
  const parts = (controls ? controls.axes : []).filter((axis) => axis.pad).map((axis) => `${axis.pad} ${axis.name}`);
  const buttons = "A grip, B hold, Y speed, start success, back failure";
  if (good) $("pad").textContent = `Gamepad: ${parts.join(", ")}; ${buttons}.`;
  else if (pads.length) $("pad").textContent = "This gamepad has no standard layout, so it cannot be used.";
  else $("pad").textContent = window.isSecureContext ? "A gamepad works too: press one of its buttons." : "For a gamepad, open this page through localhost or https.";
}

function drawTouch() {
  const find = (axis) => controls.axes.find((a) => a.name === axis);
  const button = (key, label, style = "") => {
    const element = Object.assign(document.createElement("button"), { textContent: label, className: style, tabIndex: -1 });
    element.dataset.code = key;
    element.onpointerdown = (event) => {
      event.preventDefault();
      element.setPointerCapture(event.pointerId);
      press(key, event.timeStamp);
    };
    element.onpointerup = element.onpointercancel = element.onlostpointercapture = (event) => lift(key, event.timeStamp);
    return element;
  };
  const group = (style, ...children) => {
    const element = Object.assign(document.createElement("div"), { className: style });
    element.append(...children);
    return element;
  };
  const [x, y, z] = ["x", "y", "z"].map(find);
  const rest = controls.axes.filter((axis) => !(x && y && [x, y, z].includes(axis)));
  const pads = group("pads");
  if (x && y) {
    const cross = group("cross");
    for (const [{ key }, sign, area] of [[y.more, "▲", "1 / 2"], [x.less, "◀", "2 / 1"], [x.more, "▶", "2 / 3"], [y.less, "▼", "3 / 2"]]) {
      const element = button(key, sign);
      element.style.gridArea = area;
      cross.append(element);
    }
    pads.append(cross);
    if (z) pads.append(group("column", button(z.more.key, "up"), button(z.less.key, "down")));
  }
  const rows = rest.map((axis) => group("row", button(axis.less.key, axis.less.label), button(axis.more.key, axis.more.label)));
  const others = [button(controls.hold, "hold")];
  if (controls.grip) others.unshift(button(controls.grip, "grip"));
  others.push(...Object.entries(controls.speeds).map(([key, speed]) => button(key, `${speed * 100}%`)));
  const verdict = [button(controls.failure, "failure", "no"), button(controls.success, "success", "yes")];
  if (controls.discard) verdict.unshift(button(controls.discard, "discard, again"));
  $("touch").replaceChildren(pads, ...rows, group("row", ...others), group("row", ...verdict));
}

$("drive").onclick = () => send({ type: "drive" });
$("leave").onclick = () => send({ type: "leave" });

connect();
readPad();
render();
