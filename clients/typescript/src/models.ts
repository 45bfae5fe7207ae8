/** Offers the tools of a bus to models: as tools of the Vercel AI SDK, of OpenAI's and of Anthropic's client. */
import { callError, Result, toJson, type CallOptions, type Content, type HttpTool } from "./values.js";

const NAME_CHARACTERS = 64; // that providers accept
const AI_SCHEMA = Symbol.for("vercel.ai.schema"); // how the AI SDK recognizes JSON Schema

type OfferedTool = Pick<HttpTool, "name" | "description" | "parameters" | "schemaHash">;

/** A host, over gRPC or HTTP. */
export interface ToolHost {
  list(options?: { names?: readonly string[]; role?: string }): Promise<readonly OfferedTool[]>;
  call(name: string, args: unknown, options?: ModelCallOptions): Promise<Result>;
}

/** What the calls of a model state. */
export type ModelCallOptions = Pick<CallOptions, "timeout" | "role" | "context" | "schemaHash" | "onProgress" | "signal">;

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
  const { known, run } = await offered(host, options);
  const made = [...known].map(([name, { description, parameters }]): [string, AiTool] => [name, {
    description,
    inputSchema: { [AI_SCHEMA]: true, _type: undefined, jsonSchema: parameters, validate: (value: unknown) => ({ success: true, value }) },
    execute: async (args, { abortSignal } = {}) => (await run(name, args, abortSignal)).text,
    toModelOutput: (given) => ({ type: "text", value: typeof given === "object" && given !== null && "output" in given ? String(given.output) : String(given) }),
  }]); // prettier-ignore
  return Object.fromEntries(made);
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
  const { known, run } = await offered(host, options);
  const answer = async (call: any, signal?: AbortSignal) => {
    const { text } = await run(call.function.name, call.function.arguments || "{}", signal);
    return { role: "tool" as const, tool_call_id: call.id as string, content: text };
  };
  return {
    tools: [...known].map(([name, { description, parameters }]) => ({ type: "function", function: { name, description, parameters } })),
    answer: (calls, signal) => Promise.all((calls ?? []).filter((call) => call.type === "function").map((call) => answer(call, signal))),
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
  const { known, run } = await offered(host, options);
  const answer = async (part: any, signal?: AbortSignal) => {
    const { isError, asks, text, content } = await run(part.name, toJson(part.input), signal);
    const shown = [{ type: "text", text }, ...content.flatMap(anthropicPicture)];
    return { type: "tool_result", tool_use_id: part.id, content: shown, ...(isError || asks ? { is_error: true } : {}) };
  };
  return {
    tools: [...known].map(([name, { description, parameters }]) => ({ name, description, input_schema: { type: "object", ...parameters } })),
    answer: (content, signal) => Promise.all(content.filter((part) => part.type === "tool_use").map((part) => answer(part, signal))),
  };
}

function anthropicPicture(part: Content): object[] {
  if (part.type !== "image") return [];
  const data = btoa(Array.from(part.data, (byte) => String.fromCharCode(byte)).join(""));
  return [{ type: "image", source: { type: "base64", media_type: part.mimeType, data } }];
}

/** Lists the tools by names that providers accept; `run` makes a call by such a name. */
async function offered(host: ToolHost, { names, role, call }: OfferOptions) {
  const known = new Map<string, OfferedTool>();
  for (const tool of await host.list({ names, role })) {
    const plain = tool.name.replace(/[^A-Za-z0-9_-]/g, "_").slice(0, NAME_CHARACTERS);
    let shown = plain;
    for (let number = 2; known.has(shown); number += 1) shown = `${plain.slice(0, NAME_CHARACTERS - 4)}_${number}`;
    known.set(shown, tool);
  }
  const run = async (name: string, args: unknown, signal?: AbortSignal): Promise<Result> => {
    const tool = known.get(name);
    if (tool !== undefined) return host.call(tool.name, args, { role, schemaHash: tool.schemaHash, ...call, signal: signal ?? call?.signal });
    const text = `there is no tool '${name}'; there are: ${[...known.keys()].join(", ")}`;
    return new Result({ error: callError("NOT_FOUND", "NOT_DISPATCHED", text) });
  };
  return { known, run };
}
