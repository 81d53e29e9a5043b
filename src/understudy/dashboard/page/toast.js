// A line at the bottom that goes away by itself, with an undo where there is one.

import { ask } from "./api.js";
import { h } from "./dom.js";

const STAY_MS = 10000;

export function toast(text, { undo, bad } = {}) {
  const node = h("div", { class: bad ? "toast bad" : "toast" }, h("span", {}, text),
    undo ? h("button", { onclick: () => { node.remove(); undo(); } }, "Undo") : null,
    h("button", { class: "close", "aria-label": "Close", onclick: () => node.remove() }, "×"));
  document.getElementById("toasts").append(node);
  setTimeout(() => node.remove(), STAY_MS);
}

// Asks for a change of episodes, says so, and offers to take it back. `done` is called after each.
export async function change(place, wish, said, done) {
  try {
    const undo = [];
    let pending = false;
    for (let at = 0; at < wish.episodes.length; at += 5000) { // a request is a small file
      const answer = await ask(place, { ...wish, episodes: wish.episodes.slice(at, at + 5000) });
      undo.push(...answer.undo);
      pending ||= answer.pending;
    }
    toast(pending ? `${said}; the writer applies it with its next commit` : said, {
      undo: undo.length ? async () => {
        try {
          for (const back of undo) await ask(place, back);
          toast("Taken back");
        } catch (error) { toast(error.message, { bad: true }); }
        done();
      } : null,
    });
  } catch (error) {
    toast(error.message, { bad: true });
  }
  done();
}
