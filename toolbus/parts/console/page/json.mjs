// Reads and writes JSON without loss: 9223372036854775808 and 1.0 stay what was written.

/** A number that a JavaScript number would write differently. */
export class JsonNumber {
  constructor(text) {
    this.text = text;
  }

  valueOf() {
    return Number(this.text);
  }

  toString() {
    return this.text;
  }

  toJSON() {
    return JSON.rawJSON ? JSON.rawJSON(this.text) : Number(this.text);
  }
}

/** Returns the value of a JSON text; throws a SyntaxError. */
export function parseJson(text) {
  return JSON.parse(text, (_key, value, context) => {
    const source = typeof value === "number" ? context?.source : undefined;
    return source === undefined || source === String(value) ? value : new JsonNumber(source);
  });
}

/** Returns the text of a value; `indent` spaces a level, 0 for one line. */
export function writeJson(value, indent = 0) {
  return JSON.stringify(value, null, indent) ?? "null";
}

export const isNumber = (value) => typeof value === "number" || value instanceof JsonNumber;

export const isObject = (value) =>
  typeof value === "object" && value !== null && !Array.isArray(value) && !(value instanceof JsonNumber);
