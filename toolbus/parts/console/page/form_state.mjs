// Turns what was typed into a form into JSON text, and JSON into what a form shows. Pure: knows no page.
//
// A state is what was typed at one place of a model. Numbers stay text from the first key to the request, so
// 9223372036854775808 and 1.0 arrive as they were typed.

import { isNumber, isObject, parseJson, writeJson } from "./json.mjs";

const MAX_START_DEPTH = 6; // levels of required values that are opened by themselves: a schema may contain itself
const NUMBER = /^-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?$/;
const SHOWABLE = /^[^\u0000-\u0008\u000b-\u001f\u007f]*$/; // what a text field shows as it is

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
