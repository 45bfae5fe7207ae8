// Asks the bus what tools declare, and which it refused. An operator of the bus's own machine sees all of it.

import { ApiError, outputOf, send } from "./api.mjs";

const OPERATOR = { attributes: { level: "90" } };
const NOT_NOW = new Set(["UNAVAILABLE", "OVERLOADED"]);
let mayState = true; // whether who looks may state that level; known once the bus has refused it

/** Returns what a tool declares; null where it is not offered. Throws ApiError. */
export async function declarationOf(source, name, signal) {
  const rows = await asOperator({ kind: "tool", name, source }, signal);
  return rows[0] ?? null;
}

/** Returns the tools that the bus refused: {name, source, role, error}. Throws ApiError. */
export const refusedTools = (signal) => asOperator({ kind: "refused" }, signal);

/**
 * Returns the tools that only some users may call, which no list without a user has: none where the bus does not tell
 * who looks, and null where it does not now, for the list of all others does not wait for these. Throws ApiError where
 * the bus does not answer.
 */
export async function restrictedTools() {
  try {
    if (mayState) return await ask({ kind: "restricted" }, { context: OPERATOR });
  } catch (error) {
    if (!error.status) throw error;
    if (NOT_NOW.has(error.code)) return null;
    mayState = !isDenied(error);
  }
  return [];
}

/** Asks as a user who may see everything; one who may not say so asks without a user. */
async function asOperator(args, signal) {
  try {
    if (mayState) return await ask(args, { context: OPERATOR }, signal);
  } catch (error) {
    if (!isDenied(error)) throw error;
    mayState = false;
  }
  return ask(args, {}, signal);
}

async function ask(args, more, signal) {
  const body = { name: "toolbus:this_bus", arguments: args, ...more };
  return outputOf(await send("POST", "/api/tools/invoke", body, { signal }));
}

const isDenied = (error) => error instanceof ApiError && (error.code === "PERMISSION_DENIED" || error.status === 403);
