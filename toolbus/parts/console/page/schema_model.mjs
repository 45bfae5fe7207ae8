// Reads a JSON Schema as what a form draws. Pure: knows no page.
//
// A model says what one place of the arguments takes; `form_state` has what was typed there. The form checks nothing but
// that its text is JSON: the bus checks arguments, and names the place and the rule. What cannot be drawn is JSON text.

import { isObject, writeJson } from "./json.mjs";
import { impliedType, mergedAll, ofOneType, optionsOf, resolved } from "./schema_parts.mjs";

const MAX_STARTED = 20; // items that are there from the beginning

/** Returns the model of a tool's arguments, which are always an object. */
export function argumentsModel(schema) {
  const root = isObject(schema) ? schema : {};
  const model = modelOf(root, root);
  return model.kind === "json" && !model.why ? modelOf({ ...root, type: "object" }, root) : model; // `true`, `{}`
}

/**
 * Returns the model of a schema: `kind` is "string", "number", "boolean", "null", "const", "enum", "object", "array",
 * "union" or "json"; beside it `title`, `description`, `fallback` (the default, or undefined), `hint` (limits as words),
 * and what the kind needs. Models of what lies below are made by `below()`: a schema may contain itself.
 */
export function modelOf(schema, root) {
  if (schema === true || schema === undefined) return json({}, "");
  if (schema === false) return json({}, "no value is allowed here");
  try {
    const known = resolved(schema, root);
    if (!known) return json(schema, "it refers to a schema that is not here");
    const whole = mergedAll(known, root);
    if (!whole) return json(known, "it combines schemas in a way that a form cannot show");
    return drawn(whole, root);
  } catch {
    return json({}, "this schema cannot be read"); // it was declared by a stranger, and may be anything
  }
}

function drawn(schema, root) {
  if (Object.hasOwn(schema, "const")) return { ...about(schema), kind: "const", value: schema.const };
  if (Array.isArray(schema.enum)) return { ...about(schema), kind: "enum", values: schema.enum };
  const options = optionsOf(schema, root);
  if (options) return union(schema, options, root);
  const type = schema.type ?? impliedType(schema);
  if (Array.isArray(type) && type.length) {
    if (type.length === 1) return drawn({ ...schema, type: type[0] }, root);
    return union(schema, type.map((one) => ofOneType(schema, one)), root);
  }
  if (schema.nullable === true && type && type !== "null") {
    return union(schema, [{ ...schema, nullable: undefined, default: undefined }, { type: "null" }], root);
  }
  const draw = Object.hasOwn(KINDS, type ?? "") ? KINDS[type] : null;
  return draw ? draw(schema, root) : json(schema, type ? `its type is ${writeJson(type)}` : "");
}

const KINDS = {
  string: (schema) => ({
    ...about(schema),
    kind: "string",
    secret: schema.format === "password" || schema.writeOnly === true,
    lines: !schema.format && !schema.pattern && !(Number(schema.maxLength) <= 200),
  }),
  number: (schema) => ({ ...about(schema), kind: "number" }),
  integer: (schema) => ({ ...about(schema), kind: "number", integer: true }),
  boolean: (schema) => ({ ...about(schema), kind: "boolean" }),
  null: (schema) => ({ ...about(schema), kind: "null" }),
  object: objectModel,
  array: arrayModel,
};

function objectModel(schema, root) {
  const required = new Set(Array.isArray(schema.required) ? schema.required : []);
  const listed = isObject(schema.properties) ? Object.entries(schema.properties) : [];
  const missing = [...required].filter((name) => !listed.some(([other]) => other === name)).map((name) => [name, true]);
  const properties = [...listed, ...missing].map(([name, below]) => ({
    name,
    required: required.has(name),
    below: once(() => modelOf(below, root)),
  }));
  const patterns = isObject(schema.patternProperties) ? Object.entries(schema.patternProperties) : [];
  const more = patterns.length ? patterns[0][1] : schema.additionalProperties;
  const open = patterns.length > 0 || (more === undefined ? !properties.length : more !== false);
  return {
    ...about(schema),
    kind: "object",
    properties,
    names: patterns.map(([pattern]) => pattern),
    more: open ? once(() => modelOf(more ?? true, root)) : null,
  };
}

