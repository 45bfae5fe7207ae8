#!/bin/sh
# @ai-sdk/mcp 1.0.102 (ai 6.0.326): a tool whose arguments may have any name is shown to models as one without arguments.
#
# One would expect: {"type": "object", "additionalProperties": {"type": "string"}} is how JSON Schema writes a map, as for
# labels, headers or variables, and MCP allows it as an input schema. A client shows the model what the server declares.
# What happens: each tool gets `"additionalProperties": false` in place of what it has, without a word. The model is asked
# for an object without members, and the tool is called without what it is for. A map one level down arrives whole.
#
# Prints the versions, and for each tool what the server declares and what the model is asked for. Exits with 1 when that
# changes.
set -eu
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
cd "$folder"
echo '{"type":"module"}' > package.json
npm install --no-audit --no-fund --loglevel=error @ai-sdk/mcp@1.0.102 ai@6.0.326 zod@4.6.7 > /dev/null
cat > client.mjs <<'JS'
import { readFileSync } from "node:fs";
import { experimental_createMCPClient, createMCPClient } from "@ai-sdk/mcp";
import { asSchema } from "ai";

const map = { type: "object", additionalProperties: { type: "string" } };
const declared = { set_labels: map, set_labels_of: { type: "object", properties: { labels: map } } };

// A server that answers what a client asks for.
const transport = {
  async start() {},
  async close() {},
  async send(message) {
    if (message.id === undefined) return;
    const results = {
      initialize: { protocolVersion: "2025-06-18", capabilities: { tools: {} }, serverInfo: { name: "s", version: "1" } },
      "tools/list": { tools: Object.entries(declared).map(([name, inputSchema]) => ({ name, inputSchema })) },
    };
    queueMicrotask(() => this.onmessage({ jsonrpc: "2.0", id: message.id, result: results[message.method] }));
  },
};

for (const name of ["@ai-sdk/mcp", "ai"])
  console.log(name, JSON.parse(readFileSync(`node_modules/${name}/package.json`)).version);
const client = await (createMCPClient ?? experimental_createMCPClient)({ transport });
const asked = {};
for (const [name, tool] of Object.entries(await client.tools())) {
  asked[name] = await asSchema(tool.inputSchema).jsonSchema;
  console.log(`${name} declares    ${JSON.stringify(declared[name])}`);
  console.log(`${name} is shown as ${JSON.stringify(asked[name])}`);
}
await client.close();
const same =
  asked.set_labels.additionalProperties === false &&
  Object.keys(asked.set_labels.properties).length === 0 &&
  asked.set_labels_of.properties.labels.additionalProperties.type === "string";
console.log(same ? "a map becomes an object without members" : "this has changed");
process.exit(same ? 0 : 1);
JS
node client.mjs
