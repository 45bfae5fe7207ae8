#!/bin/sh
# @langchain/mcp-adapters 1.1.4 (TypeScript): of alternatives only the last one can be called; the others are refused.
#
# One would expect: a tool whose argument is one of two objects, told apart by a constant (as zod and pydantic write
# unions), can be called with either; and null is taken where the schema names it.
# What happens: the adapter rewrites each schema "for LLMs", merges all alternatives into one object in which the last
# constant wins, and drops null. The model never sees the others, and arguments that the server takes are refused with
# "Received tool input did not match expected schema" before a request is made, since they are checked against that.
#
# Prints the version, the schema, and what each call gives. Exits with 1 when that changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type":"module"}' > package.json
npm install --silent --no-audit --no-fund --ignore-scripts \
  @langchain/mcp-adapters@1.1.4 @langchain/core@1.4.0 @modelcontextprotocol/sdk@1.32.2
cat > server.mjs <<'JS'
import { Server } from "@modelcontextprotocol/sdk/server/index.js";
import { StdioServerTransport } from "@modelcontextprotocol/sdk/server/stdio.js";
import { CallToolRequestSchema, ListToolsRequestSchema } from "@modelcontextprotocol/sdk/types.js";

function shape(kind, size) {
  const properties = { kind: { const: kind, type: "string" }, [size]: { type: "number" } };
  return { type: "object", properties, required: ["kind", size] };
}

const properties = {
  shape: { anyOf: [shape("circle", "radius"), shape("square", "side")] },
  style: { anyOf: [{ type: "object", properties: { color: { type: "string" } } }, { type: "null" }] },
};
const server = new Server({ name: "s", version: "1" }, { capabilities: { tools: {} } });
server.setRequestHandler(ListToolsRequestSchema, () => ({
  tools: [{ name: "draw", inputSchema: { type: "object", properties } }],
}));
server.setRequestHandler(CallToolRequestSchema, () => ({ content: [{ type: "text", text: "drawn" }] }));
await server.connect(new StdioServerTransport());
JS
cat > finding.mjs <<'JS'
import { readFileSync } from "node:fs";
import { MultiServerMCPClient } from "@langchain/mcp-adapters";

const { version } = JSON.parse(readFileSync("node_modules/@langchain/mcp-adapters/package.json", "utf-8"));
console.log("@langchain/mcp-adapters", version);
const client = new MultiServerMCPClient({ mcpServers: { s: { command: "node", args: ["server.mjs"] } } });
const [draw] = await client.getTools();
console.log(JSON.stringify(draw.schema));
let same = true;
for (const [given, expected] of [
  [{ shape: { kind: "square", side: 1 } }, true],
  [{ shape: { kind: "circle", radius: 1 } }, false],
  [{ style: { color: "red" } }, true],
  [{ style: null }, false],
]) {
  const said = await draw.invoke(given).then(() => "drawn", (error) => error.message.split("\n")[0]);
  console.log(JSON.stringify(given), said);
  same &&= (said === "drawn") === expected;
}
await client.close();
console.log(same ? "only the last alternative" : "this has changed");
process.exit(same ? 0 : 1);
JS
node finding.mjs
