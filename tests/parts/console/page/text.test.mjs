import assert from "node:assert/strict";
import test from "node:test";

import * as text from "../../../../toolbus/parts/console/page/text.mjs";

test("colours, titles and cursor movements of a terminal leave no trace", () => {
  const cases = [
    ["\x1b[31mred\x1b[0m and \x1b[1;38;5;200mpink\x1b[m", "red and pink"],
    ["\x1b]0;title\x07text", "text"],
    ["\x1b]8;;https://evil.test\x1b\\link\x1b]8;;\x1b\\", "link"],
    ["\x9b31mC1\x9b0m", "C1"],
    ["\x1bPdata\x1b\\after", "after"],
    ["\x1b]52;c;cGF5bG9hZA==", ""],
    ["\x1b[2J\x1b[Hclear", "clear"],
    ["\x1b(Bcharset\x1b7", "charset"],
    ["an escape at the end \x1b", "an escape at the end "],
  ];
  for (const [line, expected] of cases) assert.equal(text.plain(line), expected);
});

test("a progress bar shows its last state", () => {
  assert.equal(text.plain("10 %\r20 %\r100 %"), "100 %");
  assert.equal(text.plain("long line\rab"), "abng line");
  assert.equal(text.plain("abc\b\bX"), "aX");
});

test("tabs become spaces up to the next column of eight", () => {
  assert.equal(text.plain("a\tb"), "a       b");
});

test("characters that hide or turn text are seen", () => {
  assert.equal(text.plain("a\u202Egpj.exe\0\x7f"), "a\ufffdgpj.exe\u2400\u2421");
  assert.equal(text.shown("a\u200bb\u{e0041}c\ufeffd\u2060e\ud800f\xad"), "a\ufffdb\ufffdc\ufffdd\ufffde\ufffdf\ufffd");
  assert.equal(text.plain("<script>alert(1)</script> שלום 😀"), "<script>alert(1)</script> שלום 😀");
});

test("no line of output takes long, whatever it holds", () => {
  for (const part of ["\x1b[", "\x1b]", "\b", "a\b", "\r", "\x1b[0;", "\x9d"]) {
    const before = performance.now();
    text.plain(part.repeat(65536 / part.length));
    assert.ok(performance.now() - before < 1000, JSON.stringify(part));
  }
  for (const end of ["\b", "\r", "\ra"]) {
    const before = performance.now();
    text.plain("a".repeat(32768) + end.repeat(32768));
    assert.ok(performance.now() - before < 1000, JSON.stringify(end));
  }
});

test("lengths of time have three figures and their unit", () => {
  const cases = {
    "0 s": 0, "1 µs": 1e-6, "840 µs": 0.00084, "1 ms": 0.001, "1.25 ms": 0.00125, "12.3 ms": 0.0123, "345 ms": 0.345,
    "999 ms": 0.9993, "1 s": 0.9998, "3.42 s": 3.42, "12.3 s": 12.34, "1m 00s": 59.97, "2m 05s": 125, "3h 20m": 12000,
    "5d 4h": 5 * 86400 + 4 * 3600 + 59,
  };
  for (const [expected, seconds] of Object.entries(cases)) assert.equal(text.duration(seconds), expected);
  assert.equal(text.duration(null), "–");
  assert.equal(text.duration(-1e-9), "0 s");
});

test("an age changes once a second", () => {
  assert.equal(text.age(0.9), "0 s");
  assert.equal(text.age(59.99), "59 s");
  assert.equal(text.age(60), "1m 00s");
  assert.equal(text.ago(100, 112.5), "12 s ago");
  assert.equal(text.ago(100, 100.2), "now");
  assert.equal(text.ago(130, 100), "in 30 s");
  assert.equal(text.ago(null, 100), "–");
});

test("sizes, counts and rates are short", () => {
  const sizes = { "0 B": 0, "1023 B": 1023, "1 KiB": 1024, "1.5 KiB": 1536, "100 KiB": 102400, "1 MiB": 1048576, "64 GiB": 2 ** 36 };
  for (const [expected, bytes] of Object.entries(sizes)) assert.equal(text.size(bytes), expected);
  assert.equal(text.count(1234567), "1,234,567");
  assert.equal(text.rate(0), "0");
  assert.equal(text.rate(0.44), "0.4");
  assert.equal(text.rate(12345.6), "12,346");
  assert.equal(text.plural(1, "call"), "1 call");
  assert.equal(text.plural(1000, "entry", "entries"), "1,000 entries");
});

test("moments are those of this machine's clock", () => {
  const at = new Date(2026, 10, 3, 4, 5, 6, 78).getTime() / 1000;
  assert.equal(text.clock(at), "04:05:06");
  assert.equal(text.moment(at, 3), "2026-11-03 04:05:06.078");
  assert.equal(text.clock(0), "–");
});

test("a text is cut between characters", () => {
  assert.equal(text.shortened("short", 5), "short");
  assert.equal(text.shortened("a😀bcd", 3), "a…");
});

test("a list of any items comes back from its line as it was", () => {
  for (const items of [[], ["a", "b"], ["a,b", "c"], ['say "hi"', " x ", ""], ["*"], ["\\", '"'], ["a\\,b"]]) {
    assert.deepEqual(text.itemsOf(text.lineOf(items)), items);
  }
  assert.deepEqual(text.itemsOf(" u-17 ,, u-12, "), ["u-17", "u-12"]);
  assert.deepEqual(text.itemsOf('"a,b", say "hi", "open'), ["a,b", 'say "hi"', '"open']);
});
