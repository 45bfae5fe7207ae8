// Makes the object `spindle` as far as it is about tools and what an operator may grant. Other announcements of an extension have no effect and a
// warning; other requests throw an error that names them.
(function (host, manifest, announcements, permissions) {
  "use strict";
  const { stringify } = JSON; // an extension may replace it
  const EVENT = "TOOL_INVOCATION";
  const ANNOUNCES = new RegExp(`^(?:${announcements})$`);
  const SILENT = new Set(["then", "toJSON", "constructor", "prototype"]); // what the language itself looks up
  const INFO = 6, WARNING = 4, ERROR = 3, DEBUG = 7;
  const handlers = [];
  const denied = new Set();
  const changed = new Set();
  const warned = new Set();
  const waiting = new Map(); // what waits for the answer of each request
  let requests = 0;
  let granted = ["tools", ...permissions];

  function ignored(name) {
    if (!warned.has(name) && warned.size < 100) {
      warned.add(name);
      host.post("ignored", name);
    }
    return () => {};
  }

  function absent(name) {
    return new Proxy(function () {}, {
      get: (target, key) => (typeof key === "symbol" || SILENT.has(key) ? undefined : absent(`${name}.${key}`)),
      set: () => true,
      apply: () => {
        if (ANNOUNCES.test(name)) return ignored(name);
        throw new Error(`${name} does not exist here`);
      },
      construct: () => {
        throw new Error(`${name} does not exist here`);
      },
    });
  }

  function withAbsent(name, members) {
    return new Proxy(members, {
      get: (target, key) => (typeof key === "symbol" || SILENT.has(key) || key in target ? target[key] : absent(`${name}.${key}`)),
    });
  }

  function subscribe(set) {
    return (handler) => {
      if (typeof handler !== "function") throw new TypeError("a handler must be a function");
      set.add(handler);
      return () => void set.delete(handler);
    };
  }

  function notify(set, detail) {
    for (const handler of [...set]) {
      try {
        handler(detail);
      } catch (error) {
        host.write(ERROR, [error]);
      }
    }
  }

  // Every handler is called, in order; the first that returns something, or throws, decides.
  async function invoke(payload) {
    if (handlers.length === 0) throw new Error(`No ${EVENT} handler registered`);
    let decision;
    for (const handler of [...handlers]) {
      try {
        const value = await handler(payload);
        if (value !== undefined && value !== null) decision ??= { value };
      } catch (error) {
        decision ??= { error };
      }
    }
    if (decision === undefined) return null;
    if ("error" in decision) throw decision.error;
    return decision.value;
  }

  // Asks the host's side for something; what it is asked for is a JSON text.
  function ask(kind, ...values) {
    return new Promise((resolve, reject) => {
      const text = stringify(values.map((value) => (value === undefined ? null : value)));
      requests += 1;
      waiting.set(requests, { resolve, reject });
      host.post("ask", requests, kind, text);
    });
  }

  // An object whose functions, whatever their names, are asked for; what a promise or JSON looks up is not there.
  function service(name) {
    return new Proxy({}, {
      get: (target, key) => (typeof key === "symbol" || SILENT.has(key) ? undefined : (...values) => ask(`${name}.${key}`, ...values)),
    });
  }

  async function fetch(address, options) {
    const { signal, ...rest } = options ?? {};
    signal?.throwIfAborted();
    let abort;
    const aborted = new Promise((resolve, reject) => {
      abort = () => reject(signal.reason);
    });
    signal?.addEventListener("abort", abort);
    let answer;
    try {
      answer = await Promise.race([ask("cors", String(address), rest), aborted]);
    } finally {
      signal?.removeEventListener("abort", abort); // a signal may outlive many requests, and would hold their answers
    }
    const has = (name) => Object.hasOwn(answer.headers, String(name).toLowerCase());
    return {
      ...answer,
      ok: answer.status >= 200 && answer.status < 300,
      headers: { get: (name) => (has(name) ? answer.headers[String(name).toLowerCase()] : null), has },
      text: async () => answer.body,
      json: async () => JSON.parse(answer.body),
    };
  }

  host.receivers.answered = ({ id, answer, error }) => {
    const asked = waiting.get(id);
    waiting.delete(id);
    if (asked === undefined) return;
    if (error === undefined) asked.resolve(answer);
    else asked.reject(new Error(error));
  };
  host.receivers.invoke = ({ id, payload }) => host.settle(id, () => invoke(payload));
  host.receivers.permission_denied = (message) => notify(denied, { permission: message.permission, operation: message.operation });
  host.receivers.permission_changed = (message) => {
    granted = [...message.all, ...permissions];
    notify(changed, { permission: message.permission, granted: message.granted, allGranted: granted });
  };

  const levels = { debug: DEBUG, info: INFO, warn: WARNING, error: ERROR };
  const log = {};
  for (const name of Object.keys(levels)) log[name] = (...values) => host.write(levels[name], values);

  host.expose("fetch", fetch);
  host.expose("spindle", withAbsent("spindle", {
    registerTool(tool) {
      host.post("register", stringify(tool ?? null));
    },
    unregisterTool(name) {
      host.post("unregister", String(name));
    },
    on(event, handler) {
      if (event !== EVENT) return ignored(`spindle.on(${stringify(String(event))})`);
      if (typeof handler !== "function") throw new TypeError("a handler must be a function");
      handlers.push(handler);
      return () => {
        const place = handlers.indexOf(handler);
        if (place >= 0) handlers.splice(place, 1);
      };
    },
    manifest,
    log: withAbsent("spindle.log", log),
    generate: withAbsent("spindle.generate", {
      quiet: (input) => ask("generate", { ...input, mode: "quiet" }),
      raw: (input) => ask("generate", { ...input, mode: "raw" }),
    }),
    cors: (address, options) => ask("cors", String(address), options),
    storage: service("storage"),
    userStorage: service("userStorage"),
    enclave: service("enclave"),
    permissions: withAbsent("spindle.permissions", {
      has: (name) => granted.includes(name),
      getGranted: async () => [...granted],
      onDenied: subscribe(denied),
      onChanged: subscribe(changed),
    }),
  }));
})
