// Reads a JSON Schema as what a form draws, and turns what was typed into JSON text. Pure: knows no page.
//
// A model says what one place of the arguments takes; a state is what was typed there. Numbers stay text from the first
// key to the request, so 9223372036854775808 and 1.0 arrive as they were typed. The form checks nothing but that its
// text is JSON: the bus checks arguments, and names the place and the rule. What cannot be drawn is JSON text.

import { isNumber, isObject, parseJson, writeJson } from "./json.mjs";

const MAX_REFERENCES = 20; // in a row
const MAX_START_DEPTH = 6; // levels of required values that are opened by themselves: a schema may contain itself
const MAX_STARTED = 20; // items that are there from the beginning
const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;
const SHOWABLE = /^[^\u0000-\u0008\u000b-\u001f\u007f]*$/; // what a text field shows as it is

const OBJECT_WORDS = ["properties", "required", "additionalProperties", "patternProperties", "minProperties", "propertyNames"];
const ARRAY_WORDS = ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"];
const STRING_WORDS = ["minLength", "maxLength", "pattern", "format"];
const NUMBER_WORDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
const WORDS_OF_TYPES = { object: OBJECT_WORDS, array: ARRAY_WORDS, string: STRING_WORDS, number: NUMBER_WORDS };
const ABOUT = ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"];
const BESIDE_TYPES = new Set([...ABOUT, "$defs", "definitions", "$id", "$schema", "nullable", "discriminator"]);

// -- schema → model ------------------------------------------------------------------------------------------------

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

/** Follows `$ref`; what stands beside it is added. Returns null where it leads nowhere. */
function resolved(schema, root) {
  for (let hops = 0; schema.$ref !== undefined; hops++) {
    const target = pointed(schema.$ref, root);
    if (hops === MAX_REFERENCES || !isObject(target)) return target === true ? { ...schema, $ref: undefined } : null;
    const { $ref, ...beside } = schema;
    schema = Object.keys(beside).length ? { ...target, ...beside, ...(target.allOf && beside.allOf ? { allOf: [...target.allOf, ...beside.allOf] } : {}) } : target;
  }
  return schema.$dynamicRef === undefined && schema.$recursiveRef === undefined ? schema : null;
}

