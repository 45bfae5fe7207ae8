#!/bin/sh
# @modelcontextprotocol/sdk 1.32.2 (TypeScript): a tool that names tasks cannot be called at a server without tasks.
#
# One would expect: a server that declares no capability `tasks` gets plain calls, whatever `execution.taskSupport` of
# its tools says: MCP 2025-11-25 forbids clients to use tasks there. Servers that pass on tools of others list such tools.
# What happens: once the client has listed the tools, `callTool` refuses a tool with `taskSupport: "required"` by itself,
# although it must not send a task; before it has listed them, the same call returns the result.
#
# Prints the version, and what a call gives before and after the list. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type":"module"}' > package.json
npm install --silent --no-audit --no-fund @modelcontextprotocol/sdk@1.32.2
cat > finding.mjs <<'JS'
import { readFileSync } from "node:fs";
import { Client } from "@modelcontextprotocol/sdk/client/index.js";
import { InMemoryTransport } from "@modelcontextprotocol/sdk/inMemory.js";
import { Server } from "@modelcontextprotocol/sdk/server/index.js";
import { CallToolRequestSchema, ListToolsRequestSchema } from "@modelcontextprotocol/sdk/types.js";

const { version } = JSON.parse(readFileSync("node_modules/@modelcontextprotocol/sdk/package.json", "utf-8"));
console.log("@modelcontextprotocol/sdk", version);

const tools = [{ name: "dig", inputSchema: { type: "object" }, execution: { taskSupport: "required" } }];
const server = new Server({ name: "s", version: "1" }, { capabilities: { tools: {} } });
server.setRequestHandler(ListToolsRequestSchema, () => ({ tools }));
server.setRequestHandler(CallToolRequestSchema, () => ({ content: [{ type: "text", text: "done" }] }));
const [ours, theirs] = InMemoryTransport.createLinkedPair();
await server.connect(theirs);
const client = new Client({ name: "c", version: "1" });
await client.connect(ours);

async function outcome() {
  try {
    return (await client.callTool({ name: "dig", arguments: {} })).content[0].text;
  } catch (error) {
    return `refused with ${error.code}`;
  }
}

const before = await outcome();
await client.listTools();
const after = await outcome();
console.log("before the list:", before);
console.log("after the list: ", after);
const same = before === "done" && after === "refused with -32600";
console.log(same ? "the client refuses a call that the server answers" : "this has changed");
process.exit(same ? 0 : 1);
JS
node finding.mjs
