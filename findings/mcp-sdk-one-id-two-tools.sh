#!/bin/sh
# @modelcontextprotocol/sdk 1.32.2 (TypeScript): results of a tool are checked against the output schema of another tool.
#
# One would expect: each tool's result is checked against that tool's own outputSchema. `$id` names a schema within its
# own document; two tools whose authors copied one `$id` are two documents.
# What happens: all schemas of a client are in one table by `$id`, and the first one with an `$id` is used for both, so a
# right result of the second tool is refused.
#
# Prints the version, and what a call of each tool gives. Exits with 1 when that changes.
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

async function outcomes(ids) {
  const tools = ["one", "two"].map((name, place) => ({
    name,
    inputSchema: { type: "object" },
    outputSchema: { $id: ids[place], type: "object", properties: { [name]: { type: "integer" } }, required: [name] },
  }));
  const server = new Server({ name: "s", version: "1" }, { capabilities: { tools: {} } });
  server.setRequestHandler(ListToolsRequestSchema, () => ({ tools }));
  server.setRequestHandler(CallToolRequestSchema, ({ params }) => ({ content: [], structuredContent: { [params.name]: 1 } }));
  const [ours, theirs] = InMemoryTransport.createLinkedPair();
  await server.connect(theirs);
  const client = new Client({ name: "c", version: "1" });
  await client.connect(ours);
  await client.listTools();
  const seen = [];
  for (const { name } of tools) {
    try {
      await client.callTool({ name, arguments: {} });
      seen.push(`${name}: taken`);
    } catch (error) {
      seen.push(`${name}: refused`);
    }
  }
  await client.close();
  return seen.join(", ");
}

const own = await outcomes(["https://x.example/one", "https://x.example/two"]);
const shared = await outcomes(["https://x.example/same", "https://x.example/same"]);
console.log("ids of their own:", own);
console.log("one id for both: ", shared);
const same = own === "one: taken, two: taken" && shared === "one: taken, two: refused";
console.log(same ? "a right result is refused" : "this has changed");
process.exit(same ? 0 : 1);
JS
node finding.mjs