function arrayModel(schema, root) {
  const tuple = schema.prefixItems ?? (Array.isArray(schema.items) ? schema.items : []);
  const rest = Array.isArray(schema.items) ? schema.additionalItems : schema.items;
  const first = tuple.map((each) => once(() => modelOf(each, root)));
  const most = schema.maxItems === undefined ? Infinity : Number(schema.maxItems);
  const after = rest === false ? null : once(() => modelOf(rest ?? true, root));
  return {
    ...about(schema),
    kind: "array",
    least: Math.min(Number(schema.minItems ?? 0), MAX_STARTED),
    most: after ? most : Math.min(most, first.length),
    below: (at) => (at < first.length ? first[at] : after)?.() ?? json({}, ""),
    tuple: first.length,
  };
}

function union(schema, options, root) {
  const models = options.map((each) => once(() => modelOf(each, root)));
  return { ...about(schema), kind: "union", options: models, names: once(() => named(models)) };
}

/** Returns a name for each option, no two alike. */
function named(models) {
  const names = models.map((model) => nameOf(model()));
  return names.map((name, at) => (names.indexOf(name) === names.lastIndexOf(name) ? name : `${name} (${at + 1})`));
}

function nameOf(model, depth = 0) {
  if (model.title) return model.title;
  if (model.kind === "const") return writeJson(model.value);
  if (model.kind === "object") {
    const mark = model.properties.find(({ below }) => below().kind === "const"); // what tells it from the others
    return mark ? `${mark.name}: ${writeJson(mark.below().value)}` : "object";
  }
  if (model.kind === "array" && !model.tuple && depth < 2) return `list of ${nameOf(model.below(0), depth + 1)}`;
  return typeName(model);
}

/** Returns a word for what a model takes. */
export function typeName(model) {
  const words = { string: "text", enum: "one of", array: model.tuple ? "tuple" : "list", json: "any JSON", union: "one of" };
  return model.integer ? "integer" : (words[model.kind] ?? model.kind);
}

function json(schema, why) {
  return { ...about(schema), kind: "json", why };
}

function about(schema) {
  return {
    title: typeof schema.title === "string" ? schema.title : "",
    description: typeof schema.description === "string" ? schema.description : "",
    fallback: schema.default,
    hint: hintOf(schema),
  };
}

/** Returns the limits of a schema as words. */
function hintOf(schema) {
  const say = (word, text) => (schema[word] === undefined || schema[word] === null ? "" : text(writeText(schema[word])));
  const least = schema.minLength ?? schema.minItems ?? schema.minProperties;
  const most = schema.maxLength ?? schema.maxItems ?? schema.maxProperties;
  const unit = schema.maxLength ?? schema.minLength ? " characters" : schema.maxItems ?? schema.minItems ? " items" : " fields";
  const amount =
    least === undefined && most === undefined
      ? ""
      : least === undefined
        ? `at most ${most}${unit}`
        : most === undefined
          ? `at least ${least}${unit}`
          : `${least === most ? most : `${least} to ${most}`}${unit}`;
  return [
    say("format", (text) => FORMATS.get(text) ?? text),
    say("minimum", (text) => `≥ ${text}`),
    say("exclusiveMinimum", (text) => (text === "true" ? "not the least itself" : `> ${text}`)),
    say("maximum", (text) => `≤ ${text}`),
    say("exclusiveMaximum", (text) => (text === "true" ? "not the most itself" : `< ${text}`)),
    say("multipleOf", (text) => `a multiple of ${text}`),
    amount,
    say("pattern", (text) => `matches ${text}`),
    schema.uniqueItems === true ? "each once" : "",
    schema.deprecated === true ? "deprecated" : "",
  ]
    .filter(Boolean)
    .join(", ");
}

const FORMATS = new Map([
  ["date", "a date, as 2026-01-31"],
  ["time", "a time, as 12:30:00Z"],
  ["date-time", "a time, as 2026-01-31T12:30:00Z"],
  ["duration", "a duration, as PT90S"],
  ["email", "an email address"],
  ["uri", "a URI"],
  ["uuid", "a UUID"],
]);

const writeText = (value) => (typeof value === "string" ? value : writeJson(value));

function once(make) {
  let made;
  return () => (made ??= make());
}
