/** Converts the messages of the protocol to the values of programs, and back. */
import { create, type MessageInitShape } from "@bufbuild/protobuf";

import type { CatalogChange as WireChange, ListedTool as WireListed, Notification as WireNotification } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import { SessionState } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import * as pb from "./gen/toolbus/v1/tool_pb.js";
import { callError, link, parseJson, resource, Result, text, toJson, type CallContext, type CallError, type CatalogStep, type Content, type HttpNotification, type HttpTool, type Progress } from "./values.js";

/** A tool as the bus lists it. */
export interface ListedTool extends HttpTool {
  /** `live`, `suspect`, `draining`, `offline`, `waiting` or `unconfirmed`. */
  readonly state: string;
  readonly lastError: string;
  readonly sessions: number;
  readonly inFlight: number;
  readonly stuck: number;
  readonly warnings: readonly string[];
  /** The declaration with all its fields. */
  readonly tool: pb.Tool;
}

/** One step of the catalog: with `full`, `added` is everything. */
export type CatalogChange = CatalogStep<ListedTool>;

/** What a plugin tells a user outside a call. */
export interface Notification extends HttpNotification {
  /** How many before it this host will not get. */
  readonly lost: number;
}

/** Returns a result that is a failure. */
export function failure(code: pb.ErrorCode, stage: pb.CallStage, message: string, more: Partial<Omit<CallError, "code" | "stage">> = {}): pb.ToolResult {
  const error = { ...more, code, stage, message: message.toWellFormed(), limit: more.limit ?? undefined };
  return create(pb.ToolResultSchema, { isError: true, error });
}

/** Returns a result as programs see it. */
export function resultFromWire(message: pb.ToolResult): Result {
  return new Result({ ...message, error: message.error ? errorFromWire(message.error) : null, content: message.content.map(contentFromWire) });
}

function errorFromWire({ code, stage, message, retrySafe, limit, retryAfterSeconds, reason }: pb.CallError): CallError {
  const hit = limit ? { name: limit.name, value: limit.value } : null;
  // A later bus may send codes and stages that are not known here.
  return callError(pb.ErrorCode[code] ?? String(code), pb.CallStage[stage] ?? String(stage), message, { retrySafe, limit: hit, retryAfterSeconds, reason });
}

/** Returns progress as programs see it. */
export function progressFromWire(item: pb.ToolProgress): Progress {
  const { progress, total, message, outputChunk, content } = item;
  return { progress, total, message, chunk: outputChunk, content: content.map(contentFromWire) };
}

type Block = MessageInitShape<typeof pb.ContentBlockSchema>;

/** Returns a part of content as the protocol has it. */
export function contentToWire(part: Content): Block {
  const annotationsJson = part.annotations === undefined ? "" : toJson(part.annotations);
  return { kind: kindOf(part), annotationsJson } as Block;
}

function kindOf(part: Content): object {
  if (part.type === "link") return { case: "resourceLink", value: part };
  if (part.type !== "resource") return { case: part.type, value: part };
  return { case: "resource", value: { ...part, body: { case: typeof part.body === "string" ? "text" : "data", value: part.body } } };
}

function contentFromWire({ kind, annotationsJson }: pb.ContentBlock): Content {
  const annotations = annotationsJson ? { annotations: parseJson(annotationsJson) } : {};
  return { ...partOf(kind), ...annotations };
}

function partOf(kind: pb.ContentBlock["kind"]): Content {
  if (kind.case === "image" || kind.case === "audio") return { type: kind.case, data: kind.value.data, mimeType: kind.value.mimeType };
  if (kind.case === "resourceLink") return link(kind.value.uri, kind.value.name, kind.value.description, kind.value.mimeType);
  if (kind.case === "resource") return resource(kind.value.uri, kind.value.body.value ?? "", kind.value.mimeType);
  return text(kind.value?.text ?? "");
}

/** Returns the context of a call as the protocol has it. */
export function contextToWire({ member, messages = [], ...same }: CallContext): MessageInitShape<typeof pb.CallContextSchema> {
  return { ...same, memberJson: member === undefined ? "" : toJson(member), messages: [...messages] } as MessageInitShape<typeof pb.CallContextSchema>;
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
  const state = (SessionState[listed.sessionState] ?? String(listed.sessionState)).toLowerCase();
  const parameters = parseJson(tool.parametersJson || "{}");
  return { name: tool.name, description: tool.description, parameters, source, state, roles, schemaHash, lastError, sessions, inFlight, stuck, warnings, tool };
}

/** Returns a step of the catalog as programs see it. */
export function changeFromWire({ revision, full, added, changed, removed }: WireChange): CatalogChange {
  const refs = removed.map(({ name, source }) => ({ name, source }));
  return { revision: Number(revision), full, added: added.map(listedFromWire), changed: changed.map(listedFromWire), removed: refs };
}

/** Returns a notification as programs see it. */
export function notificationFromWire({ number, source, userId, text, dataJson, timeSeconds, lost }: WireNotification): Notification {
  return { number: Number(number), source, user: userId, text, data: dataJson ? parseJson(dataJson) : null, timeSeconds, lost: Number(lost) };
}
