/** Offers the tools of a bus to models: as tools of the Vercel AI SDK, of OpenAI's and of Anthropic's client. */
import { toJson, type CallContext, type Content, type Progress, type Result } from "./values.js";

const NAME_CHARACTERS = 64; // that providers accept
const AI_SCHEMA = Symbol.for("vercel.ai.schema"); // how the AI SDK recognizes JSON Schema

/** A host, over gRPC or HTTP. */
export interface ToolHost {
  list(options?: { names?: readonly string[]; role?: string }): Promise<readonly OfferedTool[]>;
  call(name: string, args: unknown, options?: ModelCallOptions): Promise<Result>;
}

interface OfferedTool {
  readonly name: string;
  readonly description: string;
  readonly parameters: { [keyword: string]: any };
  readonly schemaHash: string;
}

/** What the calls of a model state. */
export interface ModelCallOptions {
  readonly timeout?: number;
  readonly role?: string;
  readonly context?: CallContext;
  readonly schemaHash?: string;
  readonly onProgress?: (progress: Progress) => void;
  readonly signal?: AbortSignal;
}

/** Which tools a model gets, and what its calls state. */
export interface OfferOptions {
  /** These only. */
  readonly names?: readonly string[];
  /** Tools of this role only. */
  readonly role?: string;
  readonly call?: ModelCallOptions;
}

/** A tool as the AI SDK takes it. */
export interface AiTool {
  readonly description: string;
  readonly inputSchema: any;
  execute(args: unknown, options?: { abortSignal?: AbortSignal | undefined }): Promise<any>;
  toModelOutput(output: any): any;
}

/** Returns the tools of a bus for `generateText({ tools })` and `streamText({ tools })` of the AI SDK. */
export async function aiTools(host: ToolHost, options: OfferOptions = {}): Promise<{ [name: string]: AiTool }> {
  const tools: { [name: string]: AiTool } = {};
  for (const [shown, tool] of await offered(host, options)) {
    tools[shown] = {
      description: tool.description,
      inputSchema: { [AI_SCHEMA]: true, _type: undefined, jsonSchema: tool.parameters, validate: (value: unknown) => ({ success: true, value }) },
      execute: async (args, { abortSignal } = {}) => (await run(host, tool, args, options, abortSignal)).text,
      toModelOutput: (given) => ({ type: "text", value: typeof given === "object" && given !== null && "output" in given ? String(given.output) : String(given) }),
    };
  }
  return tools;
}

/** The tools of a request to OpenAI, and what answers the calls of its model. */
export interface OpenAiTools {
  /** Goes into `chat.completions.create({ tools })`. */
  readonly tools: { type: "function"; function: { name: string; description: string; parameters: { [keyword: string]: any } } }[];
  /** Makes the calls of `message.tool_calls`, at once; returns the messages that answer them. */
  answer(calls: readonly any[] | null | undefined, signal?: AbortSignal): Promise<{ role: "tool"; tool_call_id: string; content: string }[]>;
}

/** Returns the tools of a bus for OpenAI's client and for the many servers that speak its API. */
export async function openAiTools(host: ToolHost, options: OfferOptions = {}): Promise<OpenAiTools> {
  const known = await offered(host, options);
  return {
    tools: [...known].map(([name, { description, parameters }]) => ({ type: "function", function: { name, description, parameters } })),
    answer: (calls, signal) =>
      Promise.all(
        (calls ?? []).filter((call) => call.type === "function").map(async (call) => {
          const result = await runNamed(host, known, call.function.name, call.function.arguments || "{}", options, signal);
          return { role: "tool" as const, tool_call_id: call.id as string, content: typeof result === "string" ? result : result.text };
        }),
      ), // prettier-ignore
  };
}

/** The tools of a request to Anthropic, and what answers the calls of its model. */
export interface AnthropicTools {
  /** Goes into `messages.create({ tools })`. */
  readonly tools: { name: string; description: string; input_schema: { type: "object"; [keyword: string]: any } }[];
  /** Makes the calls in the `content` of a message, at once; returns the content of the user's message that answers them. */
  answer(content: readonly any[], signal?: AbortSignal): Promise<any[]>;
}

/** Returns the tools of a bus for Anthropic's client. */
export async function anthropicTools(host: ToolHost, options: OfferOptions = {}): Promise<AnthropicTools> {
  const known = await offered(host, options);
  return {
    tools: [...known].map(([name, { description, parameters }]) => ({ name, description, input_schema: { type: "object", ...parameters } })),
    answer: (content, signal) =>
      Promise.all(
        content.filter((part) => part.type === "tool_use").map(async (part) => {
          const result = await runNamed(host, known, part.name, toJson(part.input), options, signal);
          const failed = typeof result === "string" || result.isError || result.asks;
          const text = typeof result === "string" ? result : result.text;
          const pictures = typeof result === "string" ? [] : result.content.flatMap(anthropicPicture);
          return { type: "tool_result", tool_use_id: part.id, content: [{ type: "text", text }, ...pictures], ...(failed ? { is_error: true } : {}) };
        }),
      ), // prettier-ignore
  };
}

function anthropicPicture(part: Content): object[] {
  if (part.type !== "image") return [];
  const data = btoa(Array.from(part.data, (byte) => String.fromCharCode(byte)).join(""));
  return [{ type: "image", source: { type: "base64", media_type: part.mimeType, data } }];
}

/** Lists the tools by names that providers accept. */
async function offered(host: ToolHost, { names, role }: OfferOptions): Promise<Map<string, OfferedTool>> {
  const listed = await host.list({ ...(names ? { names } : {}), ...(role === undefined ? {} : { role }) });
  const known = new Map<string, OfferedTool>();
  for (const tool of listed) {
    const plain = tool.name.replace(/[^A-Za-z0-9_-]/g, "_").slice(0, NAME_CHARACTERS);
    let shown = plain;
    for (let number = 2; known.has(shown); number += 1) shown = `${plain.slice(0, NAME_CHARACTERS - 4)}_${number}`;
    known.set(shown, tool);
  }
  return known;
}

async function runNamed(
  host: ToolHost, known: ReadonlyMap<string, OfferedTool>, name: string, json: string, options: OfferOptions, signal?: AbortSignal,
): Promise<Result | string> { // prettier-ignore
  const tool = known.get(name);
  if (tool === undefined) return `there is no tool '${name}'; there are: ${[...known.keys()].join(", ")}`;
  return run(host, tool, json, options, signal);
}

async function run(host: ToolHost, tool: OfferedTool, args: unknown, options: OfferOptions, signal?: AbortSignal): Promise<Result> {
  const { role, call } = options;
  const given = { ...(role === undefined ? {} : { role }), schemaHash: tool.schemaHash, ...call, ...(signal ? { signal } : {}) };
  return host.call(tool.name, args, given);
}

