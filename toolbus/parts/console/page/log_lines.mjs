// Keeps the newest lines of a plugin's output as a page shows them: plain text, bounded. Pure.

import { plain, shortened } from "./text.mjs";

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
