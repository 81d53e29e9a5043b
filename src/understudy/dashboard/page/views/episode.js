// Episode: its cameras, its numbers, its estimates, and the source of each action, step by step.

import { get, post } from "../api.js";
import { card, empty, fill, h, throttle } from "../dom.js";
import { EstimatesCard } from "../estimates.js";
import { bytes, clock, count, NONE, plural, short, sourceName, WHO } from "../format.js";
import { exportDialog, labelDialog } from "../labels.js";
import { CameraVideo, Lanes } from "../player.js";
import { editEpisodes, offerUndo, toast } from "../toast.js";

const SPEEDS = [2, 5, 10, 20, 50].map((value) => [value, `${value} steps/s`]);
// Labels that a run or an import writes: their words and units.
const RECORDED = { origin: "imported from", origin_digest: "digest of the original", intervention_count: "takeovers", intervention_steps: "intervention", takeover_latency_ms: "longest takeover latency", takeover_reasons: "reason of the takeover", policy_seed: "seed of the policy", clipped_steps: "actions beyond their bounds", trimmed_from: "trimmed from", split_from: "split from", merged_from: "merged from", fps: "control rate", measured_fps: "measured rate", robot_type: "robot", sensors: "samples of the sensors", late_steps: "late steps" };
const UNITS = { fps: (value) => `${value} steps per second`, measured_fps: (value) => `${value} rows per second`, sensors: sampleCounts, late_steps: (value) => plural(Number(value), "step"), intervention_steps: (value) => plural(Number(value), "step"), takeover_latency_ms: (value) => `${value} ms`, clipped_steps: (value) => plural(Number(value), "step"), origin_digest: (value) => value.slice(0, 12) };
// What the label `sensors` says, for people: "front: 900 samples, 2 dropped, 1 late".
function sampleCounts(value) {
  try {
    return Object.entries(JSON.parse(value)).map(([path, counts]) => `${path.replace("observation/", "")}: ${count(counts.received)} samples, ${count(counts.dropped)} dropped, ${count(counts.late)} late`).join("; ");
  } catch { return value; }
}
const ICONS = { play: "M8 5v14l11-7z", pause: "M7 5h4v14H7zM13 5h4v14h-4z", back: "M16 6v12l-8-6z", next: "M8 6v12l8-6z", first: "M6 6h2v12H6zM18 6v12l-9-6z", last: "M16 6h2v12h-2zM6 6v12l9-6z" };

/** The speed at which the episode was recorded, where that is known, is the one to begin with. */
function offerOwnSpeed(speed, rate) {
  if (!(rate > 0) || speed.dataset.own) return;
  speed.dataset.own = rate;
  speed.prepend(h("option", { value: String(rate) }, `${rate} steps/s, as recorded`));
  speed.value = String(rate);
}

