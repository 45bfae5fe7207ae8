// Tells the bus's time, so that an age is right where this machine's clock is not.

import { effect, signal } from "./html.mjs";
import { bus } from "./store.mjs";

let ahead = 0; // seconds that the bus's clock is ahead of performance.now(); 0 before the first digest

/** Seconds since the epoch on the bus; changes once a second while the page is seen. */
export const now = signal(Date.now() / 1000);

effect(() => {
  const { at } = bus.value;
  if (at === undefined) return;
  ahead = Number(at) - performance.now() / 1000;
});

setInterval(() => {
  if (!document.hidden) now.value = ahead ? ahead + performance.now() / 1000 : Date.now() / 1000;
}, 1000);
