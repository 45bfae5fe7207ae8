import assert from "node:assert/strict";
import { test } from "node:test";

const { sizeOf } = await import("../../../../toolbus/parts/console/page/picture.mjs");

const bytes = (...parts) => Uint8Array.from(parts.flatMap((part) => (typeof part === "string" ? [...part].map((each) => each.charCodeAt(0)) : part)));
const zeros = (length) => Array(length).fill(0);

// What each begins with, for pictures of 258 × 772 pixels: 0x0102 × 0x0304.
const PICTURES = {
  png: bytes([0x89], "PNG\r\n\x1a\n", [0, 0, 0, 13], "IHDR", [0, 0, 1, 2, 0, 0, 3, 4]),
  gif: bytes("GIF89a", [2, 1, 4, 3, 0, 0, 0], [0x2c, 0, 0, 0, 0, 1, 0, 1, 0]),
  "gif whose first frame is larger than its screen": bytes("GIF89a", [1, 0, 1, 0, 0x80, 0, 0], zeros(6), [0x21, 0xf9, 4, 0, 0, 0, 0, 0], [0x2c, 0, 0, 0, 0, 2, 1, 4, 3]),
  bmp: bytes("BM", zeros(16), [2, 1, 0, 0], [0xfc, 0xfc, 0xff, 0xff]),
  "webp, extended": bytes("RIFF", zeros(4), "WEBPVP8X", zeros(8), [1, 1, 0, 3, 3, 0]),
  "webp, lossy": bytes("RIFF", zeros(4), "WEBPVP8 ", zeros(10), [2, 1, 4, 3]),
  "webp, without loss": bytes("RIFF", zeros(4), "WEBPVP8L", zeros(5), [1, 0xc1, 0xc0, 0]),
  jpeg: bytes([0xff, 0xd8, 0xff, 0xe0, 0, 4, 0, 0, 0xff, 0xff, 0xc4, 0, 3, 9, 0xff, 0xc2, 0, 11, 8, 3, 4, 1, 2]),
};

for (const [name, picture] of Object.entries(PICTURES)) {
  test(`the header of a ${name} says how many pixels there are`, () => assert.deepEqual(sizeOf(picture), [258, 772]));
  test(`a ${name} that ends too early has no known size`, () => assert.equal(sizeOf(picture.subarray(0, -4)), null));
}

test("what is no picture has no known size", () => {
  for (const text of ["", "GIF", "RIFF", "\xff\xd8\xff\xd9", "\0\0\0\x1cftypavif"]) assert.equal(sizeOf(bytes(text)), null);
});
