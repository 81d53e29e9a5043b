// Requests to the server, and its events.

export class ApiError extends Error {
  constructor(status, text) { super(text); this.status = status; }
}

export async function get(path, signal) {
  const answer = await fetch(`api/${path}`, { signal });
  if (!answer.ok) throw await apiError(answer);
  return answer.json();
}

export async function getBytes(path, signal) {
  const answer = await fetch(`api/${path}`, { signal });
  if (!answer.ok) throw await apiError(answer);
  return answer.arrayBuffer();
}

// A download: its name and its content.
export async function getFile(path) {
  const answer = await fetch(`api/${path}`);
  if (!answer.ok) throw await apiError(answer);
  const name = /filename="?([^";]+)"?/.exec(answer.headers.get("content-disposition") ?? "")?.[1] ?? "episode";
  return { name, blob: await answer.blob() };
}

export async function post(path, body) {
  const answer = await fetch(`api/${path}`, {
    method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body),
  });
  if (!answer.ok) throw await apiError(answer);
  return answer.json();
}

async function apiError(answer) {
  let text = answer.statusText;
  try { text = (await answer.json()).detail ?? text; } catch { /* not JSON */ }
  return new ApiError(answer.status, text);
}

// Calls `onChange` with the change stamps of all targets, and `onLink` with whether the server is connected.
export function listen(onChange, onLink) {
  let source = null, timer = null;
  const open = () => {
    source = new EventSource("api/events");
    source.onopen = () => { onLink(true); };
    source.onmessage = (event) => { onChange(JSON.parse(event.data)); };
    source.onerror = () => {
      onLink(false);
      if (source.readyState === EventSource.CLOSED) { clearTimeout(timer); timer = setTimeout(open, 2000); }
    };
  };
  open();
  return () => { clearTimeout(timer); source.close(); };
}

// Deletes, restores or labels episodes; this browser remembers the name of its user.
export function requestEdit(target, edit) {
  return post(`${target}/edit`, { ...edit, who: localStorage.getItem("who") ?? "" });
}
