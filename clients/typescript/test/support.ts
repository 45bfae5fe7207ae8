/** Starts a bus for tests: the program TOOLBUS, or `toolbus`, on free ports; and a server that asks for certificates. */
import { execFileSync, spawn, type ChildProcess } from "node:child_process";
import { mkdtempSync, readFileSync, rmSync } from "node:fs";
import { createSecureServer } from "node:http2";
import type { AddressInfo } from "node:net";
import { tmpdir } from "node:os";
import { join } from "node:path";
import { createInterface } from "node:readline";

export interface Bus {
  readonly grpc: string;
  readonly http: string;
  readonly process: ChildProcess;
  stop(): Promise<void>;
}

export async function runningBus(...options: string[]): Promise<Bus> {
  const child = spawn(process.env.TOOLBUS ?? "toolbus", ["serve", "--grpc", "127.0.0.1:0", "--http", "127.0.0.1:0", "--ephemeral", ...options], {
    stdio: ["ignore", "pipe", "pipe"],
  });
  const errors: string[] = [];
  child.stderr.on("data", (bytes: Buffer) => errors.push(String(bytes)));
  const ended = new Promise<void>((resolve) => child.on("close", () => resolve()));
  for await (const line of createInterface({ input: child.stdout })) {
    const found = /^toolbus ready grpc=(\S+) http=(\S+)/.exec(line);
    if (!found) continue;
    child.stdout.resume();
    return {
      grpc: found[1] as string,
      http: `http://${found[2]}`,
      process: child,
      stop: async () => {
        child.kill("SIGTERM");
        await ended;
      },
    };
  }
  throw new Error(`the bus did not start: ${errors.join("")}`);
}

/** Waits until something holds, for as long as the test runs. */
export async function until(condition: () => boolean | Promise<boolean>): Promise<void> {
  const end = performance.now() + 60_000; // on a busy machine; nothing waits for it to pass
  while (!(await condition())) {
    if (performance.now() > end) throw new Error(`not within 60 s: ${String(condition)}`);
    await new Promise((resolve) => setTimeout(resolve, 10));
  }
}

/** Starts an HTTP/2 server with TLS that ends connections without a client certificate, as a bus at `mtls:` does. */
export async function secureServer(): Promise<{ port: number; close: () => void }> {
  const folder = mkdtempSync(join(tmpdir(), "toolbus-keys-"));
  execFileSync(process.env.TOOLBUS ?? "toolbus", ["keys", "init", "--name", "localhost", "--address", "mtls:127.0.0.1:1", "--data-dir", folder]);
  const pem = readFileSync(join(folder, "keys", "server.pem"));
  rmSync(folder, { recursive: true });
  const server = createSecureServer({ cert: pem, key: pem, requestCert: true, rejectUnauthorized: true });
  server.on("error", () => undefined);
  await new Promise<void>((resolve) => server.listen(0, "127.0.0.1", resolve));
  return { port: (server.address() as AddressInfo).port, close: () => void server.close() };
}
