// Draws pictures of results, once their headers have said how many pixels they have: a few bytes may decode to gigabytes.

import { html, useEffect, useMemo, useRef, useState } from "./html.mjs";
import { count, shown, size } from "./text.mjs";

// Pictures that a browser decodes to pixels alone. SVG is a document, and is shown as text.
export const PICTURES = new Set(["image/png", "image/jpeg", "image/gif", "image/webp", "image/avif", "image/bmp"]);
const MAX_BYTES = 6_000_000;
const MAX_PIXELS = 4096 * 4096; // four bytes each; what has more is decoded only when someone asks for it

/** Draws a picture's pixels on a canvas: nothing of it becomes an address or markup, and no policy has to allow it. */
export function Picture({ image: { data = "", mime_type } }) {
  const bytes = useMemo(() => (data.length * 0.75 <= MAX_BYTES ? bytesOf(data) : null), [data]);
  const side = useMemo(() => bytes && sizeOf(bytes), [bytes]);
  const [wanted, setWanted] = useState(false);
  const [fault, setFault] = useState("");
  const canvas = useRef(null);
  const draws = bytes !== null && !fault && (wanted || (side !== null && side[0] * side[1] <= MAX_PIXELS));
  useEffect(() => {
    if (!draws) return undefined;
    let over = false;
    createImageBitmap(new Blob([bytes], { type: mime_type }))
      .then((bitmap) => {
        if (over) return;
        [canvas.current.width, canvas.current.height] = [bitmap.width, bitmap.height];
        canvas.current.getContext("bitmaprenderer").transferFromImageBitmap(bitmap);
      })
      .catch(() => over || setFault("this picture cannot be decoded"));
    return () => (over = true);
  }, [bytes, draws]);
  if (draws) return html`<div class="inside scroll"><canvas ref=${canvas} class="picture" role="img" aria-label=${`a picture, ${shown(mime_type)}`}></canvas></div>`;
  const pixels = side ? `${count(side[0])} × ${count(side[1])} pixels` : "unknown dimensions";
  const words = fault || (bytes ? `${pixels}, ${size(bytes.length)}` : `${size(data.length * 0.75)}: not shown here`);
  return html`<p class="inside inline muted">
    <span>${shown(mime_type)}: ${words}</span>
    ${bytes && !fault && html`<button type="button" class="small" onClick=${() => setWanted(true)}>Show it</button>`}
  </p>`;
}

/** Returns the bytes of a base64 text; none where it is not one. */
function bytesOf(data) {
  try {
    return Uint8Array.from(atob(data.replaceAll("-", "+").replaceAll("_", "/")), (character) => character.charCodeAt(0));
  } catch {
    return new Uint8Array();
  }
}

/** Returns how many pixels a picture has, [width, height], by its header; null where that is not known. */
export function sizeOf(bytes) {
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  const text = (at, length) => String.fromCharCode(...bytes.subarray(at, at + length));
  try {
    if (text(1, 3) === "PNG" && text(12, 4) === "IHDR") return [view.getUint32(16), view.getUint32(20)];
    if (text(0, 3) === "GIF") return sizeOfGif(view);
    if (text(0, 2) === "BM") return [Math.abs(view.getInt32(18, true)), Math.abs(view.getInt32(22, true))];
    if (text(0, 4) === "RIFF" && text(8, 4) === "WEBP") return sizeOfWebp(view, text(12, 4));
    if (view.getUint16(0) === 0xffd8) return sizeOfJpeg(view);
  } catch (error) {
    if (!(error instanceof RangeError)) throw error; // it ends before its header does
  }
  return null;
}

/** A browser draws on what is larger, the screen or its first frame. */
function sizeOfGif(view) {
  const tableOf = (flags) => (flags & 0x80 ? 3 << ((flags & 7) + 1) : 0);
  let at = 13 + tableOf(view.getUint8(10));
  while (view.getUint8(at) === 0x21) {
    at += 2; // an extension, in blocks of which an empty one is the last
    while (view.getUint8(at)) at += 1 + view.getUint8(at);
    at++;
  }
  if (view.getUint8(at) !== 0x2c) return null;
  const [x, y, width, height] = [1, 3, 5, 7].map((offset) => view.getUint16(at + offset, true));
  return [Math.max(view.getUint16(6, true), x + width), Math.max(view.getUint16(8, true), y + height)];
}

function sizeOfWebp(view, kind) {
  const threeBytes = (at) => view.getUint16(at, true) + (view.getUint8(at + 2) << 16);
  if (kind === "VP8X") return [1 + threeBytes(24), 1 + threeBytes(27)];
  if (kind === "VP8 ") return [view.getUint16(26, true) & 0x3fff, view.getUint16(28, true) & 0x3fff];
  if (kind !== "VP8L") return null;
  const bits = view.getUint32(21, true);
  return [1 + (bits & 0x3fff), 1 + ((bits >> 14) & 0x3fff)];
}

function sizeOfJpeg(view) {
  for (let at = 2; view.getUint8(at) === 0xff; ) {
    const marker = view.getUint8(at + 1);
    // Frames are C0 to CF, but for three of these: tables and a reserved one.
    if (marker >= 0xc0 && marker <= 0xcf && ![0xc4, 0xc8, 0xcc].includes(marker)) return [view.getUint16(at + 7), view.getUint16(at + 5)];
    at += marker === 0xff ? 1 : 2 + view.getUint16(at + 2);
  }
  return null;
}
