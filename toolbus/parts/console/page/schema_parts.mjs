// Makes one plain schema of a JSON Schema: follows references, merges `allOf`, finds what there is to choose. Pure.

import { isObject, writeJson } from "./json.mjs";

const MAX_REFERENCES = 20; // in a row

const OBJECT_WORDS = ["properties", "required", "additionalProperties", "patternProperties", "minProperties", "propertyNames"];
const ARRAY_WORDS = ["items", "prefixItems", "minItems", "maxItems", "uniqueItems", "contains"];
const STRING_WORDS = ["minLength", "maxLength", "pattern", "format"];
const NUMBER_WORDS = ["minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"];
const WORDS_OF_TYPES = { object: OBJECT_WORDS, array: ARRAY_WORDS, string: STRING_WORDS, number: NUMBER_WORDS };
const ABOUT = ["title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly", "$comment"];
const BESIDE_TYPES = new Set([...ABOUT, "$defs", "definitions", "$id", "$schema", "nullable", "discriminator"]);

/** Follows `$ref`; what stands beside it is added. Returns null where it leads nowhere. */
export function resolved(schema, root) {
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
export function mergedAll(schema, root) {
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
export function optionsOf(schema, root) {
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

/** Returns the type that a schema without one speaks of; undefined where it speaks of none. */
export function impliedType(schema) {
  return Object.keys(WORDS_OF_TYPES).find((type) => WORDS_OF_TYPES[type].some((word) => schema[word] !== undefined));
}

/** Returns a schema of several types as one of a single type: only with what concerns it. */
export function ofOneType(schema, type) {
  const kind = type === "integer" ? "number" : type;
  const foreign = new Set(Object.entries(WORDS_OF_TYPES).flatMap(([each, words]) => (each === kind ? [] : words)));
  const own = Object.entries(schema).filter(([word]) => !foreign.has(word) && !["default", "title", "description"].includes(word));
  return { ...Object.fromEntries(own), type };
}
