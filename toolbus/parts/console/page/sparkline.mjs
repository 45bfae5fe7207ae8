// Draws a few points as a line on a canvas, in the colour that the style gives it; follows the colour scheme.

import { html, useEffect, useRef } from "./html.mjs";

const drawings = new Map(); // canvas → what draws it again; those that are on the page
let scheme = null; // tells of a change of the colour scheme; null until the first canvas

function redraw() {
  for (const draw of drawings.values()) draw();
}

/** Draws `values`, oldest first, from zero to their largest, at least to `most`. `kind` is a class: "wide", "bad". */
export function Sparkline({ values, label = "", most = 0, kind = "" }) {
  const canvas = useRef(null);
  const drawn = useRef(null); // the values that are drawn: a new list is a new drawing
  useEffect(() => {
    const element = canvas.current;
    if (!scheme) {
      scheme = matchMedia("(prefers-color-scheme: dark)");
      scheme.addEventListener("change", redraw);
    }
    const watcher = new ResizeObserver(() => drawings.get(element)?.());
    watcher.observe(element);
    return () => {
      watcher.disconnect();
      drawings.delete(element);
    };
  }, []);
  useEffect(() => {
    const element = canvas.current;
    if (!element || drawn.current === values) return; // without an element it went before this effect
    drawn.current = values;
    const draw = () => drawLine(element, values, most);
    drawings.set(element, draw);
    draw();
  });
  return html`<canvas ref=${canvas} class=${"spark " + kind} role="img" aria-label=${label} title=${label}></canvas>`;
}

function drawLine(canvas, values, most) {
  const { clientWidth: width, clientHeight: height } = canvas;
  if (!width || !height) return; // not shown at this width of the page
  const scale = globalThis.devicePixelRatio || 1;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  const largest = Math.max(most, ...values, 1e-9);
  const x = (at) => 1 + (at / Math.max(1, values.length - 1)) * (width - 2);
  const y = (value) => height - 1.5 - (value / largest) * (height - 3);
  const color = getComputedStyle(canvas).color;
  context.strokeStyle = context.fillStyle = color;
  context.lineWidth = 1.25;
  context.lineJoin = "round";
  context.beginPath();
  if (values.length < 2) {
    context.moveTo(1, height - 1.5);
    context.lineTo(width - 1, height - 1.5);
  }
  for (let at = 0; at < values.length; at++) context.lineTo(x(at), y(values[at]));
  context.stroke();
  if (values.length < 2) return;
  context.lineTo(x(values.length - 1), height);
  context.lineTo(x(0), height);
  context.globalAlpha = 0.14;
  context.fill();
}
