// Numbers and times as text.

export const NONE = "–";

export function count(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-US");
}

export function short(value) {
  if (value === null || value === undefined || Number.isNaN(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e9) return `${trim(value / 1e9)}G`;
  if (size >= 1e6) return `${trim(value / 1e6)}M`;
  if (size >= 1e4) return `${trim(value / 1e3)}k`;
  if (size >= 100 || Number.isInteger(value)) return Math.round(value).toLocaleString("en-US");
  if (size >= 1) return trim(value);
  return size === 0 ? "0" : size < 1e-3 ? value.toExponential(1) : String(Number(value.toPrecision(2)));
}

function trim(value) {
  return Math.abs(value) >= 100 ? value.toFixed(0) : String(Number(value.toFixed(1)));
}

export function percent(value, digits = 0) {
  return value === null || value === undefined ? NONE : `${(100 * value).toFixed(digits)} %`;
}

export function bytes(value) {
  if (value === null || value === undefined) return NONE;
  for (const unit of ["bytes", "kB", "MB", "GB"]) {
    if (Math.abs(value) < 1000) return unit === "bytes" ? `${value} bytes` : `${trim(value)} ${unit}`;
    value /= 1000;
  }
  return `${trim(value)} TB`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return NONE;
  if (seconds < 1) return "< 1 s";
  if (seconds < 120) return `${Math.round(seconds)} s`;
  if (seconds < 7200) return `${Math.round(seconds / 60)} min`;
  if (seconds < 172800) return `${Math.round(seconds / 3600)} h`;
  return `${Math.round(seconds / 86400)} days`;
}

export function ago(unix) {
  if (!unix) return NONE;
  const seconds = Math.max(Date.now() / 1000 - unix, 0);
  return seconds < 5 ? "just now" : `${span(seconds)} ago`;
}

export function clock(unix) {
  if (!unix) return NONE;
  const date = new Date(unix * 1000);
  const today = new Date().toDateString() === date.toDateString();
  const time = date.toLocaleTimeString("en-GB");
  return today ? time : `${date.toLocaleDateString("en-GB", { day: "numeric", month: "short" })} ${time}`;
}

export function plural(number, one, many = `${one}s`) {
  return `${count(number)} ${number === 1 ? one : many}`;
}

// Kinds of run that roll out groups of episodes; and those without rollouts.
export const ON_POLICY = new Set(["grpo", "rloo", "reinforce", "ppo"]);
export const IMITATION = new Set(["sft", "cloning", "improve"]);

// How an evaluation chose its starts and sampled its actions.
export function protocolText(data) {
  if (!data?.sampling) return "held-out starts";
  const where = data.protocol === "benchmark" ? `benchmark: ${data.split} starts` : "held-out starts";
  return `${where}, ${data.sampling === "sampled" ? `sampled at temperature ${short(data.temperature)}` : "most likely actions"}`;
}

// Whether all of these operators are the world's script. Its steps have the source human, like those of any operator.
export const isScript = (operators) => operators.length > 0 && operators.every((name) => name === "script");

// Who intervened, in a sentence.
export const helper = (operators) => (isScript(operators) ? "the script" : "a human");

// A source, in words: of the steps of an episode with this operator.
export const sourceName = (source, operator) => (source === "human" && operator === "script" ? "script (takeover)" : source);

export const WHO = ["policy", "human", "script", "random"];
