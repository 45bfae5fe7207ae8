/** Reads addresses of several buses: a list with commas, and names of DNS (`dns:`), which are looked up again and again. */
import { lookup } from "node:dns/promises";

import { PeerLost, SetupError } from "./values.js";

const MAX_BUSES = 64; // of one address
export const LOOK_UP_MS = 5000; // between two look-ups of a name, and for the answer to one
const NAME = String.raw`[^\s:/?#@,[\]]+`;
const DNS = new RegExp(String.raw`^dns:((?:m?tls:)?)(${NAME}):(\d{1,5})$`);
const BUS = new RegExp(String.raw`^(?:unix:.+|(?:m?tls:(?:${NAME}@)?)?(?:\[[\dA-Fa-f:.]+(?:%[\w.-]+)?\]|${NAME}):(\d{1,5}))$`, "s");

/** An address as it was written, and the buses that it means now. */
export class Addresses {
  known: readonly string[] = [];
  /** As it was written, each bus once. */
  readonly text: string;
  readonly hasNames: boolean;
  private readonly entries: { prefix: string; host: string; port: string; buses: string[] }[]; // buses of the newest answer for a host
  private readonly turn = Math.floor(Math.random() * MAX_BUSES); // where answers begin, so that hosts spread over the buses
  private looked = -Infinity; // when names were looked up last
  private looking: Promise<readonly string[]> | null = null; // null between two look-ups

  /** @throws SetupError no connection can use one of them. */
  constructor(text: string) {
    const written = text.split(/,(?=\s*(?:\[|[^:/,]*:))/).map((each) => each.trim()); // a path may have commas
    if (written.length > MAX_BUSES) throw new SetupError(`the address has ${written.length} buses, it may have ${MAX_BUSES}`);
    this.text = [...new Set(written)].join(", ");
    this.entries = written.map((address) => {
      const [, prefix = "", host = "", named = "0"] = DNS.exec(address) ?? [];
      const bus = BUS.exec(address);
      const port = bus && !host ? bus[1] ?? "1" : named; // a socket has none
      if (Number(port) > 0 && Number(port) < 65_536) return { prefix, host, port, buses: host ? [] : [address] };
      const forms = address.startsWith("dns:") ? "dns:NAME:PORT, dns:tls:NAME:PORT or dns:mtls:NAME:PORT" : "HOST:PORT, unix:PATH, tls:HOST:PORT, mtls:HOST:PORT or dns:NAME:PORT";
      throw new SetupError(`the address is '${address}', it must be ${forms}`);
    });
    this.hasNames = this.entries.some(({ host }) => host);
    this.collect();
  }

  /** Returns the buses of now. A name without an answer has those of before. @throws PeerLost there is none at all. */
  async lookUp(): Promise<readonly string[]> {
    if (!this.hasNames || (this.known.length > 0 && performance.now() - this.looked < LOOK_UP_MS)) return this.known;
    // Each look-up holds one of four threads of this program, until the system gives up: never more than one.
    this.looking ??= this.lookUpAll().finally(() => (this.looking = null));
    return this.looking;
  }

  private async lookUpAll(): Promise<readonly string[]> {
    let problem = "";
    for (const entry of this.entries.filter(({ host }) => host)) {
      try {
        const found = await lookup(entry.host, { all: true });
        const shown = entry.prefix && `${entry.prefix}${entry.host}@`; // the certificate is that of the name
        const buses = found.map(({ address, family }) => `${shown}${family === 6 ? `[${address}]` : address}:${entry.port}`);
        const first = this.turn % buses.length;
        entry.buses = [...buses.slice(first), ...buses.slice(0, first)];
      } catch (fault) {
        problem = `DNS has no address for ${entry.host}: ${(fault as Error).message}`;
      }
    }
    this.looked = performance.now();
    this.collect();
    if (this.known.length === 0) throw new PeerLost("UNAVAILABLE", problem);
    return this.known;
  }

  private collect(): void {
    const all = new Set(this.entries.flatMap(({ buses }) => buses)); // at one bus twice this peer would replace itself
    this.known = [...all].slice(0, MAX_BUSES);
  }
}
