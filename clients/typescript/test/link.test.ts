import assert from "node:assert/strict";
import { test } from "node:test";

import { create, fromBinary, type MessageInitShape } from "@bufbuild/protobuf";

import { Calls } from "../src/calls.js";
import { EventSchema, InvokeRequestSchema, ListRequestSchema, ListResponseSchema, type Event } from "../src/gen/toolbus/v1/tool_bus_service_pb.js";
import { Link, Outbox, Standstill } from "../src/link.js";
import { Peer, settingsOf } from "../src/peer.js";
import { PeerLost } from "../src/values.js";
import { Connection, whyUnanswered } from "../src/wire.js";

function taken(outbox: Outbox) {
  const bytes = outbox.take();
  return bytes === null ? null : fromBinary(InvokeRequestSchema, bytes);
}

test("a message has at most 128 items, in their order", () => {
  const outbox = new Outbox();
  for (let n = 0; n < 200; n += 1) outbox.put("progress", { callId: String(n) });
  outbox.put("results", { callId: "r" });
  assert.equal(taken(outbox)?.progress.length, 128);
  const rest = taken(outbox);
  assert.equal(rest?.progress.at(-1)?.callId, "199");
  assert.equal(rest?.results.length, 1);
  assert.equal(taken(outbox), null);
});

test("a message has at most 1 MiB, or one item", () => {
  const outbox = new Outbox();
  for (const size of [700_000, 700_000, 3_000_000]) outbox.put("results", { outputJson: "x".repeat(size) });
  assert.deepEqual([1, 2, 3].map(() => taken(outbox)?.results.length), [1, 1, 1]);
});

test("a second attach and a second heartbeat begin another message", () => {
  const outbox = new Outbox();
  outbox.put("heartbeat", { sequence: 2n ** 64n - 1n });
  outbox.put("attach", { source: "a" });
  outbox.put("heartbeat", { sequence: 2n });
  const first = taken(outbox);
  assert.equal(first?.heartbeat?.sequence, 2n ** 64n - 1n);
  assert.equal(first?.attach?.source, "a");
  assert.equal(taken(outbox)?.heartbeat?.sequence, 2n);
});

test("results that wait for others go with the next item, or after their time", async () => {
  const outbox = new Outbox();
  let ready = 0;
  outbox.onReady = () => (ready += 1);
  outbox.putBytes("results", new Uint8Array(), "", true);
  assert.equal(taken(outbox), null);
  outbox.putBytes("results", new Uint8Array(), "", false);
  assert.equal(taken(outbox)?.results.length, 2);
  outbox.putBytes("results", new Uint8Array(), "", true);
  const before = ready;
  while (ready === before || taken(outbox) === null) await new Promise((resolve) => setTimeout(resolve, 1));
});

test("a closed outbox drops further items and still gives out the earlier ones", () => {
  const outbox = new Outbox();
  outbox.putBytes("calls", new Uint8Array(), "c1");
  assert.deepEqual([...outbox.unwrittenCalls()], ["c1"]);
  outbox.close();
  outbox.put("drain", {});
  assert.equal(taken(outbox)?.calls.length, 1);
  assert.equal(taken(outbox), null);
});

test("after a graceful end of the stream its calls go before those that waited, and one whose time is over is refused", () => {
  const calls = new Calls();
  const connection = { invoke: () => ({}) } as unknown as Connection;
  const [first, second] = [2, 1].map((callsInFlight) => new Link(connection, calls, callsInFlight, () => undefined));
  calls.open(first!);
  const over = calls.call({ name: "over", argumentsJson: "{}", timeoutSeconds: 1e-9 }, {});
  for (const name of ["sent", "waits"]) void calls.call({ name, argumentsJson: "{}" }, {});
  calls.lost(first!, true);
  assert.equal(calls.size, 2);
  calls.open(second!);
  assert.deepEqual([...second!.pending.values()].map(({ fields }) => fields.name), ["sent"]);
  calls.cancelAll("");
  return over.then(({ error }) => assert.equal(error?.message, "no bus took the call in time"));
});

test("a name that DNS does not have is not looked up once more to explain that", async () => {
  assert.deepEqual(await whyUnanswered("dns:no-bus.invalid:1", "", {}), { why: "", reached: true });
});

test("an RPC on a connection that was closed meanwhile is one to a bus that is lost", async () => {
  const connection = new Connection("127.0.0.1:1", "", {});
  connection.close();
  await assert.rejects(connection.unary("List", ListRequestSchema, {}, ListResponseSchema, 1), PeerLost);
});

test("a reader that is far behind gets the newest notifications, and the whole catalog", async () => {
  const peer = new Peer("x", settingsOf({ address: "127.0.0.1:1", log: () => undefined }));
  const notes = peer.read("notifications");
  const changes = peer.read("catalog");
  const firsts = [notes.next(), changes.next()] as const;
  const { note } = peer as unknown as { note(event: Event): void };
  const event = (kind: MessageInitShape<typeof EventSchema>["kind"]) => note.call(peer, create(EventSchema, { kind: kind! }));
  for (let number = 0; number < 1002; number += 1) {
    event({ case: "notification", value: { number: BigInt(number) } });
    event({ case: "catalog", value: { revision: BigInt(number), added: [{ source: "x", tool: { name: String(number) } }] } });
  }
  const [{ value: oldest }, { value: whole }] = await Promise.all(firsts);
  assert.deepEqual([oldest?.number, oldest?.lost, (await notes.next()).value?.lost], [2, 2, 0]);
  assert.deepEqual([whole?.full, whole?.added.length, (await changes.next()).value?.added.length], [true, 1001, 1]);
  peer.leave("");
});

test("only the echo of the newest heartbeat lets held calls begin", () => {
  const standstill = new Standstill(new Outbox());
  standstill.held.set("1", { callId: "1" } as never);
  assert.deepEqual(standstill.echoed(7n), []);
  assert.equal(standstill.echoed(0n).length, 1);
});