function pointed(reference, root) {
  if (typeof reference !== "string" || !/^#(\/|$)/.test(reference)) return undefined;
  let at = root;
  for (const part of reference.slice(2).split("/").filter((each, index, all) => all.length > 1 || each)) {
    let name = part;
    try {
      name = decodeURIComponent(part);
    } catch {
      // A lone %: the name has it.
    }
    name = name.replaceAll("~1", "/").replaceAll("~0", "~");
    if ((!isObject(at) && !Array.isArray(at)) || !Object.hasOwn(at, name)) return undefined;
    at = at[name];
  }
  return at;
}

/** Merges `allOf` into its schema; null where the parts say different things of the same. */
function mergedAll(schema, root) {
  if (!Array.isArray(schema.allOf)) return schema;
  const { allOf, ...rest } = schema;
  let whole = rest;
  for (const part of allOf) {
    if (part === true) continue;
    const known = isObject(part) ? resolved(part, root) : null;
    const flat = known && mergedAll(known, root);
    whole = flat && merged(whole, flat);
    if (!whole) return null;
  }
  return whole;
}

function merged(one, other) {
  const whole = { ...one };
  for (const [word, value] of Object.entries(other)) {
    if (whole[word] === undefined || word === "$defs" || word === "definitions") whole[word] ??= value;
    else if (ABOUT.includes(word)) continue; // what stands outside goes first
    else if (word === "required") whole.required = [...new Set([...whole.required, ...value])];
    else if (word === "properties") {
      for (const [name, below] of Object.entries(value)) {
        const known = Object.hasOwn(whole.properties, name) ? whole.properties[name] : undefined;
        const both = known === undefined ? below : { allOf: [known, below] };
        whole.properties = Object.fromEntries([...Object.entries(whole.properties).filter(([each]) => each !== name), [name, both]]);
      }
    } else if (["minimum", "minLength", "minItems"].includes(word)) whole[word] = Number(value) > Number(whole[word]) ? value : whole[word];
    else if (["maximum", "maxLength", "maxItems"].includes(word)) whole[word] = Number(value) < Number(whole[word]) ? value : whole[word];
    else if (writeJson(whole[word]) !== writeJson(value)) return null;
  }
  return whole;
}

/** Returns the schemas of a chooser, each with what stands beside it; null where there is nothing to choose. */
function optionsOf(schema, root) {
  const word = ["oneOf", "anyOf"].find((each) => Array.isArray(schema[each]) && schema[each].length);
  if (!word) return null;
  const { [word]: options, ...rest } = schema;
  const beside = Object.fromEntries(Object.entries(rest).filter(([name]) => !BESIDE_TYPES.has(name)));
  const drawable = options.some((each) => !isObject(each) || each.$ref !== undefined || each.enum || Object.hasOwn(each, "const") || each.type || each.properties || each.anyOf || each.oneOf || each.allOf);
  if (!drawable) return null; // only rules about what is drawn already, as "one of these two is required"
  if (!Object.keys(beside).length) return options;
  return options.map((each) => {
    const known = isObject(each) ? resolved(each, root) : null;
    return known ? { title: known.title, allOf: [beside, known] } : each;
  });
}

function impliedType(schema) {
  return Object.keys(WORDS_OF_TYPES).find((type) => WORDS_OF_TYPES[type].some((word) => schema[word] !== undefined));
}

/** Returns a schema of several types as one of a single type: only with what concerns it. */
function ofOneType(schema, type) {
  const kind = type === "integer" ? "number" : type;
  const foreign = new Set(Object.entries(WORDS_OF_TYPES).flatMap(([each, words]) => (each === kind ? [] : words)));
  const own = Object.entries(schema).filter(([word]) => !foreign.has(word) && !["default", "title", "description"].includes(word));
  return { ...Object.fromEntries(own), type };
}

function once(make) {
  let made;
  return () => (made ??= make());
}

// -- states --------------------------------------------------------------------------------------------------------

/** Returns the state with which a place begins. */
export function startOf(model, depth = 0) {
  if (model.fallback !== undefined) {
    const state = stateOf(model, model.fallback);
    if (state) return state;
  }
  switch (model.kind) {
    case "string":
      return { text: "" };
    case "number":
      return { text: "" };
    case "boolean":
      return { value: false };
    case "enum":
      return { at: model.values.length === 1 ? 0 : -1 };
    case "object":
      return {
        fields: model.properties.map(({ required, below }) =>
          required && depth < MAX_START_DEPTH ? { on: true, state: startOf(below(), depth + 1) } : { on: required, state: null },
        ),
        more: [],
      };
    case "array": {
      const count = depth < MAX_START_DEPTH ? Math.min(model.least, model.most) : 0;
      return { items: Array.from({ length: count }, (_, at) => startOf(model.below(at), depth + 1)) };
    }
    case "union":
      return depth < MAX_START_DEPTH ? { at: 0, state: startOf(model.options[0](), depth + 1) } : { at: -1, state: null };
    case "json":
      return { text: "" };
    default:
      return {};
  }
}

/** Returns the state that shows a value; null where this model cannot show it without loss. */
export function stateOf(model, value) {
  switch (model.kind) {
    case "string":
      return typeof value === "string" && SHOWABLE.test(value) && (model.lines || !value.includes("\n")) ? { text: value } : null;
    case "number":
      return isNumber(value) ? { text: String(value) } : null;
    case "boolean":
      return typeof value === "boolean" ? { value } : null;
    case "null":
      return value === null ? {} : null;
    case "const":
      return writeJson(value) === writeJson(model.value) ? {} : null;
    case "enum": {
      const at = model.values.findIndex((each) => writeJson(each) === writeJson(value));
      return at < 0 ? null : { at };
    }
    case "object":
      return objectState(model, value);
    case "array": {
      if (!Array.isArray(value) || value.length > model.most) return null;
      const items = value.map((each, at) => stateOf(model.below(at), each));
      return items.includes(null) ? null : { items };
    }
    case "union":
      for (const [at, option] of model.options.entries()) {
        const state = stateOf(option(), value);
        if (state) return { at, state };
      }
      return null;
    default:
      return { text: writeJson(value, 2) };
  }
}

function objectState(model, value) {
  if (!isObject(value)) return null;
  const known = new Set(model.properties.map(({ name }) => name));
  const fields = model.properties.map(({ name, required, below }) => {
    if (!Object.hasOwn(value, name)) return required ? null : { on: false, state: null };
    const state = stateOf(below(), value[name]);
    return state && { on: true, state };
  });
  const rest = Object.entries(value).filter(([name]) => !known.has(name));
  if (fields.includes(null) || (rest.length && !model.more)) return null;
  const more = rest.map(([name, each]) => ({ name, state: stateOf(model.more(), each) }));
  return more.some(({ state }) => !state) ? null : { fields, more };
}

/**
 * Returns the JSON text of a state, and why it cannot be sent: {text, problems: [{path, message}]}. `path` is an array
 * of names and indexes. With problems the text is not to be sent.
 */
export function writeState(model, state) {
  const problems = [];
  const text = written(model, state, [], problems);
  return { text, problems };
}

function written(model, state, path, problems) {
  const refuse = (message) => {
    problems.push({ path, message });
    return "null";
  };
  switch (model.kind) {
    case "string":
      return JSON.stringify(state.text);
    case "number":
      if (NUMBER.test(state.text.trim())) return state.text.trim();
      return refuse(state.text.trim() ? `${JSON.stringify(state.text)} is not a number in JSON` : "a number is missing");
    case "boolean":
      return String(state.value);
    case "null":
      return "null";
    case "const":
      return writeJson(model.value);
    case "enum":
      return state.at < 0 ? refuse("choose a value") : writeJson(model.values[state.at]);
    case "object":
      return writtenObject(model, state, path, problems);
    case "array":
      return `[${state.items.map((each, at) => written(model.below(at), each, [...path, at], problems)).join(",")}]`;
    case "union":
      return state.at < 0 ? refuse("choose what it is") : written(model.options[state.at](), state.state, path, problems);
    default:
      return checkedJson(state.text, refuse);
  }
}

function writtenObject(model, state, path, problems) {
  const parts = [];
  const seen = new Set();
  const add = (name, below, inner) => {
    if (seen.has(name)) problems.push({ path: [...path, name], message: `the name ${JSON.stringify(name)} is there twice` });
    seen.add(name);
    parts.push(`${JSON.stringify(name)}:${written(below, inner, [...path, name], problems)}`);
  };
  model.properties.forEach(({ name, below }, at) => {
    const { on, state: inner } = state.fields[at];
    if (on) add(name, below(), inner ?? startOf(below()));
  });
  for (const { name, state: inner } of state.more) add(name, model.more(), inner);
  return `{${parts.join(",")}}`;
}

function checkedJson(text, refuse) {
  if (!text.trim()) return refuse("a value in JSON is missing");
  try {
    parseJson(text);
    return text.trim();
  } catch (error) {
    return refuse(`this is not JSON: ${error.message}`);
  }
}

/** Returns arguments that were written as JSON text: {text, problems} as `writeState`. */
export function writeArguments(text) {
  const problems = [];
  const sent = checkedJson(text, (message) => {
    problems.push({ path: [], message });
    return "";
  });
  if (!problems.length && !isObject(parseJson(text))) problems.push({ path: [], message: "arguments are an object: {…}" });
  return { text: sent, problems };
}

/** Returns a path as people write it: `places[2].name`. */
export function pathText(path) {
  return path.map((part, at) => (typeof part === "number" ? `[${part}]` : (at ? "." : "") + part)).join("");
}
