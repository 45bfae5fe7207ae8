// Binds htm to Preact, and is where every other module gets both from, with hooks and signals.
//
// A value in a template becomes a text node or a property, never markup. Styles are objects: a string would be an
// inline style, which the Content-Security-Policy forbids.

import htm from "./vendor/htm.mjs";
import { h, options } from "./vendor/preact.mjs";

export { Component, Fragment, h, render } from "./vendor/preact.mjs";
export { useCallback, useEffect, useLayoutEffect, useMemo, useRef, useState } from "./vendor/hooks.mjs";
export { batch, computed, effect, signal, useComputed, useSignal } from "./vendor/signals.mjs";

export const html = htm.bind(h);

// Whatever changes within a frame is drawn once. A hidden tab has no frames, so it draws nothing.
options.debounceRendering = (draw) => requestAnimationFrame(draw);
