// Dialogs: labels (a name, or name=value; a minus before the name removes the label), and the export of an episode.

import { get, getFile } from "./api.js";
import { fill, h } from "./dom.js";
import { toast } from "./toast.js";

export function labelDialog(what, onLabels, known = []) {
  const field = h("input", { placeholder: "good, or reason=slipped, or -good to remove it", "aria-label": "Label", list: "known-labels", maxlength: "200" });
  const who = h("input", { placeholder: "your name (optional)", "aria-label": "Your name", value: localStorage.getItem("who") ?? "", maxlength: "60" });
  const dialog = h("dialog", { class: "dialog", onclose: () => dialog.remove() }, h("form", { method: "dialog", onsubmit: () => {
    const labels = parseLabels(field.value);
    localStorage.setItem("who", who.value.trim());
    if (labels) onLabels(labels, describe(labels));
  } }, h("h2", {}, `Label ${what}`), field, h("datalist", { id: "known-labels" }, known.map((name) => h("option", { value: name }))), who,
  h("div", { class: "buttons" }, h("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Cancel"), h("button", { class: "solid" }, "Label"))));
  document.body.append(dialog);
  dialog.showModal();
  field.focus();
}

export function parseLabels(text) {
  const found = {};
  for (const part of text.split(",").map((one) => one.trim()).filter(Boolean)) {
    if (part.startsWith("-")) { found[part.slice(1).trim()] = null; continue; }
    const at = part.indexOf("=");
    if (at === 0) continue;
    found[at < 0 ? part : part.slice(0, at).trim()] = at < 0 ? "yes" : part.slice(at + 1).trim();
  }
  delete found[""];
  return Object.keys(found).length ? found : null;
}

const describe = (labels) => Object.entries(labels).map(([name, value]) => (value === null ? `label ${name} removed` : value === "yes" ? `labelled ${name}` : `labelled ${name}=${value}`)).join(", ");

// Downloads an episode in a format of another project, and says which command writes more than one.
export async function exportDialog(target, id, store) {
  const { exports } = await get("exports");
  const format = h("select", { "aria-label": "Format", onchange: () => draw() }, Object.entries(exports).map(([name, text]) => h("option", { value: name }, `${name}: ${text}`)));
  const command = h("pre", {}), button = h("button", { class: "solid" }, "Download");
  const draw = () => fill(command, format.value === "film" ? `understudy film ${store} ${id}` : `understudy export ${store} ${format.value}:PATH --where 'id = ${id}'`);
  const dialog = h("dialog", { class: "dialog", "aria-label": `Export episode ${id}`, onclose: () => dialog.remove() }, h("form", { onsubmit: async (event) => {
    event.preventDefault();
    button.disabled = true;
    fill(button, "Exporting …");
    try {
      const { name, blob } = await getFile(`${target}/export/${id}?format=${format.value}`);
      const link = h("a", { href: URL.createObjectURL(blob), download: name });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 60000);
      dialog.close();
      toast(`Episode ${id} exported: ${name}`);
    } catch (error) { dialog.close(); toast(error.message, { bad: true }); }
  } }, h("h2", {}, `Export episode ${id}`), format, h("p", { class: "soft" }, "In a terminal, also for many episodes:"), command,
  h("div", { class: "buttons" }, h("button", { type: "button", class: "plain", onclick: () => dialog.close() }, "Cancel"), button)));
  draw();
  document.body.append(dialog);
  dialog.showModal();
  format.focus();
}
