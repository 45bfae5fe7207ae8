#!/bin/sh
# @modelcontextprotocol/sdk 1.32.2 (TypeScript): one pattern in the output schema of one tool makes listTools() raise.
#
# One would expect: JSON Schema recommends patterns of ECMA-262, and `new RegExp("^\\-?\\d+$")` is valid there; a client
# that cannot compile one schema still lists the other tools, and at most does not validate results of that one.
# What happens: patterns are compiled with the flag "u", where the escape \- is a syntax error. listTools() raises, so a
# client has no tool at all, of any plugin behind that server.
#
# Prints the version, and what a client lists with and without that tool. Exits with 1 when that changes.
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
import { ListToolsRequestSchema } from "@modelcontextprotocol/sdk/types.js";

const { version } = JSON.parse(readFileSync("node_modules/@modelcontextprotocol/sdk/package.json", "utf-8"));
console.log("@modelcontextprotocol/sdk", version);

async function listed(pattern) {
  const plain = { name: "plain", inputSchema: { type: "object" } };
  const number = { type: "string", pattern };
  const odd = { ...plain, name: "odd", outputSchema: { type: "object", properties: { number } } };
  const server = new Server({ name: "s", version: "1" }, { capabilities: { tools: {} } });
  server.setRequestHandler(ListToolsRequestSchema, () => ({ tools: [plain, odd] }));
  const [ours, theirs] = InMemoryTransport.createLinkedPair();
  await server.connect(theirs);
  const client = new Client({ name: "c", version: "1" });
  await client.connect(ours);
  try {
    return (await client.listTools()).tools.map((tool) => tool.name).join(", ");
  } catch (error) {
    return `raises ${error.name}`;
  } finally {
    await client.close();
  }
}

const [strict, loose] = [await listed("^-?\\d+$"), await listed("^\\-?\\d+$")];
console.log("^-?\\d+$   ", strict);
console.log("^\\-?\\d+$  ", loose, "(valid without the flag u:", new RegExp("^\\-?\\d+$").test("-5") + ")");
const same = strict === "plain, odd" && loose.startsWith("raises");
console.log(same ? "one pattern loses all tools" : "this has changed");
process.exit(same ? 0 : 1);
JS
node finding.mjs
