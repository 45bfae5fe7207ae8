// Makes the globals that browsers and Node.js add to the language, as far as scripts without files and network can use them.
(function (host, seed) {
  "use strict";
  const isView = ArrayBuffer.isView;

  // -- UTF-8

  const utf8 = (text) => Uint8Array.from(unescape(encodeURIComponent(text.toWellFormed())), (sign) => sign.charCodeAt(0));
  function bytesOf(source = new ArrayBuffer(0)) {
    if (isView(source)) return new Uint8Array(source.buffer, source.byteOffset, source.byteLength);
    if (source instanceof ArrayBuffer) return new Uint8Array(source);
    throw new TypeError("an ArrayBuffer or a view of one is needed");
  }

  // Characters of UTF-8 as bytes, and beginnings of some.
  const WHOLE = /[\0-\x7f]|[\xc2-\xdf][\x80-\xbf]|(?:\xe0[\xa0-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]|\xed[\x80-\x9f]|\xf0[\x90-\xbf][\x80-\xbf]|[\xf1-\xf3][\x80-\xbf]{2}|\xf4[\x80-\x8f][\x80-\xbf])[\x80-\xbf]/.source;
  const BEGUN = /(?:\xe0[\xa0-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]|\xed[\x80-\x9f]|\xf0[\x90-\xbf][\x80-\xbf]?|[\xf1-\xf3][\x80-\xbf]{1,2}|\xf4[\x80-\x8f][\x80-\xbf]?|[\xc2-\xf4])/.source;
  const RUNS = new RegExp(`((?:${WHOLE})+)|${BEGUN}|[^]`, "g"), LAST = new RegExp(`${BEGUN}$`);
  const binary = (bytes) => Array.from(bytes, (byte) => String.fromCharCode(byte)).join("");

  class TextEncoder {
    encoding = "utf-8";
    encode(text = "") { return utf8(String(text)); }
  }
  class TextDecoder {
    #rest = ""; // the beginning of a character, in a stream
    #begun = false;
    constructor(label = "utf-8", { fatal = false, ignoreBOM = false } = {}) {
      if (!/^\s*utf-?8\s*$/i.test(label)) throw new RangeError(`the encoding ${label} does not exist here: only utf-8 does`);
      Object.assign(this, { encoding: "utf-8", fatal, ignoreBOM });
    }
    decode(source, { stream = false } = {}) {
      const bytes = this.#rest + binary(bytesOf(source));
      this.#rest = stream ? (LAST.exec(bytes)?.[0] ?? "") : "";
      const text = bytes.slice(0, bytes.length - this.#rest.length).replace(RUNS, (all, whole) => {
        if (whole) return decodeURIComponent(escape(whole));
        if (this.fatal) throw new TypeError("the data is not valid UTF-8");
        return "\ufffd";
      });
      const marked = !this.#begun && !this.ignoreBOM && text[0] === "\ufeff";
      this.#begun = stream && (this.#begun || text !== "");
      return marked ? text.slice(1) : text;
    }
  }

  // -- random numbers: ChaCha20 with a key of the host

  const key = Uint32Array.from([0x61707865, 0x3320646e, 0x79622d32, 0x6b206574, ...seed, 0, 0, 0, 0]);
  let pool = []; // bytes that were not used yet
  function mix(x, a, b, c, d) {
    for (const [to, from, mixed, bits] of [[a, b, d, 16], [c, d, b, 12], [a, b, d, 8], [c, d, b, 7]]) {
      x[to] += x[from];
      x[mixed] = ((x[mixed] ^ x[to]) << bits) | ((x[mixed] ^ x[to]) >>> (32 - bits));
    }
  }
  function randomByte() {
    if (pool.length === 0) {
      const x = Uint32Array.from(key);
      for (let half = 0; half < 20; half += 1) {
        const by = half % 2; // columns, then diagonals
        for (let i = 0; i < 4; i += 1) mix(x, i, 4 + ((i + by) % 4), 8 + ((i + 2 * by) % 4), 12 + ((i + 3 * by) % 4));
      }
      pool = Array.from(new Uint8Array(x.map((value, place) => value + key[place]).buffer)).reverse();
      key[12] += 1;
      if (key[12] === 0) key[13] += 1;
    }
    return pool.pop();
  }
  const crypto = {
    getRandomValues(view) {
      const bytes = bytesOf(view);
      if (bytes.length > 65536) throw new DOMException("at most 65536 bytes at once", "QuotaExceededError");
      for (let place = 0; place < bytes.length; place += 1) bytes[place] = randomByte();
      return view;
    },
    randomUUID() {
      const bytes = Array.from({ length: 16 }, randomByte);
      bytes[6] = (bytes[6] & 0x0f) | 0x40;
      bytes[8] = (bytes[8] & 0x3f) | 0x80;
      const hex = bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("");
      return hex.replace(/^(.{8})(.{4})(.{4})(.{4})/, "$1-$2-$3-$4-");
    },
  };

  // -- copies

  function structuredClone(value, seen = new Map()) {
    const kind = Object.prototype.toString.call(value).slice(8, -1);
    if (["Function", "Symbol", "AsyncFunction", "GeneratorFunction", "Promise", "WeakMap", "WeakSet", "WeakRef"].includes(kind)) {
      throw new DOMException(`${kind === "Symbol" ? String(value) : kind} could not be cloned`, "DataCloneError");
    }
    if (value === null || typeof value !== "object") return value;
    if (seen.has(value)) return seen.get(value);
    const keep = (result) => (seen.set(value, result), result);
    const inner = (each) => structuredClone(each, seen);
    if (["Boolean", "Number", "String", "BigInt"].includes(kind)) return keep(Object(value.valueOf()));
    if (kind === "Date") return keep(new Date(value.getTime()));
    if (kind === "RegExp") return keep(new RegExp(value.source, value.flags));
    if (kind === "ArrayBuffer") return keep(value.slice(0));
    if (isView(value)) return keep(new value.constructor(inner(value.buffer), value.byteOffset, value.length ?? value.byteLength));
    if (kind === "Map") return [...value].reduce((map, [name, item]) => map.set(inner(name), inner(item)), keep(new Map()));
    if (kind === "Set") return [...value].reduce((set, item) => set.add(inner(item)), keep(new Set()));
    const errors = [EvalError, RangeError, ReferenceError, SyntaxError, TypeError, URIError, Error];
    const known = value instanceof Error && errors.find((each) => each.name === value.name || each === Error);
    const result = keep(known ? Object.create(known.prototype) : Array.isArray(value) ? new Array(value.length) : {});
    const names = known ? ["message", "stack", "cause"].filter((name) => Object.hasOwn(value, name)) : Object.keys(value);
    for (const name of names) {
      Object.defineProperty(result, name, { value: inner(value[name]), writable: true, configurable: true, enumerable: !known });
    }
    return result;
  }

  // -- what can be given up

  const end = Symbol("end"); // names what only this file calls
  class AbortSignal {
    #listeners = new Set(); // each is called once at most
    aborted = false;
    reason = undefined;
    onabort = null;
    [end](reason = new DOMException("This operation was aborted", "AbortError")) {
      if (this.aborted) return;
      Object.assign(this, { aborted: true, reason });
      for (const listener of [this.onabort, ...this.#listeners]) {
        try {
          (listener?.handleEvent ?? listener)?.call(this, { type: "abort", target: this });
        } catch (error) {
          host.write(3, [error]);
        }
      }
    }
    addEventListener(type, listener) { if (type === "abort" && listener) this.#listeners.add(listener); }
    removeEventListener(type, listener) { if (type === "abort") this.#listeners.delete(listener); }
    throwIfAborted() { if (this.aborted) throw this.reason; }
    static #when(start) { const signal = new AbortSignal(); start((reason) => signal[end](reason)); return signal; }
    static abort(reason) { return this.#when((abort) => abort(reason)); }
    static timeout(milliseconds) {
      return this.#when((abort) => setTimeout(() => abort(new DOMException("The operation was aborted due to timeout", "TimeoutError")), milliseconds));
    }
    static any(signals) {
      return this.#when((abort) => [...signals].forEach((each) => (each.aborted ? abort(each.reason) : each.addEventListener("abort", () => abort(each.reason)))));
    }
  }
  class AbortController {
    signal = new AbortSignal();
    abort(reason) { this.signal[end](reason); }
  }

  // -- addresses, as https://url.spec.whatwg.org has them; of hosts only the letters are checked

  const PORTS = { __proto__: null, "http:": "80", "https:": "443", "ws:": "80", "wss:": "443", "ftp:": "21", "file:": "" };
  const percents = (sign) => (sign > "\x7f" ? encodeURIComponent(sign) : `%${sign.charCodeAt(0).toString(16).toUpperCase().padStart(2, "0")}`);
  const escaped = (text, unsafe) => String(text).toWellFormed().replace(unsafe, percents);
  const FRAGMENT = /[^\x21-\x7e]|["<>`]/gu, QUERY = /[^\x21-\x7e]|["#<>]/gu, SPECIAL_QUERY = /[^\x21-\x7e]|["#<>']/gu;
  const PATH = /[^\x21-\x7e]|["#<>?^`{}]/gu, USER = /[^\x21-\x7e]|["#<>?^`{}/:;=@[\\\]|]/gu, FORM = /[^A-Za-z0-9*\-._ ]/gu, OPAQUE = /[^\x20-\x7e]/gu;
  const unescaped = (text) => new TextDecoder("utf-8", { ignoreBOM: true })
    .decode(Uint8Array.from(unescape(escaped(text, /[^\x00-\x7f]/gu)), (sign) => sign.charCodeAt(0)));

  function pathOf(text) {
    const done = [];
    text.split("/").slice(1).forEach((part, place, parts) => {
      const dots = part.replace(/%2e/gi, ".");
      if (dots === "..") done.pop();
      if (dots !== ".." && dots !== ".") done.push(escaped(part, PATH));
      else if (place === parts.length - 1) done.push("");
    });
    return `/${done.join("/")}`;
  }

  function parsed(input, base) {
    const wrong = new TypeError(`Invalid URL: ${input}`);
    let text = String(input).replace(/^[\0-\x20]+|[\0-\x20]+$|[\t\n\r]/g, "");
    const scheme = /^[a-z][a-z0-9+.-]*:/i.exec(text)?.[0] ?? "";
    if (!scheme && base === undefined) throw wrong;
    const protocol = scheme.toLowerCase() || base.protocol, special = protocol in PORTS;
    text = text.slice(scheme.length);
    if (special) text = text.replace(/^[^?#]*/, (part) => part.replaceAll("\\", "/"));
    if (special && scheme && protocol !== "file:") text = text.replace(/^\/*/, "//");
    const [, authority, path, query, hash] = /^(?:\/\/([^/?#]*))?([^?#]*)(\?[^#]*)?(#.*)?$/s.exec(text);
    const url = { protocol, username: "", password: "", hostname: null, port: "", query: query && escaped(query.slice(1), special ? SPECIAL_QUERY : QUERY) };
    if (authority !== undefined || (protocol === "file:" && scheme)) {
      const [, user, password, name, port] = /^(?:([^:]*)(?::(.*))?@)?(\[[0-9a-f:.]+\]|[^:@[\]]*)(?::(\d*))?$/is.exec(authority ?? "") ?? [];
      const hostname = special ? unescaped(name ?? "").toLowerCase() : escaped(name ?? "", OPAQUE);
      if (name === undefined || port > 65535 || /[\0-\x20\x7f-\uffff#%/<>?@\\^|]/.test(hostname)) throw wrong;
      if (hostname === "" && (protocol === "file:" ? port : special || port || user !== undefined)) throw wrong;
      url.hostname = protocol === "file:" && hostname === "localhost" ? "" : hostname;
      Object.assign(url, { username: escaped(user ?? "", USER), password: escaped(password ?? "", USER) });
      url.port = port && String(Number(port)) !== PORTS[protocol] ? String(Number(port)) : "";
      url.path = path || special ? pathOf(path[0] === "/" ? path : `/${path}`) : "";
    } else if (scheme) {
      url.path = path[0] === "/" ? pathOf(path) : escaped(path, OPAQUE);
    } else {
      if (base.path !== "" && base.path[0] !== "/" && (path || query || !hash)) throw wrong;
      Object.assign(url, { username: base.username, password: base.password, hostname: base.hostname, port: base.port });
      url.path = !path ? base.path : pathOf(path[0] === "/" ? path : (base.path || "/").replace(/[^/]*$/, "") + path);
      if (!path && query === undefined) url.query = base.query;
    }
    return { ...url, hash: hash && escaped(hash.slice(1), FRAGMENT) };
  }

  const part = (sign, text) => (text === undefined ? "" : sign + text);
  const hostOf = (url) => (url.hostname ?? "") + (url.port && `:${url.port}`);
  function written(url) {
    const user = url.username || url.password ? `${url.username}${url.password && `:${url.password}`}@` : "";
    return `${url.protocol}${url.hostname === null ? "" : `//${user}${hostOf(url)}`}${url.path}${part("?", url.query)}${part("#", url.hash)}`;
  }

  const pairs = (text) => text.split("&").filter(Boolean).map((each) => /^([^=]*)=?(.*)$/s.exec(each.replaceAll("+", " ")).slice(1).map(unescaped));
  const owners = new WeakMap(); // what is done after a change of parameters
  class URLSearchParams {
    #pairs = [];
    constructor(from = "") {
      const list = from === null || typeof from !== "object" ? pairs(String(from).replace(/^\?/, ""))
        : typeof from[Symbol.iterator] === "function" ? Array.from(from, (each) => [...each]) : Object.entries(from);
      if (list.some((each) => each.length !== 2)) throw new TypeError("each parameter needs a name and a value");
      this.#pairs = list.map((each) => each.map((text) => String(text).toWellFormed()));
    }
    [end](text) { this.#pairs = pairs(text); }
    #set(list) { this.#pairs = list; owners.get(this)?.(String(this)); }
    get size() { return this.#pairs.length; }
    append(name, value) { this.#set([...this.#pairs, [String(name), String(value)]]); }
    delete(name, value) { this.#set(this.#pairs.filter((each) => each[0] !== String(name) || (value !== undefined && each[1] !== String(value)))); }
    get(name) { return this.getAll(name)[0] ?? null; }
    getAll(name) { return this.#pairs.filter((each) => each[0] === String(name)).map((each) => each[1]); }
    has(name, value) { return this.getAll(name).some((each) => value === undefined || each === String(value)); }
    set(name, value) {
      const first = this.#pairs.findIndex((each) => each[0] === String(name));
      if (first < 0) return this.append(name, value);
      this.#pairs[first][1] = String(value);
      this.#set(this.#pairs.filter((each, place) => place <= first || each[0] !== String(name)));
    }
    sort() { this.#set(this.#pairs.sort(([a], [b]) => (a < b ? -1 : Number(a > b)))); }
    forEach(use, self) { for (const [name, value] of this) use.call(self, value, name, this); }
    keys() { return this.#pairs.map((each) => each[0]).values(); }
    values() { return this.#pairs.map((each) => each[1]).values(); }
    entries() { return this.#pairs.map((each) => [...each]).values(); }
    [Symbol.iterator]() { return this.entries(); }
    toString() { return this.#pairs.map((each) => each.map((text) => escaped(text, FORM).replaceAll(" ", "+")).join("=")).join("&"); }
  }

  // What a part of an address reads, and what it is made of.
  const PARTS = {
    protocol: [(url) => url.protocol, (text) => ({ protocol: text.replace(/(:.*)?$/s, ":").toLowerCase() })],
    username: [(url) => url.username, (text) => ({ username: escaped(text, USER) })],
    password: [(url) => url.password, (text) => ({ password: escaped(text, USER) })],
    host: [hostOf, (text, url) => ({ hostname: text.replace(/[/?#@\\].*$/s, ""), port: /:\d+$/.test(text) ? "" : url.port })],
    hostname: [(url) => url.hostname ?? "", (text) => ({ hostname: text.replace(/[/?#\\].*$/s, "").replace(/^[^[]*:.*$/s, "?") })],
    port: [(url) => url.port, (text) => ({ port: text === "" ? "" : /^\d+/.exec(text)[0] })],
    pathname: [(url) => url.path, (text) => ({ path: escaped(text.replace(/^\/?/, "/"), PATH) })],
    search: [(url) => (url.query ? `?${url.query}` : ""), (text) => ({ query: text === "" ? undefined : escaped(text.replace(/^\?/, ""), QUERY) })],
    hash: [(url) => (url.hash ? `#${url.hash}` : ""), (text) => ({ hash: text === "" ? undefined : text.replace(/^#/, "") })],
    href: [written, null],
  };
  const states = new WeakMap(); // the parts of each address, and its parameters
  class URL {
    constructor(input, base) {
      const url = parsed(input, base === undefined ? undefined : parsed(base));
      states.set(this, { url, params: new URLSearchParams(url.query) });
      owners.set(this.searchParams, (query) => { states.get(this).url.query = query || undefined; });
    }
    static canParse(input, base) { return URL.parse(input, base) !== null; }
    static parse(input, base) { try { return new URL(input, base); } catch { return null; } }
    get searchParams() { return states.get(this).params; }
    get origin() { return this.protocol in PORTS && this.protocol !== "file:" ? `${this.protocol}//${this.host}` : "null"; }
    toString() { return this.href; }
    toJSON() { return this.href; }
  }
  for (const [name, [get, made]] of Object.entries(PARTS)) {
    const set = function (text) {
      const state = states.get(this);
      try {
        const url = parsed(made ? written({ ...state.url, ...made(String(text), state.url) }) : text);
        if (made && url.protocol in PORTS !== state.url.protocol in PORTS) return;
        state.url = url;
      } catch (error) {
        if (!made) throw error; // a wrong part changes nothing
      }
      state.params[end](state.url.query ?? "");
    };
    Object.defineProperty(URL.prototype, name, { get() { return get(states.get(this).url); }, set, configurable: true, enumerable: true });
  }

  const made = { TextEncoder, TextDecoder, AbortSignal, AbortController, URL, URLSearchParams, crypto };
  for (const name of Object.keys(made)) host.expose(name, made[name]);
  host.expose("structuredClone", (value) => structuredClone(value));
})
