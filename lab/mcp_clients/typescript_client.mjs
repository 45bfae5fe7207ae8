// Drives one MCP client library for TypeScript by lines of JSON: `node typescript_client.mjs KIND URL`.
// It is copied into the folder where the library is installed.
import { readFileSync } from "node:fs";
import { createInterface } from "node:readline";

const [kind, url] = process.argv.slice(2);
let changes = 0;

async function connect() {
  const about = { name: "measured", version: "1" };
  if (kind === "@modelcontextprotocol/sdk") {
    const { Client } = await import("@modelcontextprotocol/sdk/client/index.js");
    const { StreamableHTTPClientTransport } = await import("@modelcontextprotocol/sdk/client/streamableHttp.js");
    const { ToolListChangedNotificationSchema } = await import("@modelcontextprotocol/sdk/types.js");
    const client = new Client(about);
    client.setNotificationHandler(ToolListChangedNotificationSchema, () => { changes += 1; });
    const transport = new StreamableHTTPClientTransport(new URL(url));
    await client.connect(transport);
    return [client, transport.protocolVersion ?? ""];
  }
  if (kind === "@ai-sdk/mcp") {
    const { createMCPClient } = await import("@ai-sdk/mcp");
    return [await createMCPClient({ transport: { type: "http", url } }), ""];
  }
  const { Client, StreamableHTTPClientTransport } = await import("@modelcontextprotocol/client");
  const client = new Client(about);
  client.setNotificationHandler("notifications/tools/list_changed", () => { changes += 1; });
  const transport = new StreamableHTTPClientTransport(new URL(url));
  await client.connect(transport);
  return [client, client.getNegotiatedProtocolVersion?.() ?? transport.protocolVersion ?? ""];
}

// The tools of the AI SDK, as a model gets them: a result is what `toModelOutput` writes of it.
async function answerOfTools(tools, asked) {
  if (asked.do === "list") return { tools: Object.keys(tools).length };
  const tool = tools[asked.name];
  const output = await tool.execute({}, { toolCallId: "1", messages: [] });
  const shown = tool.toModelOutput?.({ toolCallId: "1", input: {}, output }) ?? output;
  return { text: JSON.stringify(shown), failed: JSON.stringify(await shown).includes("error-") || null };
}

async function answer(client, asked) {
  try {
    if (kind === "@ai-sdk/mcp" && asked.do !== "changes") return await answerOfTools(await client.tools(), asked);
    if (asked.do === "list") return { tools: (await client.listTools()).tools.length };
    if (asked.do === "call") {
      const result = await client.callTool({ name: asked.name, arguments: {} });
      return { text: result.content.map((each) => each.text ?? "").join("\n"), failed: result.isError ?? false };
    }
    return { changes };
  } catch (error) {
    return { error: `${error.name}: ${error.message}`.slice(0, 300) };
  }
}

const [client, revision] = await connect();
client.onerror = () => {};
const { version } = JSON.parse(readFileSync(`node_modules/${kind}/package.json`, "utf-8"));
console.log(JSON.stringify({ version, revision }));
for await (const line of createInterface({ input: process.stdin })) {
  console.log(JSON.stringify(await answer(client, JSON.parse(line))));
}
process.exit(0);
