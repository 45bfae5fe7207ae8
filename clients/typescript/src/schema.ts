/** Reads the schema of a tool: JSON Schema, or a type of zod, arktype, valibot … by the interface Standard JSON Schema. */
import { SetupError, toJson } from "./values.js";

/** A type of a schema library; https://standardschema.dev defines the interface. */
export interface StandardSchema<Output = unknown> {
  readonly "~standard": {
    readonly validate: (value: unknown) => Validated<Output> | Promise<Validated<Output>>;
    readonly types?: { readonly input: unknown; readonly output: Output } | undefined;
  };
}

type Issue = { readonly message: string; readonly path?: readonly unknown[] | undefined };
type Validated<Output> = { readonly value: Output; readonly issues?: undefined } | { readonly issues: readonly Issue[] };
type Converter = { readonly jsonSchema?: { input(options: { target: string }): object; output(options: { target: string }): object } };

/** JSON Schema as a literal. */
export type JsonSchema = { readonly [keyword: string]: unknown };
/** What describes the arguments or the output of a tool. */
export type Schema = StandardSchema | JsonSchema;

type Primitives = { string: string; number: number; integer: number; boolean: boolean; null: null };
type Value<S> = S extends { readonly enum: readonly (infer E)[] }
  ? E
  : S extends { readonly type: infer T extends keyof Primitives }
    ? Primitives[T]
    : S extends { readonly type: "array"; readonly items: infer I }
      ? Value<I>[]
      : S extends { readonly properties: infer P }
        ? { [K in Extract<keyof P, Given<S, P>>]: Value<P[K]> } & { [K in Exclude<keyof P, Given<S, P>>]?: Value<P[K]> }
        : any;
// A property is given if it is required, or has a default, which the bus fills in.
type Given<S, P> =
  | (S extends { readonly required: readonly (infer R)[] } ? R : never)
  | { [K in keyof P]: P[K] extends { readonly default: unknown } ? K : never }[keyof P];

/** The arguments that a handler gets for a schema. */
export type Arguments<S> = S extends StandardSchema<infer Output> ? Output : S extends JsonSchema ? Value<S> : any;

/**
 * Returns the JSON Schema of a schema, as text.
 *
 * @throws SetupError the library of the schema cannot write it as JSON Schema.
 */
export function schemaJson(schema: Schema | undefined, side: "input" | "output", tool: string): string {
  if (schema === undefined) return '{"type":"object"}';
  if (!isStandard(schema)) return toJson(schema);
  const converter = (schema["~standard"] as Converter).jsonSchema;
  const own = schema as { toJSONSchema?(options: { io: string }): object; toJsonSchema?(): object };
  const made = converter?.[side]({ target: "draft-2020-12" }) ?? own.toJSONSchema?.({ io: side }) ?? own.toJsonSchema?.();
  if (made !== undefined) return toJson(made);
  throw new SetupError(`the schema of tool '${tool}' cannot be written as JSON Schema by its library: pass JSON Schema`);
}

/** Returns arguments as a schema library reads them, defaults and conversions included, or the text of what is wrong. */
export async function validated(schema: StandardSchema, value: unknown): Promise<{ value: unknown } | { fault: string }> {
  const outcome = await schema["~standard"].validate(value);
  if (outcome.issues === undefined) return { value: outcome.value };
  const place = (issue: Issue) =>
    ["arguments", ...(issue.path ?? []).map((step) => String(typeof step === "object" && step ? (step as { key: unknown }).key : step))].join(".");
  return { fault: outcome.issues.map((issue) => `${place(issue)}: ${issue.message}`).join("; ") };
}

/** Tells whether a schema is a type of a library. */
export function isStandard(schema: Schema): schema is StandardSchema {
  return "~standard" in schema;
}
