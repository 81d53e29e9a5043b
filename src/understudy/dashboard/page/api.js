// Asking the server, and hearing from it.

export class Refused extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

export async function get(path, signal) {
  const answer = await fetch(`api/${path}`, { signal });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

export async function getBytes(path, signal) {
  const answer = await fetch(`api/${path}`, { signal });
  if (!answer.ok) throw await refusal(answer);
  return answer.arrayBuffer();
}

export async function post(path, body) {
  const answer = await fetch(`api/${path}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  if (!answer.ok) throw await refusal(answer);
  return answer.json();
}

async function refusal(answer) {
  let text = answer.statusText;
  try { text = (await answer.json()).detail ?? text; } catch { /* not JSON */ }
  return new Refused(answer.status, text);
}

// Calls `heard` with what changed in each place, and `linked` with whether the server is there.
export function listen(heard, linked) {
  let source = null, timer = null, last = 0;
  const open = () => {
    source = new EventSource("api/live");
    source.onopen = () => { last = Date.now(); linked(true); };
    source.onmessage = (event) => { last = Date.now(); heard(JSON.parse(event.data)); };
    source.onerror = () => {
      linked(false);
      if (source.readyState === EventSource.CLOSED) { clearTimeout(timer); timer = setTimeout(open, 2000); }
    };
  };
  open();
  return () => { clearTimeout(timer); source.close(); };
}

// A delete, restore or label; who asks is remembered in this browser.
export function ask(place, wish) {
  return post(`${place}/ask`, { ...wish, who: localStorage.getItem("who") ?? "" });
}
