// Keeps the newest lines of a plugin's output as a page shows them: plain text, bounded; and finds the output of a
// source. Pure.

import { plain, shortened } from "./text.mjs";

const BEFORE = 0.5; // s before a call began
export const AFTER = 2; // s after its end: a process that dies tells so after its connection broke
const MAX_WIDTH = 4000; // characters of a line: a browser draws longer ones slowly

/** Returns lines and newer ones as one list, oldest first, without those that are there already; at most `most`. */
export function newestLines(lines, newer, most) {
  const last = lines.length ? lines[lines.length - 1].number : -1;
  const added = newer.filter(({ number }) => number > last).map(prepared);
  return [...lines, ...added].slice(-most);
}

function prepared({ number, at, stream, text }) {
  const line = shortened(plain(text), MAX_WIDTH);
  return { number, at, stream, text: line, search: line.toLowerCase() };
}

const ABSENT = {
  callback: "its tools are called at a URL, and the bus sees nothing else of it",
  function: "its tools are functions of the bus's own program",
  bus: "the bus writes its own log to where toolbus serve was started: a terminal, or the journal of its service",
  mount: "it is a server on another machine",
};
const BY_ITSELF = "toolbus run did not start it, so its output is where it was started";

/** Returns the rows of `plugin_logs` that are of a source: it runs under its name, or has logged that it attached as it. */
export const rowsOf = (source, rows) => rows.filter((row) => row.attached_as === source || row.plugin === source);

/** Returns why a source has no output here. */
export const whyNone = (kind) => ABSENT[kind] ?? BY_ITSELF;

/** Returns the lines around a call, oldest first: from just before it began to soon after its end. */
export const around = (lines, { started, ended }) => lines.filter(({ at }) => at >= started - BEFORE && at <= ended + AFTER);
