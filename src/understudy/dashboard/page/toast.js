// A message at the bottom that disappears after a while, with an undo if there is one.

import { requestEdit } from "./api.js";
import { h } from "./dom.js";

const STAY_MS = 10000;

export function toast(text, { undo, bad } = {}) {
  const node = h("div", { class: bad ? "toast bad" : "toast" }, h("span", {}, text),
    undo ? h("button", { onclick: () => { node.remove(); undo(); } }, "Undo") : null,
    h("button", { class: "close", "aria-label": "Close", onclick: () => node.remove() }, "×"));
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), STAY_MS);
}

// Edits episodes, shows `message`, and offers to undo it. `onChange` is called after the edit and after its undo.
export async function editEpisodes(target, edit, message, onChange) {
  try {
    const undo = [];
    let pending = false;
    for (let at = 0; at < edit.episodes.length; at += 5000) { // a request is a small file
      const answer = await requestEdit(target, { ...edit, episodes: edit.episodes.slice(at, at + 5000) });
      undo.push(...answer.undo);
      pending ||= answer.pending;
    }
    offerUndo(target, undo, pending ? `${message}; the writer applies it with its next commit` : message, onChange);
  } catch (error) {
    toast(error.message, { bad: true });
  }
  onChange();
}

// Shows `message` with an undo that sends the edits in `undo`.
export function offerUndo(target, undo, message, onChange) {
  toast(message, {
    undo: undo.length ? async () => {
      try {
        for (const back of undo) await requestEdit(target, back);
        toast("Undone");
      } catch (error) { toast(error.message, { bad: true }); }
      onChange();
    } : null,
  });
}
