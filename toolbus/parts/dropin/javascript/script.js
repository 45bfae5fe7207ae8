// Makes what a script over tools has: `call`, and the run of its text as the body of an async function.
(function (host) {
  "use strict";
  const { parse, stringify } = JSON;
  const AsyncFunction = (async function () {}).constructor;
  const waiting = new Map(); // what waits for the result of each call
  let calls = 0;

  // Calls a tool. Resolves to its output; rejects with an error that has the `code` of the failure.
  function call(name, args) {
    return new Promise((resolve, reject) => {
      calls += 1;
      waiting.set(calls, { resolve, reject });
      host.post("call", calls, String(name), stringify(args === undefined ? {} : args) ?? "{}");
    });
  }

  host.receivers.called = ({ id, output, error, code }) => {
    const waits = waiting.get(id);
    waiting.delete(id);
    if (waits === undefined) return;
    if (error === undefined) waits.resolve(parse(output));
    else waits.reject(Object.assign(new Error(error), { code }));
  };
  host.receivers.run = ({ id, text, input }) => host.settle(id, () => new AsyncFunction("call", "input", text)(call, input));
})
