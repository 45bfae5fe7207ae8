/** Lists the public names for authors of plugins and hosts. */
export { Host, type GenerationRequest, type HostOptions, type Listing, type ListOptions } from "./host.js";
export type { PeerOptions, PluginOptions, RefusedTool, WaitingTool } from "./peer.js";
export { Plugin, type GenerateOptions, type Generation, type Message } from "./plugin.js";
export type { Arguments, JsonSchema, Schema, StandardSchema } from "./schema.js";
export type { CatalogChange, ListedTool, Notification } from "./shapes.js";
export { InputNeeded, Reply, type Handler, type ToolOptions, type ToolScope } from "./tools.js";
export * from "./values.js";