export async function open(page, { target, rest, info }) {
  const id = Number(rest);
  let part = null; // [first, last] step that a trim would keep
  let data, videos = [], at = 0, playing = false, due = 0, frame = 0;
  const head = h("div", { class: "head" }), cameras = h("div", { class: "cameras" }), facts = h("dl", { class: "facts" }), who = h("div", { class: "who-now" });
  const jump = (index) => { stop(); seek(index); };
  const lanes = new Lanes(jump), estimates = new EstimatesCard(jump);
  const button = (name, title, act) => h("button", { class: "icon", title, "aria-label": title, onclick: act }, icon(ICONS[name]));
  const play = button("play", "Play (space)", () => toggle());
  const counter = h("output", { class: "counter" });
  const speed = h("select", { "aria-label": "Speed" }, SPEEDS.map(([value, text]) => h("option", { value: String(value), selected: value === 10 }, text)));
  const transport = h("div", { class: "transport" }, button("first", "First step (home)", () => { stop(); seek(0); }), button("back", "Step back (left)", () => { stop(); seek(at - 1); }), play,
    button("next", "Step forward (right)", () => { stop(); seek(at + 1); }), button("last", "Last step (end)", () => { stop(); seek(Infinity); }), counter, who, h("span", { class: "fill" }), speed);
  const trimmer = h("div", { class: "trimmer" });
  const viewer = h("div", { class: "viewer" }, cameras, transport, trimmer);
  const legend = h("div", { class: "legend" });
  fill(page, head, h("div", { class: "playback" }, h("div", { class: "film" }, viewer, estimates.node), h("section", { class: "card" }, h("header", {}, h("h2", {}, "Steps"), legend), lanes.node)), card("Details", { wide: true }, facts));

  async function load(first) {
    data = await get(`${target}/episode/${id}`);
    offerOwnSpeed(speed, Number(data.recorded_labels.fps));
    const { steps } = data, version = `${data.store}-${data.num_rows}`;
    if (first || videos[0]?.version !== version) {
      for (const video of videos) video.close();
      videos = Object.entries(steps.cameras).map(([camera, shape]) => new CameraVideo(target, id, camera, shape, version));
      fill(cameras, videos.length ? videos.map((video) => h("figure", {}, video.canvas, h("figcaption", {}, video.camera.replace("observation/", "")))) : h("p", { class: "soft" }, "This episode has no cameras; its numbers are below."));
    }
    const unit = blockSize(steps) > 1 ? "block" : "step";
    lanes.set(curves(steps), steps.source, unit);
    estimates.set(data.estimates, unit);
    const there = new Set(steps.source);
    fill(legend, WHO.map((name, number) => (there.has(number) ? h("span", { vars: { "--c": `var(--${name})` } }, h("i", {}), sourceName(name, data.operator)) : null)),
      Object.values(steps.curves).some((one) => one.proposal) ? h("span", { class: "dash", vars: { "--c": "var(--ink)" } }, h("i", {}), "the policy's proposal") : null);
    drawHead();
    drawFacts();
    drawTrim();
    seek(Math.min(at, last()));
  }

  const last = () => Math.max(data.steps.num_rows - 1, 0);

  function seek(index) {
    at = Math.max(0, Math.min(index, last()));
    for (const video of videos) video.show(at).catch(() => {});
    lanes.move(at);
    estimates.move(at);
    const step = Math.min(at, data.steps.source.length - 1), name = step < 0 ? "" : WHO[data.steps.source[step]];
    counter.textContent = `${at} / ${last()}`;
    const after = at > data.steps.source.length - 1;
    fill(who, h("i", { style: { background: after ? "var(--later)" : `var(--${name})` } }), after ? "end" : name === "human" && data.operator === "script" ? "script" : name, !after && data.steps.policy_version[step] >= 0 ? h("small", {}, `version ${count(data.steps.policy_version[step])}`) : null);
  }

  function toggle() {
    if (playing) return stop();
    if (at >= last()) seek(0);
    playing = true;
    due = performance.now();
    fill(play, icon(ICONS.pause));
    frame = requestAnimationFrame(tick);
  }

  function stop() {
    playing = false;
    cancelAnimationFrame(frame);
    fill(play, icon(ICONS.play));
  }

  function tick(now) {
    if (!playing) return;
    const wait = 1000 / Number(speed.value);
    if (now >= due + wait) {
      if (videos.every((video) => video.has(at + 1) || at + 1 > last())) {
        due = now - due > 3 * wait ? now : due + wait;
        if (at >= last()) return stop();
        seek(at + 1);
      } else { due = now; for (const video of videos) video.load(Math.floor((at + 1) / 32)).catch(() => {}); }
    }
    frame = requestAnimationFrame(tick);
  }

  function drawHead() {
    const reload = () => load().catch(() => {});
    const outcome = data.state === "open" ? ["now", "being recorded"] : data.success === true ? ["good", "success"] : data.success === false ? ["bad", "failure"] : ["calm", data.state === "cut" ? "cut" : "no outcome"];
    const gone = data.deleted ? h("span", { class: "pill bad" }, data.pending ? "will be deleted" : "deleted") : data.pending ? h("span", { class: "pill calm" }, "edit pending") : null;
    fill(head, h("div", { class: "title" }, h("a", { class: "back", href: `#/${target}/episodes` }, "Episodes"), h("h1", {}, `${data.task ?? "Episode"} `, h("span", { class: "soft" }, `#${id}`)), h("span", { class: `pill ${outcome[0]}` }, outcome[1]), gone,
      h("span", { class: "fill" }), step(data.before, "Older"), step(data.after, "Newer")),
    h("div", { class: "row" }, h("p", { class: "soft" }, data.instruction ?? data.kind),
      Object.entries(data.labels).map(([name, value]) => h("button", { class: "tag", title: `Remove the label ${name}`, onclick: () => editEpisodes(target, { action: "label", episodes: [id], labels: { [name]: null } }, `Label ${name} removed`, reload) }, value === "yes" ? name : `${name}=${value}`, h("i", {}, "×"))),
      judges(reload),
      h("button", { onclick: () => exportDialog(target, id, info.run ? `${info.path}/store` : info.path).catch((error) => toast(error.message, { bad: true })) }, "Export"),
      h("button", { onclick: () => labelDialog(`episode ${id}`, (labels, text) => editEpisodes(target, { action: "label", episodes: [id], labels }, `Episode ${id} ${text}`, reload)) }, "Label"),
      h("span", { class: "fill" }), // away from what is pressed often
      data.deleted ? h("button", { onclick: () => editEpisodes(target, { action: "restore", episodes: [id] }, `Episode ${id} restored`, reload) }, "Restore")
        : h("button", { class: "bad", onclick: () => editEpisodes(target, { action: "delete", episodes: [id] }, `Episode ${id} deleted`, reload) }, "Delete")));
  }

  function judges(reload) {
    const judge = (success, text) => editEpisodes(target, { action: "judge", episodes: [id], success }, `Episode ${id}: ${text}`, reload);
    const one = (success, text) => h("button", { class: "judge", "aria-pressed": String(data.success === success), title: data.success === success ? "Click again to remove this outcome" : `The episode is a ${text.toLowerCase()}`, onclick: () => (data.success === success ? judge(null, "no outcome") : judge(success, text.toLowerCase())) }, text);
    return h("span", { class: "judges", role: "group", "aria-label": "Outcome" }, one(true, "Success"), one(false, "Failure"));
  }

  // ---- trim: mark the first and the last step to keep, then make it so

  const final = () => data.steps.source.length - 1;

  function mark(edge) {
    const step = Math.min(at, final());
    const [first, end] = part ?? [0, final()];
    part = edge === "start" ? [step, Math.max(step, end)] : [Math.min(first, step), step];
    if (part[0] === 0 && part[1] === final()) part = null;
    drawTrim();
  }

  function drawTrim() {
    const may = data.state !== "open" && !data.deleted && data.steps.all_steps === data.steps.num_steps && final() > 0;
    trimmer.hidden = !may;
    lanes.keep(part);
    fill(trimmer, h("button", { onclick: () => mark("start"), title: "Drop the steps before this one ([)" }, "Start here"), h("button", { onclick: () => mark("end"), title: "Drop the steps after this one (])" }, "End here"),
      h("span", { role: "status" }, part ? `keeps steps ${count(part[0])} to ${count(part[1])} of ${count(final())}` : "to trim, mark the first or the last step to keep"), h("span", { class: "fill" }),
      part ? [h("button", { class: "solid", onclick: trim }, "Trim"), h("button", { onclick: () => { part = null; drawTrim(); } }, "Cancel")] : null);
  }

  async function trim() {
    try {
      const made = await post(`${target}/trim`, { episode: id, first: part[0], stop: part[1] + 1 });
      offerUndo(target, made.undo, `Episode ${id} is now episode ${made.episode}, with ${plural(part[1] + 1 - part[0], "step")}`, () => { location.hash = `#/${target}/episode/${id}`; });
      location.hash = `#/${target}/episode/${made.episode}`;
    } catch (error) { toast(error.message, { bad: true }); }
  }

  const step = (other, text) => (other ? h("a", { class: "button", href: `#/${target}/episode/${other}` }, text) : null);

  function drawFacts() {
    const hidden = data.operator === "script" ? ["names", "takeover_latency_ms"] : ["names"]; // a script takes over at once
    const notes = Object.entries(data.recorded_labels).filter(([name]) => !hidden.includes(name)).map(([name, value]) => [RECORDED[name] ?? name.replaceAll("_", " "), (UNITS[name] ?? String)(value)]);
    const shown = data.steps.all_steps > data.steps.num_steps ? `, the first ${count(data.steps.num_steps)} are shown` : "";
    fill(facts, [["kind", data.kind], ["steps", plural(data.num_steps, blockSize(data.steps) > 1 ? `block of up to ${blockSize(data.steps)} steps` : "step", blockSize(data.steps) > 1 ? `blocks of up to ${blockSize(data.steps)} steps` : "steps") + shown], ["source", WHO.filter((name) => data[`num_${name}`]).map((name) => `${sourceName(name, data.operator)} ${plural(data[`num_${name}`], blockSize(data.steps) > 1 ? "block" : "step")}`).join(", ") || NONE], ["total reward", short(data.total_reward)],
      ["actor", data.actor], ["operator", data.operator], ["split", data.split], ["start state", data.init_state === null ? null : `number ${data.init_state}`], ["seed", data.seed], ["group", data.group_key], ["recorded", clock(data.begun_at)], ["size", bytes(data.num_bytes)], ...notes]
      .filter(([, value]) => value !== null && value !== undefined).map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, String(value)))));
  }

  const keys = (event) => {
    if (event.target.matches("input, select, textarea") || document.querySelector("dialog[open]") || event.ctrlKey || event.metaKey || event.altKey) return;
    if (event.key === " " && event.target.matches("button, a, summary")) return; // it presses what has the focus
    const act = { ArrowRight: () => { stop(); seek(at + (event.shiftKey ? 10 : 1)); }, ArrowLeft: () => { stop(); seek(at - (event.shiftKey ? 10 : 1)); }, " ": toggle, Home: () => { stop(); seek(0); }, End: () => { stop(); seek(Infinity); }, "[": () => mark("start"), "]": () => mark("end") }[event.key];
    if (act) { event.preventDefault(); act(); }
  };
  window.addEventListener("keydown", keys);
  const close = () => { stop(); lanes.close(); for (const video of videos) video.close(); window.removeEventListener("keydown", keys); };
  try { await load(true); } catch (error) {
    close();
    if (error.status === 409) { fill(page, empty("This episode does not exist", error.message, h("a", { class: "button", href: `#/${target}/episodes` }, "All episodes"))); return {}; }
    throw error;
  }
  return { update: throttle(1000, () => (data.state === "open" || data.pending ? load() : null)), close };
}

