/**
 * Offers the tools of a client under test, for `toolbus dev conformance`, with this package.
 *
 *     toolbus dev conformance -- node clients/typescript/build/conformance.js
 *
 * Exits with 0 after SIGTERM or a final drain of the bus, with 1 when the bus refused it.
 */
import { appendFileSync } from "node:fs";
import { createRequire } from "node:module";
import { setTimeout as sleep } from "node:timers/promises";

import { Host, image, Plugin, Reply, text, type Content, type Progress, type Result, type ToolScope } from "./src/index.js";

const { version } = createRequire(import.meta.url)("../package.json") as { version: string };
const LATE_MS = 50; // after its result a call of `late_progress` reports
const hosts = new Map<string, Host>(); // by the address of their bus
const plugin = new Plugin("conformance");

function offer(name: string, description: string, handler: (args: any, scope: ToolScope) => unknown): void {
  plugin.tool(name, { description, parameters: { type: "object" }, replace: true }, handler);
}

offer("echo", "Returns its arguments.", (args) => args);
offer("fail", "Throws `message`.", ({ message }) => {
  throw new Error(message as string);
});
offer("slow", "Reports progress once, then works until it is cancelled.", async (_, scope) => {
  scope.progress();
  await new Promise<void>((resolve) => scope.signal.addEventListener("abort", () => resolve()));
  console.error("slow stopped");
});
offer("steps", "Reports `count` steps of progress, then returns the count.", ({ count }, scope) => {
  if (!Number.isInteger(count)) throw new TypeError(`count is ${String(count)}, it must be an integer`);
  for (let step = 1; step <= count; step += 1) scope.progress(step, { total: count, message: `step ${step}` });
  return { count };
});
let waiting: (() => void)[] = []; // one for each call of `meet` that waits for the others
offer("meet", "Returns once `people` calls of it run at the same time.", async ({ people }) => {
  await new Promise<void>((resolve) => {
    waiting.push(resolve);
    if (waiting.length < people) return;
    for (const arrived of waiting) arrived();
    waiting = [];
  });
  return { met: people };
});
offer("relay", "Calls the tool `name` with `arguments` through the bus and returns its output.", async (args, scope) =>
  (await scope.call(args.name, args.arguments)).unwrap(),
);
offer("context", "Returns the context of its call.", (_, { context }) => ({ user_id: context.userId, attributes: context.attributes }));
offer("chunks", "Sends each of `texts` as a piece of the output, and returns them joined.", ({ texts }, scope) => {
  for (const each of texts) scope.chunk(each);
  return texts.join("");
});
const PNG = Uint8Array.from([0x89, 0x50, 0x4e, 0x47, 0x0d, 0x0a, 0x1a, 0x0a]);
offer("picture", "Returns a text and an image.", () => new Reply("a picture", [image(PNG)]));
offer("ask", "Asks two questions, one after the other, and returns both answers.", (_, scope) => {
  const form = { text: { type: "string" } };
  const first = scope.elicit("first?", form, { key: "first" });
  const second = scope.elicit("second?", form, { key: "second" });
  return { first, second, accepts: scope.accepts };
});
offer("big", "Returns a text of `bytes` letters.", ({ bytes }) => "x".repeat(bytes as number));
offer("late_progress", "Reports progress after it has returned.", (_, scope) => {
  setTimeout(() => scope.progress(), LATE_MS);
});
offer("offer", "Offers another tool `name` that returns its arguments.", ({ name }) => offer(name, "Returns its arguments.", (args) => args));
offer("withdraw", "Withdraws the tool `name`.", ({ name }) => void plugin.removeTool(name));
offer("record", "Appends `text` as a line to `file`, works for `seconds`, and returns the text.", async ({ file, text, seconds }) => {
  appendFileSync(file as string, `${text}\n`);
  await sleep(seconds * 1000);
  return text as string;
});
offer("about", "Returns name, version, language and roles of this client.", () => ({
  name: "@toolbus/client",
  version,
  language: `node ${process.versions.node}`,
  roles: ["plugin", "host", "remote"],
}));
offer("host", "Makes a call by a host of its own, lists, watches, or closes that host.", async (args) => {
  const host = hosts.get(args.address) ?? new Host({ address: args.address, source: "conformance-host" });
  hosts.set(args.address, host);
  if (args.close) {
    hosts.delete(args.address);
    await host.close();
    return null;
  }
  if (args.list) {
    const listing = await host.list();
    return { tools: listing.map((tool) => tool.name), revision: listing.revision };
  }
  if (!args.watch) return await called(host, args);
  const changes = [];
  const names = (tools: readonly { readonly name: string }[]) => tools.map((tool) => tool.name);
  for await (const { full, added, changed, removed } of host.watch()) {
    changes.push({ full, added: names(added), changed: names(changed), removed: names(removed) });
    if (changes.length === args.watch) break;
  }
  return { changes };
});

/** Makes a call, and returns the application's view. */
async function called(host: Host, args: any): Promise<object> {
  const items: Progress[] = [];
  const started = performance.now();
  const options = {
    onProgress: (item: Progress) => items.push(item),
    ...(args.form ? { onInput: () => args.form as object } : {}),
    ...(args.timeout ? { timeout: args.timeout as number } : {}),
    ...(args.cancel_after === undefined ? {} : { signal: AbortSignal.timeout(args.cancel_after * 1000) }),
  };
  let result: Result | null = null;
  try {
    result = await host.call(args.name, args.arguments ?? {}, options);
  } catch (problem) {
    if ((problem as Error).name !== "TimeoutError") throw problem;
  }
  const content = [...items.flatMap((item) => item.content), ...(result?.content ?? [])];
  return {
    failed: result?.isError ?? false,
    cancelled: result === null,
    code: result?.error?.code ?? "",
    stage: result?.error?.stage ?? "",
    retry_safe: result?.error?.retrySafe ?? false,
    message: result?.error?.message ?? "",
    output: result?.output ?? null,
    progress: items.filter((item) => !item.chunk).map((item) => [item.progress, item.total, item.message]),
    chunks: items.filter((item) => item.chunk).map((item) => item.chunk),
    content: content.map((part: Content) => (part.type === text("").type ? "text/plain" : (part as { mimeType: string }).mimeType)),
    seconds: (performance.now() - started) / 1000,
  };
}

try {
  await plugin.run();
} catch (problem) {
  console.error(String(problem));
  process.exitCode = 1;
} finally {
  await Promise.all([...hosts.values()].map((host) => host.close()));
}
