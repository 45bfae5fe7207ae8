// Makes the part of a scope that every script has: messages to and from the host, calls, timers, the log.
// An expression, whose value is the one function that the host calls. Scripts reach none of it, only its globals.
(function () {
  "use strict";
  const { parse, stringify } = JSON;
  const MAX_RESULT = 8 * 1024 * 1024; // characters of a result's JSON: beyond what the bus takes
  const MAX_FAILURE = 8 * 1024; // characters of each part of an error
  const MAX_LINES = 200; // of the log, in one turn
  const MAX_TIMERS = 1000;
  const DEBUG = 7, INFO = 6, WARNING = 4, ERROR = 3; // as syslog has them

  const receivers = Object.create(null); // what is done with a message, by its kind
  const timers = new Map();
  let outbox = [];
  let lines = 0;
  let lastTimer = 0;

  function post(...entry) {
    outbox[outbox.length] = entry;
  }

  function write(level, ...values) {
    lines += 1;
    if (lines > MAX_LINES) return;
    post("log", level, values.map(show).join(" "));
  }

  function show(value) {
    if (typeof value === "string") return value;
    try {
      const text = typeof value === "object" && value !== null && !isError(value) ? stringify(value) : undefined;
      return text === undefined ? String(value) : text;
    } catch {
      return "[a value that cannot be shown]";
    }
  }

  function isError(value) {
    return value instanceof Error || Object.prototype.toString.call(value) === "[object Error]";
  }

  // What a call failed with: the text as `'' + error` has it, the message alone, and where it was thrown. Anything can
  // be thrown: each part that cannot be read has a text in its place.
  function failure(error) {
    const read = (get, otherwise) => {
      try {
        return String(get()).slice(0, MAX_FAILURE);
      } catch {
        return otherwise;
      }
    };
    if (error === null) return ["null", "null", ""];
    let known = false;
    try {
      known = isError(error);
    } catch {
      // a proxy that was revoked
    }
    if (!known) {
      const text = typeof error === "function" ? `a function was thrown: ${read(() => error.name, "")}`
        : error === undefined || error === "" ? `${error === "" ? "an empty text" : "undefined"} was thrown`
        : read(() => show(error), "[a value that cannot be shown]");
      return [text, text, ""];
    }
    const inner = read(() => [...(error.errors ?? []), ...(error.cause === undefined ? [] : [error.cause])].map((each) => `: ${failure(each)[0]}`).join(""), "");
    const name = read(() => error.name, "Error");
    const message = read(() => error.message, "[a message that cannot be shown]") + inner;
    const text = read(() => String(error), message === "" ? name : `${name}: ${message}`) + inner;
    return [text.slice(0, MAX_FAILURE), message.slice(0, MAX_FAILURE), read(() => error.stack, "")];
  }

  // Ends a call with what a function returns or throws, now or once its promise is settled.
  function settle(id, run) {
    const done = (value) => {
      try {
        let text = stringify(value);
        if (text === undefined) text = "null";
        if (text.length > MAX_RESULT) throw new RangeError(`the result has ${text.length} characters of JSON, the limit is ${MAX_RESULT}: return less`);
        post("done", id, text);
      } catch (error) {
        post("failed", id, ...failure(error));
      }
    };
    const failed = (error) => post("failed", id, ...failure(error));
    let value;
    try {
      value = run();
    } catch (error) {
      failed(error);
      return;
    }
    if (value !== null && (typeof value === "object" || typeof value === "function") && typeof value.then === "function") {
      Promise.resolve(value).then(done, failed);
    } else {
      done(value);
    }
  }

  function startTimer(repeats, callback, delay, args) {
    if (typeof callback !== "function") throw new TypeError("a timer needs a function");
    if (timers.size >= MAX_TIMERS) throw new RangeError(`there are ${MAX_TIMERS} timers already: clear some`);
    lastTimer += 1;
    const wait = Math.max(1, Math.min(Number(delay) || 0, 2 ** 31 - 1));
    timers.set(lastTimer, { callback, args, wait, repeats });
    post("timer", lastTimer, wait);
    return lastTimer;
  }

  function expose(name, value) {
    Object.defineProperty(globalThis, name, { value, writable: true, enumerable: false, configurable: true });
  }

  receivers.timer = ({ id }) => {
    const timer = timers.get(id);
    if (timer === undefined) return;
    if (timer.repeats) post("timer", id, timer.wait);
    else timers.delete(id);
    timer.callback(...timer.args);
  };
  receivers.stop_timer = ({ id }) => timers.delete(id);

  expose("setTimeout", (callback, delay, ...args) => startTimer(false, callback, delay, args));
  expose("setInterval", (callback, delay, ...args) => startTimer(true, callback, delay, args));
  for (const name of ["clearTimeout", "clearInterval"]) expose(name, (id) => void timers.delete(id));
  expose("console", {
    log: (...values) => write(INFO, ...values),
    info: (...values) => write(INFO, ...values),
    debug: (...values) => write(DEBUG, ...values),
    warn: (...values) => write(WARNING, ...values),
    error: (...values) => write(ERROR, ...values),
  });

  const host = { post, write, expose, settle, receivers };
  const requests = {
    __proto__: null,
    // Has a function make globals; it gets the host's side.
    install(make, text) {
      make(host, ...parse(text));
    },
    // Takes one message; what it leads to is in the outbox, also of the jobs that run after it.
    receive(text) {
      const message = parse(text);
      const receiver = receivers[message.kind];
      if (receiver !== undefined) receiver(message);
    },
    // Reports when the promise of a module is settled.
    watch(id, promise) {
      settle(id, () => promise.then(() => null));
    },
    drain() {
      if (lines > MAX_LINES) post("log", WARNING, `${lines - MAX_LINES} further lines of the log were dropped`);
      lines = 0;
      if (outbox.length === 0) return "";
      const text = stringify(outbox);
      outbox = [];
      return text;
    },
    forget() {
      outbox = [];
    },
  };
  return (request, first, second) => requests[request](first, second);
})()