function icon(path) {
  const shape = document.createElementNS("http://www.w3.org/2000/svg", "svg"), line = document.createElementNS("http://www.w3.org/2000/svg", "path");
  shape.setAttribute("viewBox", "0 0 24 24");
  line.setAttribute("d", path);
  shape.append(line);
  return shape;
}

// The number of actions in a row: above 1 if the policy chooses blocks of actions.
const blockSize = (steps) => steps.curves.reward?.size ?? 1;

function curves(steps) {
  const found = [], size = blockSize(steps);
  for (const [path, curve] of Object.entries(steps.curves)) {
    if (size > 1 && /^extras\/(replay|log_prob|executed)/.test(path)) continue; // one number for each token of a block
    const each = curve.size / size, wide = size > 1 && path.startsWith("action"), field = path.replace("extras/", "");
    const named = steps.names[path]?.length === each ? (at) => steps.names[path][at] : (at) => `${field} ${at + 1}`; // of the data, or numbers: never invented
    curve.values.forEach((values, at) => found.push({
      name: curve.size === 1 ? steps.names[path]?.[0] ?? field : wide ? `${Math.floor(at / each) + 1}. ${named(at % each)}` : named(at),
      title: wide ? `${path}: number ${at % each + 1} of the ${Math.floor(at / each) + 1}. step of a block` : path, values, proposal: curve.proposal?.[at], plain: !path.startsWith("action"),
    }));
  }
  return found.sort((a, b) => (a.name === "reward" ? -1 : b.name === "reward" ? 1 : 0));
}
