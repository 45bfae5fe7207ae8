/** Makes calls again, the same over gRPC and HTTP: with the answers to the questions of tools, and after refusals. */
import { callError, parseJson, Result, type CallError, type Inputs, type Json, type OnInput, type Question } from "./values.js";

const ROUNDS = 10; // of questions of one call
const FIRST_PAUSE_MS = 10; // before a refused call is sent again: the upper end, which doubles
const MAX_PAUSE_MS = 1000;

/** Returns how long to wait before a call that failed is made again, in ms; null where its result is final. */
export function retryPause(code: string | undefined, error: Pick<CallError, "retrySafe" | "retryAfterSeconds">, attempt: number): number | null {
  if (!error.retrySafe || (code !== "UNAVAILABLE" && code !== "OVERLOADED")) return null;
  return Math.max(Math.random() * Math.min(MAX_PAUSE_MS, FIRST_PAUSE_MS * 2 ** attempt), error.retryAfterSeconds * 1000);
}

/** Makes a call, and again with answers for as long as its tool asks. */
export async function answered(call: (inputs: Inputs) => Promise<Result>, onInput: OnInput, inputs: Inputs = {}): Promise<Result> {
  const accepts = inputs.accepts ?? ["elicitation.form"];
  let next: Inputs = { ...inputs, accepts };
  for (let round = 0; round < ROUNDS; round += 1) {
    const result = await call(next);
    if (!result.asks) return result;
    const answers: { [key: string]: Json } = {};
    for (const [key, question] of Object.entries(parseJson(result.inputRequestsJson) as { [key: string]: Question })) {
      const { message = "", requestedSchema = {}, url = "" } = (question.params ?? {}) as { [name: string]: any };
      answers[key] = answerOf(question, await onInput({ ...question, key, message, schema: requestedSchema, url }));
    }
    next = { accepts, answers, state: result.requestState };
  }
  const text = `the tool has asked ${ROUNDS} times, which is the limit of this client`;
  return new Result({ error: callError("TOOL", "ACCEPTED", text, { reason: "needs_input" }) });
}

function answerOf(question: Question, given: unknown): Json {
  if (question.method !== "elicitation/create") return given as Json;
  if (given === null || given === undefined) return { action: "cancel" };
  const whole = ["accept", "decline", "cancel"].includes((given as { action?: string }).action ?? "");
  return (whole ? given : { action: "accept", content: given }) as Json;
}
