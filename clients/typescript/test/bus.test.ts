import assert from "node:assert/strict";
import dns from "node:dns/promises";
import { getEventListeners } from "node:events";
import { mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { syncBuiltinESMExports } from "node:module";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { after, before, mock, test } from "node:test";

import { generateText, stepCountIs } from "ai";
import { MockLanguageModelV3 } from "ai/test";
import { z } from "zod";

import { Host as HttpHost } from "../src/http.js";
import { Addresses } from "../src/addresses.js";
import { Host, image, link, PeerLost, Plugin, Reply, RequestError, SetupError, type Progress } from "../src/index.js";
import { aiTools, anthropicTools, openAiTools } from "../src/models.js";
import { renewed } from "../src/wire.js";
import { runningBus, secureServer, until, type Bus } from "./support.js";

const quiet = { log: () => undefined };
let bus: Bus;
let plugin: Plugin;
let host: Host;
let http: HttpHost;
let slowAborted = 0;

before(async () => {
  bus = await runningBus();
  plugin = new Plugin("weather", { ...quiet, address: bus.grpc });
  plugin.tool(
    "get_weather",
    { description: "Tells the weather of a city.", parameters: z.object({ city: z.string(), days: z.int().default(1) }), readOnly: true },
    ({ city, days }) => ({ city, days: Array<string>(days).fill("sunny") }),
  );
  plugin.tool(
    "add",
    { description: "Adds.", parameters: { type: "object", properties: { a: { type: "integer" }, b: { type: "integer", default: 1 } }, required: ["a"] } },
    ({ a, b }) => BigInt(a) + BigInt(b),
  );
  plugin.tool("count", { description: "Counts." }, async function* (_: any) {
    yield "one ";
    yield "two";
  });
  plugin.tool("pauses", { description: "Has a piece without text." }, async function* (_: any) {
    yield "one";
    yield;
  });
  plugin.tool("steps", { description: "Reports." }, (_, scope) => {
    scope.progress(1, { total: 2, message: "half", content: [image(Uint8Array.of(1, 2), "image/webp")] });
    return new Reply("done", [link("https://a.example", "more")]);
  });
  plugin.tool("slow", { description: "Waits." }, async (_, scope) => {
    scope.progress();
    await new Promise<void>((resolve) => scope.signal.addEventListener("abort", () => resolve()));
    slowAborted += 1;
  });
  plugin.tool("fail", { description: "Fails." }, () => {
    throw new RangeError("no such city");
  });
  plugin.tool("broken", { description: "Returns what no result can hold." }, async ({ ask }, scope) => {
    if (ask) scope.ask({ key: { method: "roots/list", params: { self: scope as never } } });
    return new Reply("", [image("no bytes" as never)]);
  });
  plugin.tool("ask_weather", { description: "Asks another tool." }, async (args, scope) => (await scope.call("get_weather", args)).unwrap());
  plugin.tool("who", { description: "Tells the user." }, (_, scope) => [scope.context.userId, scope.context.attributes, scope.timeLeft() <= 30]);
  plugin.tool("book", { description: "Books a room." }, (_, scope) => {
    const day = scope.elicit("Which day?", { day: { type: "string" } });
    const sure = scope.elicit("Sure?");
    return day.action === "accept" && sure.action === "accept" ? `on ${String(day.content?.day)}` : "not booked";
  });
  plugin.start();
  await plugin.ready();
  host = new Host({ ...quiet, address: bus.grpc });
  http = new HttpHost({ address: bus.http });
});

after(async () => {
  await host?.close();
  await plugin?.close();
  await bus?.stop();
});

test("a host lists tools with their schema, and calls them", async () => {
  const [tool] = await host.list({ names: ["get_weather"] });
  assert.equal(tool?.source, "weather");
  assert.equal(tool?.state, "live");
  assert.equal(tool?.tool.annotations?.readOnly, true);
  assert.deepEqual(tool?.parameters.required, ["city"]);
  const result = await host.call("get_weather", { city: "Oslo" }, { schemaHash: tool!.schemaHash });
  assert.deepEqual(result.unwrap(), { city: "Oslo", days: ["sunny"] });
});

test("integers of any size pass through", async () => {
  assert.equal((await host.call("add", '{"a": 123456789012345678901234567890}')).output, 123456789012345678901234567891n);
  assert.equal((await http.call("add", { a: 2n ** 70n })).output, 2n ** 70n + 1n);
});

test("failures are values with code, stage and retrySafe", async () => {
  const failed = (await host.call("fail")).error;
  assert.deepEqual([failed?.code, failed?.stage, failed?.message, failed?.reason], ["TOOL", "ACCEPTED", "no such city", "RangeError"]);
  const missing = (await host.call("missing", {}, { timeout: 10 })).error;
  assert.equal(missing?.stage, "NOT_DISPATCHED");
  const invalid = (await host.call("get_weather", { days: "many" })).error;
  assert.equal(invalid?.code, "INVALID_ARGUMENTS");
  assert.match(invalid?.message ?? "", /city/);
});

test("a result or a question that cannot be written fails its call, and nothing else", async () => {
  for (const ask of [false, true]) assert.equal((await host.call("broken", { ask }, { timeout: 10 })).error?.code, "TOOL");
});

test("progress, chunks and content reach the host", async () => {
  const items: Progress[] = [];
  const result = await host.call("steps", {}, { onProgress: (item) => items.push(item) });
  assert.deepEqual([items[0]?.progress, items[0]?.total, items[0]?.message], [1, 2, "half"]);
  assert.equal(items[0]?.content[0]?.type, "image");
  assert.deepEqual(result.content, [{ type: "link", uri: "https://a.example", name: "more", description: "", mimeType: "" }]);
  const chunks: string[] = [];
  assert.equal((await host.call("count", {}, { onProgress: ({ chunk }) => chunks.push(chunk) })).output, "one two");
  assert.equal((await host.call("pauses")).output, "one");
  assert.deepEqual(chunks, ["one ", "two"]);
});

test("an aborted call is cancelled down to its handler", async () => {
  const controller = new AbortController();
  const stopped = slowAborted;
  const call = host.call("slow", {}, { signal: controller.signal, onProgress: () => controller.abort() });
  await assert.rejects(call, { name: "AbortError" });
  await until(() => slowAborted > stopped);
});

test("a deadline ends a call and names its limit", async () => {
  const { error } = await host.call("slow", {}, { timeout: 0.2 });
  assert.equal(error?.code, "DEADLINE_EXCEEDED");
  assert.equal(error?.limit?.name, "timeout_seconds");
});

test("nested calls, and the context of the host", async () => {
  assert.deepEqual((await host.call("ask_weather", { city: "Rome" })).unwrap().city, "Rome");
  const context = { userId: "ann", attributes: { locale: "en" } };
  assert.deepEqual((await host.call("who", {}, { context })).output, ["ann", { locale: "en" }, true]);
});

test("questions are answered, one after the other; without answers the call says what it needs", async () => {
  const onInput = ({ message }: { message: string }) => (message === "Which day?" ? { day: "friday" } : {});
  assert.equal((await host.call("book", {}, { onInput })).output, "on friday");
  assert.equal((await http.call("book", {}, { onInput })).output, "on friday");
  assert.equal((await host.call("book", {}, { onInput: () => null })).output, "not booked");
  assert.equal((await host.call("book")).error?.reason, "needs_input");
});

test("a watch shows tools that come and go, also over HTTP", async () => {
  const changes = host.watch();
  const overHttp = http.watch();
  assert.equal((await changes.next()).value?.full, true);
  assert.equal((await overHttp.next()).value?.full, true);
  plugin.tool("later", { description: "Comes later." }, () => 1);
  await plugin.ready();
  assert.equal(((await changes.next()).value ?? null)?.added[0]?.name, "later");
  assert.equal(((await overHttp.next()).value ?? null)?.added[0]?.name, "later");
  plugin.removeTool("later");
  assert.equal(((await changes.next()).value ?? null)?.removed[0]?.name, "later");
  await changes.return();
  await overHttp.return();
});

test("notifications reach a host", async () => {
  const received = host.notifications();
  const next = received.next();
  await until(async () => (await plugin.notify("", "tea is ready", { minutes: 3 })) > 0);
  const { value } = await next;
  assert.deepEqual([value?.source, value?.text, value?.data], ["weather", "tea is ready", { minutes: 3 }]);
  await received.return();
});

test("a host lends its model to a plugin with the permission", async () => {
  host.lend(async ({ messages, maxTokens }) => `${messages.length} messages, ${maxTokens} tokens`, { maxTokens: 100 });
  const granted = await host.call("toolbus:grant", { source: "weather", permission: "generation" });
  assert.equal(granted.error, null);
  await until(async () => (await host.list({ source: "host" })).length > 0);
  assert.equal((await plugin.generate("Name the ship.")).text, "1 messages, 100 tokens");
});

test("a host over HTTP lists, calls and reports progress, chunks and content", async () => {
  const [tool] = await http.list({ names: ["get_weather"] });
  assert.deepEqual(tool?.parameters.required, ["city"]);
  assert.deepEqual((await http.call("get_weather", { city: "Oslo" })).output, { city: "Oslo", days: ["sunny"] });
  const items: Progress[] = [];
  const result = await http.call("steps", {}, { onProgress: (item) => items.push(item) });
  assert.equal(items[0]?.message, "half");
  assert.equal(result.content.at(-1)?.type, "link");
  const chunks: string[] = [];
  await http.call("count", {}, { onProgress: ({ chunk }) => chunks.push(chunk) });
  assert.deepEqual(chunks, ["one ", "two"]);
  assert.equal((await http.call("fail")).error?.code, "TOOL");
  assert.equal((await http.export("openai", { names: ["add"] })).tools[0].function.name, "add");
  await assert.rejects(http.call("add", {}, { role: "nobody" }), RequestError);
});

test("an aborted call over HTTP rejects, and is cancelled", async () => {
  const controller = new AbortController();
  const stopped = slowAborted;
  const call = http.call("slow", {}, { signal: controller.signal, onProgress: () => controller.abort() });
  await assert.rejects(call, { name: "AbortError" });
  await until(() => slowAborted > stopped);
});

test("a stream of events may have characters that end a line in patterns of JavaScript", async () => {
  const output = "a\u2028data: b";
  const fetch = async () => new Response(`event: result\ndata: ${JSON.stringify({ content: [], output })}\n\n`);
  assert.equal((await new HttpHost({ fetch }).call("add", {}, { onProgress: () => undefined })).output, output);
});

test("a call over HTTP that is made again leaves nothing at its signal", async () => {
  let calls = 0;
  const error = { code: "OVERLOADED", stage: "NOT_DISPATCHED", message: "busy", retry_safe: true, retry_after_seconds: 0 };
  const fetch = async () => Response.json({ content: [], output: calls, error: ++calls < 4 ? error : null });
  const { signal } = new AbortController();
  assert.equal((await new HttpHost({ fetch }).call("add", {}, { signal })).output, 3);
  assert.deepEqual(getEventListeners(signal, "abort"), []);
});

test("a bus that hangs ends calls over HTTP at their time as over gRPC, and listings", async () => {
  const hanging = await runningBus();
  const caller = new Host({ ...quiet, address: hanging.grpc });
  await caller.ready();
  hanging.process.kill("SIGSTOP");
  try {
    const web = new HttpHost({ address: hanging.http });
    const { signal } = new AbortController();
    const calls = [caller.call("add", {}, { timeout: 0.1 }), ...[{}, { onProgress: () => undefined }].map((more) => web.call("add", {}, { timeout: 0.1, signal, ...more }))];
    const [grpc, plain, events] = (await Promise.all(calls)).map(({ error }) => error);
    assert.deepEqual([plain, events], [grpc, grpc]);
    assert.deepEqual([plain?.code, plain?.stage, plain?.retrySafe], ["DEADLINE_EXCEEDED", "UNKNOWN", false]);
    assert.deepEqual(getEventListeners(signal, "abort"), []);
    const isLate = (problem: unknown) => problem instanceof PeerLost && problem.code === "DEADLINE_EXCEEDED";
    await Promise.all([web.list({ timeout: 0.1 }), web.export("openai", { timeout: 0.1 }), caller.list({ timeout: 0.1 })].map((each) => assert.rejects(each, isLate)));
    const aborted = web.call("add", {}, { signal: AbortSignal.abort(new RangeError("mine")) });
    await assert.rejects(aborted, RangeError);
  } finally {
    hanging.process.kill("SIGCONT");
    await Promise.all([caller.close(), hanging.stop()]);
  }
});

test("a stream over HTTP without events and pings ends, and one that nobody reads does not", async () => {
  mock.timers.enable({ apis: ["setTimeout"] });
  try {
    const change = 'event: catalog\ndata: {"added":[],"changed":[]}\n\n';
    const fetch = async (_: unknown, init?: RequestInit) => {
      const start = (controller: ReadableStreamDefaultController) => {
        controller.enqueue(new TextEncoder().encode(change));
        init?.signal?.addEventListener("abort", () => controller.error(init.signal?.reason));
      };
      return new Response(new ReadableStream({ start }));
    };
    const watch = new HttpHost({ fetch }).watch();
    assert.deepEqual((await watch.next()).value?.added, []);
    mock.timers.tick(61_000);
    const next = watch.next();
    await new Promise(setImmediate);
    mock.timers.tick(61_000);
    await assert.rejects(next, PeerLost);
  } finally {
    mock.timers.reset();
  }
});

test("a call over HTTP without a bus is a value", async () => {
  const result = await new HttpHost({ address: "http://127.0.0.1:1" }).call("add", { a: 1 });
  assert.deepEqual([result.error?.code, result.error?.stage, result.error?.retrySafe], ["UNAVAILABLE", "UNKNOWN", false]);
});

test("the AI SDK calls tools of the bus", async () => {
  const usage = { inputTokens: { total: 1, noCache: 1, cacheRead: 0, cacheWrite: 0 }, outputTokens: { total: 1, text: 1, reasoning: 0 } };
  let round = 0;
  const prompts: unknown[] = [];
  const model = new MockLanguageModelV3({
    doGenerate: async ({ prompt, tools }) => {
      prompts.push(prompt, tools);
      round += 1;
      return round === 1
        ? { content: [{ type: "tool-call", toolCallId: "1", toolName: "get_weather", input: '{"city":"Oslo"}' }], finishReason: { unified: "tool-calls", raw: "" }, usage, warnings: [] }
        : { content: [{ type: "text", text: "It is sunny." }], finishReason: { unified: "stop", raw: "" }, usage, warnings: [] };
    },
  });
  const tools = await aiTools(host, { names: ["get_weather"] });
  const { text } = await generateText({ model, tools, prompt: "What is the weather in Oslo?", stopWhen: stepCountIs(3) });
  assert.equal(text, "It is sunny.");
  assert.match(JSON.stringify(prompts), /Tells the weather of a city/);
  const [listed] = await host.list({ source: "weather", names: ["get_weather"] });
  assert.deepEqual((prompts[1] as { inputSchema: unknown }[])[0]?.inputSchema, listed?.parameters); // as the bus lists it
  assert.match(JSON.stringify(prompts), /sunny/);
});

test("OpenAI's and Anthropic's formats, over either host", async () => {
  for (const each of [host, http]) {
    const openAi = await openAiTools(each, { names: ["get_weather", "steps"] });
    assert.deepEqual(openAi.tools.map((tool) => tool.function.name), ["get_weather", "steps"]);
    const call = { id: "1", type: "function", function: { name: "get_weather", arguments: '{"city":"Oslo"}' } };
    const [message] = await openAi.answer([call]);
    assert.deepEqual([message?.tool_call_id, JSON.parse(message?.content ?? "").city], ["1", "Oslo"]);
    const anthropic = await anthropicTools(each, { names: ["fail"] });
    const parts = await anthropic.answer([{ type: "text", text: "hm" }, { type: "tool_use", id: "t", name: "fail", input: {} }, { type: "tool_use", id: "u", name: "none", input: {} }]);
    assert.deepEqual(parts.map((part) => [part.tool_use_id, part.is_error]), [["t", true], ["u", true]]);
  }
});

test("a refused tool is data, and the others are offered", async () => {
  const refused: string[] = [];
  const onRefused = ({ name }: { name: string }) => {
    refused.push(name);
    throw new Error("a fault of the author, which ends nothing");
  };
  const other = new Plugin("other", { ...quiet, address: bus.grpc, onRefused });
  other.tool("works", { description: "Works." }, () => 1);
  other.tool("does_not", { description: "Does not.", parameters: { $ref: "#" } }, () => 1);
  other.start();
  await other.ready();
  assert.deepEqual([refused, other.refused.map(({ name }) => name)], [["does_not"], ["does_not"]]);
  await other.close();
});

test("faults of functions of the program, at once or later, end nothing, and a log may call", async () => {
  const texts: string[] = [];
  let answered = "";
  const log = async (text: string) => {
    texts.push(text);
    answered = (await own.call("steps")).output as string;
    throw new Error("of the log, later");
  };
  const own = new Host({ address: bus.grpc, log });
  const faults = [() => { throw new Error("at once"); }, () => Promise.reject(new Error("later")), () => { throw Object.create(null); }]; // prettier-ignore
  for (const onProgress of faults) assert.equal((await own.call("steps", {}, { onProgress })).output, "done");
  await until(() => answered === "done");
  assert.deepEqual(texts, ["Error: at once", "Error: later", "object"].map((text) => `onProgress of steps failed: ${text}`));
  await own.close();
  for (const onRefused of faults) {
    const other = new Plugin("other", { address: bus.grpc, log: faults[0] as () => void, onRefused });
    other.tool("works", { description: "Works." }, () => 1);
    other.tool("nameless", { description: "Throws what cannot be shown." }, () => {
      throw Object.defineProperty(new Error(), "name", { get: faults[0] as never });
    });
    other.tool("does_not", { description: "Does not.", parameters: { $ref: "#" } }, () => 1);
    await other.ready();
    const { error } = await host.call("nameless");
    assert.deepEqual([error?.code, error?.message], ["TOOL", "object: at once"]);
    assert.equal((await host.call("works")).output, 1);
    await other.close();
  }
});

test("two plugins of one source share the calls of a tool, and one that leaves loses none", async () => {
  const replicas = ["a", "b"].map((name) => {
    const replica = new Plugin("replicated", { ...quiet, address: bus.grpc });
    replica.tool("which", { description: "Tells which." }, async () => {
      await new Promise((resolve) => setTimeout(resolve, 5));
      return name;
    });
    replica.start();
    return replica;
  });
  await Promise.all(replicas.map((replica) => replica.ready()));
  const calls = Array.from({ length: 40 }, () => host.call("which"));
  const closed = replicas[0]!.close();
  const results = await Promise.all(calls);
  await closed;
  assert.deepEqual(new Set(results.map((result) => result.unwrap())), new Set(["a", "b"]));
  await replicas[1]!.close();
});

test("mistakes of the program name the value, the rule and the fix", async () => {
  assert.throws(() => new Plugin("a b"), SetupError);
  assert.throws(() => new Host({ address: "a:1,dns:tcp:b:1" }), /'dns:tcp:b:1', it must be dns:NAME:PORT/);
  assert.throws(() => new Plugin("many", { address: Array(65).fill("a:1").join() }), /65 buses, it may have 64/);
  for (const address of ["h", "http://h:1", "h:70000", "tls:h", "a:1,,b:1", "a:1,b"]) assert.throws(() => new Host({ address }), /it must be HOST:PORT/);
  assert.throws(() => plugin.tool("a b", { description: "" }, () => 1), /'a b' breaks the rule.*rename/);
  assert.throws(() => plugin.tool("add", { description: "" }, () => 1), /replace: true/);
  assert.throws(() => plugin.tool("new", { description: "", timeout: 301 }, () => 1), /301 s, it must be above 0 and at most 300/);
  await assert.rejects(host.call("add", {}, { timeout: 0 }), /above 0/);
  await assert.rejects(host.list({ role: "nobody" }), RequestError);
});

test("a plugin that the bus refuses says why, once, and run rejects with it", async () => {
  const bound = new Plugin("bound", { ...quiet, address: bus.grpc, token: "a" });
  await bound.ready();
  const logged: string[] = [];
  const other = new Plugin("bound", { address: bus.grpc, token: "b", log: (text) => logged.push(text) });
  await assert.rejects(other.ready(), (problem) => problem instanceof RequestError && problem.code === "PERMISSION_DENIED");
  await assert.rejects(other.run(), RequestError);
  assert.equal(logged.length, 1);
  await bound.close();
});

test("without a bus a call is refused at its deadline, and a listing says where it looked", async () => {
  const lonely = new Host({ ...quiet, address: "127.0.0.1:1, 127.0.0.1:1" });
  const patient = lonely.call("add", {}, { timeout: 2 ** 31 }); // more than a timer of Node can hold
  const { error } = await lonely.call("add", {}, { timeout: 0.1 });
  assert.deepEqual([error?.code, error?.stage, error?.retrySafe], ["UNAVAILABLE", "NOT_DISPATCHED", true]);
  await assert.rejects(lonely.list({ timeout: 0.1 }), (problem) => problem instanceof PeerLost && /answered at 127\.0\.0\.1:1 within/.test(problem.message));
  await lonely.close();
  assert.equal((await patient).error?.code, "CANCELLED");
});

test("a bus that is killed ends streams over HTTP in PeerLost, and a listing goes on at the next", async () => {
  const killed = await runningBus();
  const lister = new Host({ ...quiet, address: `${killed.grpc},${bus.grpc}` });
  await lister.ready();
  const watch = new HttpHost({ address: killed.http }).watch();
  await watch.next();
  killed.process.kill("SIGKILL");
  await killed.stop();
  assert.equal((await lister.list({ source: "weather", names: ["add"] })).length, 1);
  await assert.rejects(watch.next(), PeerLost);
  await lister.close();
});

test("after a restart of the bus the tools are back, and a call that waited is answered", async () => {
  const first = await runningBus();
  const address = first.grpc;
  const restarted = new Plugin("again", { ...quiet, address });
  restarted.tool("here", { description: "Is here." }, () => "here");
  restarted.start();
  await restarted.ready();
  const caller = new Host({ ...quiet, address });
  await caller.ready();
  first.process.kill("SIGKILL");
  await first.stop();
  await until(() => !caller.connected);
  const call = caller.call("here", {}, { timeout: 60 });
  const second = await runningBus("--grpc", address);
  assert.equal((await call).output, "here");
  await caller.close();
  await restarted.close();
  await second.stop();
});

test("with several addresses a plugin is at each bus, and a host goes on at the next", async () => {
  const folder = mkdtempSync(join(tmpdir(), "toolbus,"));
  const buses = await Promise.all([runningBus("--grpc", `unix:${folder}/a,b`), runningBus()]);
  const address = buses.map(({ grpc }) => grpc).join(", ");
  const several = new Plugin("several", { ...quiet, address });
  several.tool("where", { description: "Says at how many buses it answers." }, async (_, scope) => (await scope.call("echo", { text: "here" })).output);
  several.tool("echo", { description: "Echoes." }, ({ text }) => text);
  await several.ready();
  for (const { grpc } of buses) {
    const only = new Host({ ...quiet, address: grpc });
    await until(async () => (await only.list({ source: "several" })).length === 2);
    assert.equal((await only.call("where")).output, "here");
    await only.close();
  }
  const logged: string[] = [];
  const caller = new Host({ address, log: (text) => logged.push(text) });
  for await (const change of caller.watch()) {
    assert.ok(change.full);
    break;
  }
  buses[0]?.process.kill("SIGKILL");
  await buses[0]?.stop();
  await until(() => logged.length > 0); // it may be at the next one by now
  const began = performance.now();
  assert.equal((await caller.call("where")).output, "here");
  assert.ok(performance.now() - began < 20_000); // not at the end of its time
  assert.equal((await several.call("where")).output, "here");
  several.tool("late", { description: "Comes later." }, () => "late");
  await until(async () => (await caller.call("late")).output === "late");
  buses[1]?.process.kill("SIGKILL");
  await buses[1]?.stop();
  await until(() => new Set(logged).size >= 2);
  const { error } = await caller.call("where", {}, { timeout: 2 });
  assert.deepEqual([error?.code, error?.stage], ["UNAVAILABLE", "NOT_DISPATCHED"]);
  await Promise.all([caller.close(), several.close()]);
  assert.ok(logged.length < 8, logged.join("\n")); // not again with each attempt
  rmSync(folder, { recursive: true });
});

test("tools that do not fit into one message are offered by further ones", async () => {
  const many = new Plugin("many", { ...quiet, address: bus.grpc });
  const metadata = { text: "x".repeat(250_000) };
  for (let number = 0; number < 70; number += 1) {
    const parameters = number === 69 ? { type: "strin" } : { type: "object" };
    many.tool(`many_${number}`, { description: "One of many.", parameters, metadata }, () => number);
  }
  await many.ready();
  assert.deepEqual(many.refused.map(({ name }) => name), ["many_69"]);
  assert.equal((await host.list({ source: "many" })).length, 69);
  assert.equal((await host.call("many_68")).output, 68);
  await many.close();
});

test("a name of DNS stands for all its buses", async () => {
  const buses = await Promise.all([runningBus(), runningBus()]);
  const [first, second] = buses.map(({ grpc }) => `dns:localhost:${grpc.split(":").at(-1) ?? ""}`) as [string, string];
  const named = new Plugin("named", { ...quiet, address: first });
  named.tool("named_echo", { description: "Echoes." }, ({ text }) => text);
  await named.ready();
  const caller = new Host({ ...quiet, address: `${first}, ${second}` });
  const answer = async () => (await caller.call("named_echo", { text: "here" })).output === "here";
  await until(answer);
  (named as unknown as { attach(addresses: readonly string[]): void }).attach([buses[1]?.grpc ?? ""]); // as if DNS had another answer
  await buses[0]?.stop();
  await until(answer);
  await Promise.all([caller.close(), named.close()]);
  await buses[1]?.stop();
  assert.deepEqual(new Addresses("a:1,b:1, a:1").known, ["a:1", "b:1"]);
  const addresses = new Addresses("unix:/a,b, dns:mtls:localhost:7");
  const found = await addresses.lookUp();
  assert.equal(found[0], "unix:/a,b");
  assert.ok(found.includes("mtls:localhost@127.0.0.1:7"));
});

test("a plugin that is closed before DNS has answered ends, and a name is looked up once at a time", async () => {
  const silent = mock.method(dns, "lookup", () => new Promise(() => undefined));
  syncBuiltinESMExports();
  try {
    const early = new Plugin("early", { ...quiet, address: "dns:silent.invalid:1" });
    const ends = [early.run(), assert.rejects(early.ready(), PeerLost)];
    await early.close();
    await Promise.all([...ends, early.run(), assert.rejects(early.ready(), PeerLost)]);
    silent.mock.resetCalls();
    const addresses = new Addresses("dns:silent.invalid:1");
    void addresses.lookUp();
    void addresses.lookUp();
    assert.equal(silent.mock.callCount(), 1);
  } finally {
    silent.mock.restore();
    syncBuiltinESMExports();
  }
});

test("a credential that is about to be copied is used as it was before", async () => {
  const folder = mkdtempSync(join(tmpdir(), "toolbus-"));
  const credential = join(folder, "own.toolbus");
  writeFileSync(credential, 'name = "chat"', { mode: 0o600 });
  const own = await runningBus();
  const said: string[] = [];
  const caller = new Host({ address: `${own.grpc},${bus.grpc}`, credential, log: (text) => said.push(text) });
  try {
    await caller.ready();
    rmSync(credential);
    await own.stop();
    await until(async () => (await caller.call("get_weather", { city: "Rome" })).output !== undefined);
    assert.equal(said.filter((text) => text.includes("using the credential that was read before")).length, 1);
    const before = { token: "x" };
    for (const [text, token] of [["", "x"], ['token = "y', "x"], ['token = "y"', "y"]] as const) {
      writeFileSync(credential, text, { mode: 0o600 });
      const { connection, ...made } = renewed(bus.grpc, credential, before);
      connection.close();
      assert.equal(made.credential.token, token);
    }
  } finally {
    await caller.close();
    rmSync(folder, { recursive: true });
  }
});

test("a credential that holds no text or no key says so, with its file and the fix", async () => {
  const credential = join(mkdtempSync(join(tmpdir(), "toolbus-")), "bad.toolbus");
  writeFileSync(credential, 'name = "\\q"', { mode: 0o600 });
  assert.throws(() => new Host({ credential }), (problem) => problem instanceof SetupError && problem.message.includes(credential));
  writeFileSync(credential, 'certificate = "a"\nkey = "b"', { mode: 0o600 });
  const wrong = new Host({ ...quiet, credential, address: "mtls:127.0.0.1:1" });
  await assert.rejects(wrong.ready(), (problem) => problem instanceof SetupError && /bad\.toolbus cannot be used .*create it anew/.test(problem.message));
  rmSync(dirname(credential), { recursive: true });
});

test("a bus that does not answer for the sake of TLS is explained", async () => {
  const { port, close } = await secureServer();
  try {
    for (const [address, expected] of [[`127.0.0.1:${port}`, `write tls:127.0.0.1:${port}`], [`tls:127.0.0.1:${port}`, "not signed by an authority"]] as const) {
      const said: string[] = [];
      const wrong = new Host({ address, log: (text) => said.push(text) });
      const waiting = wrong.ready().catch(() => undefined);
      await until(() => said.some((text) => text.includes(expected)));
      await wrong.close();
      await waiting;
    }
  } finally {
    close();
  }
});
