// Makes the part of a scope that every script has: messages to and from the host, calls, timers, the log.
// An expression, whose value is the one function that the host calls. Scripts reach none of it, only its globals.
//
// Scripts may replace every built-in and change every prototype. So what this file needs is kept from before they run, and
// nothing below looks up a method of a value, iterates, fills an array, spreads one, or fills in a template (QuickJS looks up
// `concat` for it): each of these runs what scripts set.
(function () {
  "use strict";
  const { parse, stringify } = JSON;
  const { apply, defineProperty } = Reflect;
  const { max, min } = Math;
  const [toText, toNumber] = [String, Number];
  const [slice, tagOf, instanceOf] = [String.prototype.slice, Object.prototype.toString, Function.prototype[Symbol.hasInstance]];
  const [AnyError, BadRange, BadType] = [Error, RangeError, TypeError];
  const MAX_RESULT = 8 * 1024 * 1024; // characters of a result's JSON: beyond what the bus takes
  const MAX_FAILURE = 8 * 1024; // characters of each part of an error
  const MAX_CAUSES = 8; // of an error that are named, in all
  const MAX_LINES = 200; // of the log, in one turn
  const MAX_TIMERS = 1000;
  const MAX_WAIT = 2 ** 31 - 1; // of a timer, in ms
  const DEBUG = 7, INFO = 6, WARNING = 4, ERROR = 3; // as syslog has them

  const receivers = { __proto__: null }; // what is done with a message, by its kind
  const timers = { __proto__: null };
  let running = 0; // timers
  let lastTimer = 0;
  let outbox = ""; // JSON of the entries for the host
  let lines = 0;

  // Passes an entry of texts and numbers to the host.
  function post(...entry) {
    let text = "";
    for (let place = 0; place < entry.length; place += 1) {
      const item = entry[place];
      text += (place ? "," : "") + (typeof item === "number" ? item : stringify(toText(item)));
    }
    outbox += (outbox ? "," : "") + "[" + text + "]";
  }

  function write(level, values) {
    lines += 1;
    if (lines > MAX_LINES) return;
    let line = "";
    for (let place = 0; place < values.length; place += 1) line += (place ? " " : "") + show(values[place]);
    post("log", level, line);
  }

  function show(value) {
    if (typeof value === "string") return value;
    try {
      const text = typeof value === "object" && value !== null && !isError(value) ? stringify(value) : undefined;
      return text === undefined ? toText(value) : text;
    } catch {
      return "[a value that cannot be shown]";
    }
  }

  function isError(value) {
    return apply(instanceOf, AnyError, [value]) || apply(tagOf, value, []) === "[object Error]";
  }

  function cut(text) {
    return apply(slice, text, [0, MAX_FAILURE]);
  }

  function read(get, otherwise) {
    try {
      return cut(toText(get()));
    } catch {
      return otherwise;
    }
  }

  // What a call failed with: the text as `'' + error` has it, the message alone, and where it was thrown. Anything can
  // be thrown: each part that cannot be read has a text in its place.
  function failure(error, budget = { causes: MAX_CAUSES }) {
    if (error === null) return ["null", "null", ""];
    let known = false;
    try {
      known = isError(error);
    } catch {
      // a proxy that was revoked
    }
    if (!known) {
      const text = typeof error === "function" ? "a function was thrown: " + read(() => error.name, "")
        : error === undefined || error === "" ? (error === "" ? "an empty text" : "undefined") + " was thrown"
        : read(() => show(error), "[a value that cannot be shown]");
      return [text, text, ""];
    }
    const inner = read(() => causes(error, budget), "");
    const name = read(() => error.name, "Error");
    const message = read(() => error.message, "[a message that cannot be shown]") + inner;
    const text = read(() => error, message === "" ? name : name + ": " + message) + inner;
    return [cut(text), cut(message), read(() => error.stack, "")];
  }

  // The texts of what an error was caused by, or holds.
  function causes(error, budget) {
    let text = "";
    const { errors, cause } = error;
    const count = errors === undefined || errors === null ? 0 : errors.length;
    for (let place = 0; place <= count; place += 1) {
      const inner = place < count ? errors[place] : cause;
      if ((place === count && inner === undefined) || budget.causes <= 0) break;
      budget.causes -= 1;
      text += ": " + failure(inner, budget)[0];
    }
    return text;
  }

  // Ends a call with what a function returns or throws, now or once its promise is settled.
  function settle(id, run) {
    let value;
    let later = false;
    try {
      value = run();
      later = value !== null && (typeof value === "object" || typeof value === "function") && typeof value.then === "function";
    } catch (error) {
      fail(id, error);
      return;
    }
    if (later) settleLater(id, value);
    else finish(id, value);
  }

  async function settleLater(id, promise) {
    let value;
    try {
      value = await promise;
    } catch (error) {
      fail(id, error);
      return;
    }
    finish(id, value);
  }

  function finish(id, value) {
    try {
      const text = stringify(value) ?? "null";
      if (text.length > MAX_RESULT) throw new BadRange("the result has " + text.length + " characters of JSON, the limit is " + MAX_RESULT + ": return less");
      post("done", id, text);
    } catch (error) {
      fail(id, error);
    }
  }

  function fail(id, error) {
    const parts = failure(error);
    post("failed", id, parts[0], parts[1], parts[2]);
  }

  function startTimer(repeats, callback, delay, args) {
    if (typeof callback !== "function") throw new BadType("a timer needs a function");
    if (running >= MAX_TIMERS) throw new BadRange("there are " + MAX_TIMERS + " timers already: clear some");
    lastTimer += 1;
    running += 1;
    const wait = max(1, min(toNumber(delay) || 0, MAX_WAIT));
    timers[lastTimer] = { callback, args, wait, repeats };
    post("timer", lastTimer, wait);
    return lastTimer;
  }

  function stopTimer(id) {
    if (timers[id] === undefined) return;
    running -= 1;
    delete timers[id];
  }

  function expose(name, value) {
    defineProperty(globalThis, name, { __proto__: null, value, writable: true, enumerable: false, configurable: true });
  }

  receivers.timer = ({ id }) => {
    const timer = timers[id];
    if (timer === undefined) return;
    if (timer.repeats) post("timer", id, timer.wait);
    else stopTimer(id);
    apply(timer.callback, undefined, timer.args);
  };
  receivers.stop_timer = ({ id }) => stopTimer(id);

  expose("setTimeout", (callback, delay, ...args) => startTimer(false, callback, delay, args));
  expose("setInterval", (callback, delay, ...args) => startTimer(true, callback, delay, args));
  expose("clearTimeout", (id) => stopTimer(typeof id === "symbol" ? "" : toText(id)));
  expose("clearInterval", (id) => stopTimer(typeof id === "symbol" ? "" : toText(id)));
  expose("console", {
    log: (...values) => write(INFO, values),
    info: (...values) => write(INFO, values),
    debug: (...values) => write(DEBUG, values),
    warn: (...values) => write(WARNING, values),
    error: (...values) => write(ERROR, values),
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
      settle(id, async () => {
        await promise;
        return null;
      });
    },
    drain() {
      if (lines > MAX_LINES) post("log", WARNING, (lines - MAX_LINES) + " further lines of the log were dropped");
      lines = 0;
      const text = outbox && apply(slice, "[" + outbox + "]", [0]); // in one piece, which a long sum of texts is not
      outbox = "";
      return text;
    },
    forget() {
      outbox = "";
    },
  };
  return (request, first, second) => requests[request](first, second);
})()
