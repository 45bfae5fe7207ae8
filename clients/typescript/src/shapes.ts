/** Converts the messages of the protocol to the values of programs, and back. */
import { create, type MessageInitShape } from "@bufbuild/protobuf";

import type { CatalogChange as WireChange, ListedTool as WireListed, Notification as WireNotification } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import { SessionState } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import * as pb from "./gen/toolbus/v1/tool_pb.js";
import { callError, parseJson, Result, toJson, type CallContext, type CallError, type Content, type Progress } from "./values.js";

/** A tool as the bus lists it. */
export interface ListedTool {
  readonly name: string;
  readonly description: string;
  /** The JSON Schema of the arguments. */
  readonly parameters: { [keyword: string]: any };
  readonly source: string;
  /** `live`, `suspect`, `draining`, `offline`, `waiting` or `unconfirmed`. */
  readonly state: string;
  readonly roles: readonly string[];
  readonly schemaHash: string;
  readonly lastError: string;
  readonly sessions: number;
  readonly inFlight: number;
  readonly stuck: number;
  readonly warnings: readonly string[];
  /** The declaration with all its fields. */
  readonly tool: pb.Tool;
}

/** One step of the catalog: with `full`, `added` is everything. */
export interface CatalogChange {
  readonly revision: number;
  readonly full: boolean;
  readonly added: readonly ListedTool[];
  readonly changed: readonly ListedTool[];
  readonly removed: readonly { readonly name: string; readonly source: string }[];
}

/** What a plugin tells a user outside a call. */
export interface Notification {
  readonly number: number;
  readonly source: string;
  /** "" for all users. */
  readonly user: string;
  readonly text: string;
  readonly data: any;
  readonly timeSeconds: number;
  /** How many before it this host will not get. */
  readonly lost: number;
}

/** Returns a result that is a failure. */
export function failure(code: pb.ErrorCode, stage: pb.CallStage, message: string, more: Partial<Omit<CallError, "code" | "stage">> = {}): pb.ToolResult {
  const { limit, ...fields } = more;
  const error = { code, stage, message: message.toWellFormed(), ...fields, ...(limit ? { limit } : {}) };
  return create(pb.ToolResultSchema, { isError: true, error });
}

/** Returns a result as programs see it. */
export function resultFromWire(message: pb.ToolResult): Result {
  return new Result({ ...message, error: message.error ? errorFromWire(message.error) : null, content: message.content.map(contentFromWire) });
}

function errorFromWire(error: pb.CallError): CallError {
  const { message, retrySafe, retryAfterSeconds, reason } = error;
  const limit = error.limit ? { name: error.limit.name, value: error.limit.value } : null;
  const code = pb.ErrorCode[error.code] ?? String(error.code); // a later bus may send one that is not known here
  const stage = pb.CallStage[error.stage] ?? String(error.stage);
  return callError(code, stage, message, { retrySafe, limit, retryAfterSeconds, reason });
}

/** Returns progress as programs see it. */
export function progressFromWire(item: pb.ToolProgress): Progress {
  const { progress, total, message, outputChunk, content } = item;
  return { progress, total, message, chunk: outputChunk, content: content.map(contentFromWire) };
}

/** Returns a part of content as the protocol has it. */
export function contentToWire(part: Content): MessageInitShape<typeof pb.ContentBlockSchema> {
  const annotationsJson = part.annotations === undefined ? "" : toJson(part.annotations);
  const block = (kind: MessageInitShape<typeof pb.ContentBlockSchema>["kind"]) => ({ kind: kind!, annotationsJson });
  if (part.type === "text") return block({ case: "text", value: { text: part.text } });
  if (part.type === "link") return block({ case: "resourceLink", value: part });
  if (part.type !== "resource") return block({ case: part.type, value: { data: bytes(part.data), mimeType: part.mimeType } });
  const body = typeof part.body === "string" ? { case: "text" as const, value: part.body } : { case: "data" as const, value: bytes(part.body) };
  return block({ case: "resource", value: { uri: part.uri, mimeType: part.mimeType, body } });
}

function contentFromWire(block: pb.ContentBlock): Content {
  const annotations = block.annotationsJson ? { annotations: parseJson(block.annotationsJson) } : {};
  const { kind } = block;
  if (kind.case === "image" || kind.case === "audio") {
    return { type: kind.case, data: kind.value.data, mimeType: kind.value.mimeType, ...annotations };
  }
  if (kind.case === "resourceLink") {
    const { uri, name, description, mimeType } = kind.value;
    return { type: "link", uri, name, description, mimeType, ...annotations };
  }
  if (kind.case === "resource") {
    const { uri, mimeType, body } = kind.value;
    return { type: "resource", uri, mimeType, body: body.value ?? "", ...annotations };
  }
  return { type: "text", text: kind.value?.text ?? "", ...annotations };
}

/** Returns the context of a call as the protocol has it. */
export function contextToWire(context: CallContext): MessageInitShape<typeof pb.CallContextSchema> {
  const { member, messages, attributes, ...same } = context;
  return {
    ...same,
    attributes: { ...attributes },
    memberJson: member === undefined ? "" : toJson(member),
    messages: (messages ?? []).map((each) => ({ ...each })),
  };
}

/** Returns the context of a call as its handler sees it. */
export function contextFromWire(context: pb.CallContext | undefined): Required<Omit<CallContext, "member">> & { member: any } {
  const { userId, attributes, memberJson, messages, traceparent, unplanned } = context ?? create(pb.CallContextSchema);
  return { userId, attributes, member: memberJson ? parseJson(memberJson) : null, messages, traceparent, unplanned };
}

/** Returns a listed tool as programs see it. */
export function listedFromWire(listed: WireListed): ListedTool {
  const { source, roles, schemaHash, lastError, sessions, inFlight, stuck, warnings } = listed;
  const tool = listed.tool ?? create(pb.ToolSchema);
  return {
    name: tool.name,
    description: tool.description,
    parameters: parseJson(tool.parametersJson || "{}"),
    source,
    state: (SessionState[listed.sessionState] ?? String(listed.sessionState)).toLowerCase(),
    ...{ roles, schemaHash, lastError, sessions, inFlight, stuck, warnings, tool },
  };
}

/** Returns a step of the catalog as programs see it. */
export function changeFromWire({ revision, full, added, changed, removed }: WireChange): CatalogChange {
  const refs = removed.map(({ name, source }) => ({ name, source }));
  return { revision: Number(revision), full, added: added.map(listedFromWire), changed: changed.map(listedFromWire), removed: refs };
}

/** Returns a notification as programs see it. */
export function notificationFromWire(message: WireNotification): Notification {
  const { source, userId, text, timeSeconds } = message;
  const data = message.dataJson ? parseJson(message.dataJson) : null;
  return { number: Number(message.number), source, user: userId, text, data, timeSeconds, lost: Number(message.lost) };
}

function bytes(data: Uint8Array): Uint8Array<ArrayBuffer> {
  return data as Uint8Array<ArrayBuffer>;
}
