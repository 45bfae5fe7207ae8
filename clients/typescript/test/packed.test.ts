import assert from "node:assert/strict";
import { execFileSync, spawn, type ChildProcess } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync, writeFileSync } from "node:fs";
import { createRequire } from "node:module";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { after, before, test } from "node:test";

import { Host } from "../src/index.js";
import { runningBus, until, type Bus } from "./support.js";

// The snippets of the README and of the page of the documentation, by the file name in their first line, and what stands
// below each: what the snippet prints. The others are plugins.
const PAGES = ["README.md", "../../docs/start/typescript.md"].map((page) => readFileSync(page, "utf8")).join("\n");
const FOUND = PAGES.matchAll(/```js\n\/\/ (\S+)\n(.*?)```(?:\n\n```text\n(.*?)```)?/gs);
const SNIPPETS = new Map([...FOUND].map(([, name, code, output]) => [name as string, { code: code as string, output }]));
const PLUGINS = ["weather.mjs", "library.mjs", "shouter.mjs"];

let folder: string;
let bus: Bus;
let plugins: ChildProcess[] = [];

before(async () => {
  folder = mkdtempSync(join(tmpdir(), "toolbus-client-"));
  const npmCli = process.env.npm_execpath; // of the npm that runs the tests
  const npm = (cwd: string, ...options: string[]) =>
    npmCli ? execFileSync(process.execPath, [npmCli, ...options], { cwd }) : execFileSync("npm", options, { cwd });
  npm(".", "pack", "--silent", "--pack-destination", folder);
  const { version } = JSON.parse(readFileSync("package.json", "utf8")) as { version: string };
  writeFileSync(join(folder, "package.json"), '{ "name": "five-minutes", "private": true }');
  npm(folder, "install", "--silent", "--no-audit", "--no-fund", "--prefer-offline", `./toolbus-client-${version}.tgz`, "zod@^4");
  for (const [name, { code }] of SNIPPETS) writeFileSync(join(folder, name), code);
  bus = await runningBus();
  plugins = PLUGINS.map((name) => spawn(process.execPath, [name], { cwd: folder, env: environment(), stdio: "inherit" }));
});

after(async () => {
  for (const plugin of plugins) plugin.kill("SIGKILL");
  await bus?.stop();
  if (folder) rmSync(folder, { recursive: true });
});

function environment(): NodeJS.ProcessEnv {
  return { ...process.env, TOOLBUS_ADDRESS: bus.grpc, TOOLBUS_HTTP: bus.http };
}

test("the snippets of the pages work with the packed package, and print what stands below them", async () => {
  const host = new Host({ address: bus.grpc });
  await until(async () => new Set((await host.list()).map(({ source }) => source)).size === PLUGINS.length);
  await host.close();
  const others = [...SNIPPETS].filter(([, { output }]) => output !== undefined);
  assert.deepEqual(others.map(([name]) => name), ["host.mjs", "models.mjs", "http.mjs", "reader.mjs", "listener.mjs"]);
  for (const [name, { output }] of others) {
    assert.equal(execFileSync(process.execPath, [name], { cwd: folder, env: environment(), encoding: "utf8" }), output, name);
  }
});

test("a plugin takes 15 lines at most, and a host 10", () => {
  for (const [name, limit] of [["weather.mjs", 15], ["shouter.mjs", 15], ["host.mjs", 10], ["listener.mjs", 10]] as const) {
    const lines = SNIPPETS.get(name)!.code.split("\n").filter((line) => line.trim() !== "").length;
    assert.ok(lines <= limit, `${name} has ${lines} lines`);
  }
});

test("the packed package is a CommonJS module, too, and has no code that Node has to compile", () => {
  const script = 'const { Plugin } = require("@toolbus/client"), { Host } = require("@toolbus/client/http"), { aiTools } = require("@toolbus/client/models"); console.log(typeof Plugin, typeof Host, typeof aiTools)';
  assert.equal(execFileSync(process.execPath, ["-e", script], { cwd: folder, encoding: "utf8" }), "function function function\n");
  const lock = JSON.parse(readFileSync(join(folder, "package-lock.json"), "utf8")) as { packages: { [path: string]: { cpu?: unknown; os?: unknown } } };
  assert.deepEqual(Object.values(lock.packages).filter(({ cpu, os }) => cpu ?? os), []);
});

test("the types of the packed package are strict, for ES modules and CommonJS", () => {
  const code = `import { Plugin, Host, type Result } from "@toolbus/client";
import { Host as HttpHost } from "@toolbus/client/http";
import { aiTools } from "@toolbus/client/models";
import { z } from "zod";
const plugin = new Plugin("typed");
plugin.tool("zod", { description: "", parameters: z.object({ city: z.string(), days: z.int().default(1) }) }, ({ city, days }) => city.length + days.toFixed(0));
plugin.tool("literal", { description: "", parameters: { type: "object", properties: { n: { type: "integer" }, tag: { enum: ["a", "b"] } }, required: ["n"] } },
  ({ n, tag }) => { const more: "a" | "b" | undefined = tag; return n.toFixed(0) + more; });
// @ts-expect-error the schema has no such property
plugin.tool("wrong", { description: "", parameters: z.object({ city: z.string() }) }, ({ town }) => town);
export async function use(host: Host, http: HttpHost): Promise<Result> {
  await aiTools(host);
  await aiTools(http);
  return host.call("zod", { city: "Oslo" }, { timeout: 1, signal: AbortSignal.timeout(5) });
}
`;
  const require = createRequire(join(process.cwd(), "package.json"));
  for (const name of ["typed.mts", "typed.cts"]) {
    writeFileSync(join(folder, name), code);
    const options = ["--noEmit", "--strict", "--exactOptionalPropertyTypes", "--skipLibCheck", "--target", "es2022", "--lib", "es2022,esnext.disposable,dom", "--module", "nodenext", name];
    execFileSync(process.execPath, [require.resolve("typescript/bin/tsc"), ...options], { cwd: folder, stdio: "inherit" });
  }
});

test("SIGTERM ends a plugin with 0", async () => {
  const ended = plugins.map((plugin) => new Promise((resolve) => plugin.on("close", resolve)));
  for (const plugin of plugins) plugin.kill("SIGTERM");
  assert.deepEqual(await Promise.all(ended), PLUGINS.map(() => 0));
});
