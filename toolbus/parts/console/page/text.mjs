// Writes values for people: times, lengths of time, sizes, counts; and output of programs as plain text. Pure.

const CSI = "(?:\\x1b\\[|\\x9b)[0-?]*[ -/]*[@-~]";
const STRINGS = "(?:\\x1b[P\\]X^_]|[\\x90\\x9d\\x98\\x9e\\x9f])[^\\x07\\x1b\\x9c]*(?:\\x07|\\x1b\\\\|\\x9c)?"; // OSC, DCS and their kind
const ESCAPES = new RegExp(`${CSI}|${STRINGS}|\\x1b[ -/]*[0-~]?`, "g");
// As `clean_line` of the bus has them: what has no width or turns the writing, tags, halves of surrogate pairs.
const CONTROLS =
  /[\0-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb\u{d800}-\u{dfff}\u{e0000}-\u{e007f}]/gu;
const TAB = 8;

/** Returns a line of a program's output as a terminal would have left it, without colours and other effects. */
export function plain(line) {
  let text = line;
  if (/[\x1b\x80-\x9f]/.test(text)) text = text.replace(ESCAPES, "");
  if (text.includes("\r")) text = overwritten(text);
  if (text.includes("\b")) text = erased(text);
  return shown(text).replace(/\t/g, (_tab, at) => " ".repeat(TAB - (at % TAB)));
}

/** Returns what a line shows after each carriage return wrote over its beginning. */
function overwritten(text) {
  let line = "";
  for (const part of text.split("\r").reverse()) if (part.length > line.length) line += part.slice(line.length);
  return line;
}

/** Returns a line without what backspaces took back. */
function erased(text) {
  const kept = [];
  for (const character of text) {
    if (character === "\b") kept.pop();
    else kept.push(character);
  }
  return kept.join("");
}

/** Returns a text in which characters that hide or turn others are seen; its lines stay. */
export function shown(text) {
  return text.replace(CONTROLS, (character) => {
    const code = character.codePointAt(0);
    if (code < 0x20) return String.fromCodePoint(0x2400 + code);
    return code === 0x7f ? "\u2421" : "\ufffd";
  });
}

/** Returns a text of several lines as `shown` does, whatever ends them. */
export const shownLines = (text) => shown(text.replaceAll("\r\n", "\n"));

/** Returns a text cut at a length, with … where something is missing. */
export function shortened(text, length) {
  return text.length <= length ? text : text.slice(0, length - 1).replace(/[\ud800-\udbff]$/, "") + "…";
}

/** Returns a length of time in three figures: `840 µs`, `12.3 ms`, `3.42 s`, `2m 05s`, `3h 20m`, `5d 4h`. */
export function duration(length) {
  if (isMissing(length)) return "–";
  const seconds = Number(length);
  if (seconds <= 0) return "0 s";
  if (seconds < 0.0009995) return figures(seconds * 1e6, 0) + " µs";
  if (seconds < 0.9995) return figures(seconds * 1e3, seconds < 0.009995 ? 2 : seconds < 0.09995 ? 1 : 0) + " ms";
  if (seconds < 59.95) return figures(seconds, seconds < 9.995 ? 2 : 1) + " s";
  return parts(seconds);
}

/** Returns how long something has lasted, in whole seconds: it changes once a second. */
export function age(length) {
  if (isMissing(length)) return "–";
  const seconds = Number(length);
  return seconds < 60 ? `${Math.max(0, Math.floor(seconds))} s` : parts(Math.floor(seconds));
}

/** Returns how long something has lasted in one unit, for narrow columns: `12 s`, `3 min`, `20 h`, `5 d`. */
export function shortAge(length) {
  if (isMissing(length)) return "–";
  const seconds = Math.max(0, Math.floor(Number(length)));
  const [size, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([size]) => seconds >= size) ?? [1, "s"];
  return `${count(Math.floor(seconds / size))} ${unit}`;
}

const isMissing = (number) => number === null || number === undefined || Number.isNaN(Number(number));

