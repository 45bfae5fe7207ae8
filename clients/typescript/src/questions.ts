/** Answers the questions of tools: makes a call again with the answers, the same over gRPC and HTTP. */
import { callError, parseJson, Result, type Answer, type Json, type Question } from "./values.js";

const ROUNDS = 10; // of questions of one call

/** The kinds of questions that a call accepts, and the answers to those of the call before. */
export interface Inputs {
  /** Of `elicitation.form` (the default), `elicitation.url`, `sampling`, `roots`. */
  readonly accepts?: readonly string[];
  readonly answers?: { readonly [key: string]: Json | Answer };
  readonly state?: string;
}

/** A question, with what a form needs beside its method and parameters. */
export interface AskedQuestion extends Question {
  readonly key: string;
  readonly message: string;
  /** JSON Schema of the form; {} without one. */
  readonly schema: { readonly [keyword: string]: any };
  readonly url: string;
}

/** Returns an answer, the fields of a form (accepted), or null (no choice was made). */
export type OnInput = (question: AskedQuestion) => unknown;

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
  const { action } = given as { action?: unknown };
  const whole = action === "accept" || action === "decline" || action === "cancel";
  return (whole ? given : { action: "accept", content: given }) as Json;
}
