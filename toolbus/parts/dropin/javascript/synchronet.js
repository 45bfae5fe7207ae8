// Makes what tool files of a Synchronet BBS use: llm_tool_register, and the harmless ones of their global functions.
(function (host, folder) {
  "use strict";
  const { stringify } = JSON; // scripts may replace it, and every other built-in that is used while they run
  const LEVELS = ["EMERG", "ALERT", "CRIT", "ERR", "WARNING", "NOTICE", "INFO", "DEBUG"];
  const INFO = 6;
  const tools = { __proto__: null }; // what runs each tool
  let added = null; // of the file that is being loaded; null while none is

  host.receivers.begin = () => {
    added = { __proto__: null };
  };
  host.receivers.end = ({ keep }) => {
    if (keep) for (const name in added) tools[name] = added[name];
    added = null;
  };
  host.receivers.call = ({ id, name, args, env }) => {
    const execute = tools[name];
    host.settle(id, () => {
      if (execute === undefined) throw new Error(`unknown tool: ${name}`);
      return execute(args, env);
    });
  };

  host.expose("llm_tool_register", (spec) => {
    if (!spec || !spec.name || typeof spec.execute !== "function" || !spec.def)
      throw new Error("llm_tool_register: spec needs {name, execute, def}");
    if (added === null) throw new Error("llm_tool_register works only while a file is loaded: call it at its top level");
    const name = String(spec.name);
    const { execute, ...rest } = spec;
    host.post("register", stringify({ ...rest, name }));
    added[name] = execute;
  });

  LEVELS.forEach((name, level) => host.expose(`LOG_${name}`, level));
  host.expose("log", (level, ...values) => {
    if (typeof level === "number" && values.length > 0) host.write(level, values);
    else host.write(INFO, [level, ...values]);
  });
  for (const name of ["print", "alert", "write", "writeln"]) host.expose(name, (...values) => host.write(INFO, values));
  host.expose("format", format);
  host.expose("printf", (...values) => host.write(INFO, [format(...values)]));
  host.expose("time", () => Math.floor(Date.now() / 1000));
  host.expose("random", (limit) => Math.floor(Math.random() * (limit === undefined ? 100 : limit)));

  // Files of the folder are loaded already, each once; what else a script loads is not there.
  for (const name of ["load", "require"]) {
    host.expose(name, (...parts) => {
      const path = parts.find((part) => typeof part === "string") || "";
      const file = path.split(/[\\/]/).pop();
      if (file === "sbbsdefs.js" || folder.includes(file)) return globalThis;
      throw new Error(`${name}(${stringify(path)}) does not exist here`);
    });
  }

  function format(text, ...values) {
    let next = 0;
    return String(text).replace(/%([-+ 0#]*)(\d+)?(?:\.(\d+))?l*([a-zA-Z%])/g, (whole, flags, width, precision, kind) => {
      if (kind === "%") return "%";
      const value = values[next];
      next += 1;
      let shown = convert(value, kind, precision);
      if (shown === undefined) return whole;
      if (flags.includes("+") && "dif".includes(kind) && Number(value) >= 0) shown = `+${shown}`;
      if (width === undefined) return shown;
      if (flags.includes("-")) return shown.padEnd(Number(width));
      const sign = flags.includes("0") && /^[-+]/.test(shown) ? shown[0] : "";
      return flags.includes("0") && kind !== "s"
        ? sign + shown.slice(sign.length).padStart(Number(width) - sign.length, "0")
        : shown.padStart(Number(width));
    });
  }

  function convert(value, kind, precision) {
    const whole = () => Math.trunc(Number(value) || 0);
    switch (kind) {
      case "s": return precision === undefined ? String(value) : String(value).slice(0, Number(precision));
      case "d": case "i": return String(whole());
      case "u": return String(whole() >>> 0);
      case "x": return (whole() >>> 0).toString(16);
      case "X": return (whole() >>> 0).toString(16).toUpperCase();
      case "o": return (whole() >>> 0).toString(8);
      case "c": return typeof value === "number" ? String.fromCharCode(value) : String(value).slice(0, 1);
      case "f": return Number(value).toFixed(precision === undefined ? 6 : Number(precision));
      case "e": return Number(value).toExponential(precision === undefined ? 6 : Number(precision));
      default: return undefined;
    }
  }
})