function parts(seconds) {
  const whole = Math.round(seconds);
  const two = (number) => String(number).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)}m ${two(whole % 60)}s`;
  if (whole < 86400) return `${Math.floor(whole / 3600)}h ${two(Math.floor((whole % 3600) / 60))}m`;
  return `${Math.floor(whole / 86400)}d ${Math.floor((whole % 86400) / 3600)}h`;
}

function figures(number, digits) {
  return number.toFixed(digits).replace(/(\.\d*?)0+$/, "$1").replace(/\.$/, "");
}

/** Returns a number of bytes: `512 B`, `1.5 KiB`, `12 MiB`. */
export function size(bytes) {
  if (isMissing(bytes)) return "–";
  let number = Number(bytes);
  for (const unit of ["B", "KiB", "MiB", "GiB"]) {
    if (number < 1023.5 || unit === "GiB") return `${figures(number, unit === "B" || number >= 99.95 ? 0 : 1)} ${unit}`;
    number /= 1024;
  }
  return "";
}

/** Returns a count with groups of three: `12,345`. */
export function count(number) {
  return isMissing(number) ? "–" : Math.round(number).toLocaleString("en");
}

/** Returns a rate: `0`, `0.4`, `12`, `12,345`. */
export function rate(perSecond) {
  if (isMissing(perSecond)) return "–";
  return perSecond > 0 && perSecond < 9.95 ? figures(Number(perSecond), 1) : count(perSecond);
}

/** Returns `1 call`, `2 calls`, `1,000 calls`. */
export function plural(number, noun, nouns = noun + "s") {
  return `${count(number)} ${Number(number) === 1 ? noun : nouns}`;
}

/** Returns the first line of a description, or as much of it as a list shows. */
export const firstLine = (text) => (text ?? "").split("\n", 1)[0].slice(0, 200);

/** Returns `a, b and c`. */
export const list = (words) => (words.length > 1 ? `${words.slice(0, -1).join(", ")} and ${words.at(-1)}` : words.join(""));

/** Returns the time of day of a moment in seconds since the epoch: `10:11:12`, with `digits` of a fraction. */
export function clock(at, digits = 0) {
  if (!Number(at)) return "–";
  const date = new Date(at * 1000);
  const two = (number) => String(number).padStart(2, "0");
  const time = `${two(date.getHours())}:${two(date.getMinutes())}:${two(date.getSeconds())}`;
  return digits ? `${time}.${String(date.getMilliseconds()).padStart(3, "0").slice(0, digits)}` : time;
}

/** Returns day and time of a moment: `2026-11-23 10:11:12.345`. */
export function moment(at, digits = 0) {
  if (!Number(at)) return "–";
  const date = new Date(at * 1000);
  const two = (number) => String(number).padStart(2, "0");
  return `${date.getFullYear()}-${two(date.getMonth() + 1)}-${two(date.getDate())} ${clock(at, digits)}`;
}

/** Returns how long ago a moment was: `now`, `12 s ago`, `3m 05s ago`; or `in 5 s`. */
export function ago(at, now) {
  if (!Number(at)) return "–";
  const seconds = now - at;
  if (Math.abs(seconds) < 1) return "now";
  return seconds < 0 ? `in ${age(-seconds)}` : `${age(seconds)} ago`;
}

/** Returns a list as a line for a field, with commas between; an item that could be read otherwise is a JSON text. */
export const lineOf = (items) => items.map((item) => (/^\s|\s$|[,"]|^$/.test(item) ? JSON.stringify(item) : item)).join(", ");

/** Returns the items of such a line; empty ones count only as JSON texts. */
export function itemsOf(line) {
  const parts = line.match(/\s*"(?:[^"\\]|\\.)*"\s*(?=,|$)|[^,]+/g) ?? [];
  return parts.map((part) => part.trim()).filter(Boolean).map(unquoted);
}

function unquoted(part) {
  if (!part.startsWith('"')) return part;
  try {
    return JSON.parse(part);
  } catch {
    return part; // a quote that is part of the item
  }
}
