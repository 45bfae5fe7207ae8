/** Reads addresses of several buses: a list with commas, and names of DNS (`dns:`), which are looked up again and again. */
import { lookup } from "node:dns/promises";

import { PeerLost, SetupError } from "./values.js";

const MAX_BUSES = 64; // of one address
export const LOOK_UP_MS = 5000; // between two look-ups of a name, and for the answer to one

interface Name {
  readonly prefix: string;
  readonly host: string;
  readonly port: string;
  buses: readonly string[]; // of the newest answer
}

/** An address as it was written, and the buses that it means now. */
export class Addresses {
  known: readonly string[] = [];
  private readonly entries: readonly (string | Name)[];
  private readonly turn = Math.floor(Math.random() * MAX_BUSES); // where answers begin, so that hosts spread over the buses
  private looked = -Infinity; // when names were looked up last
  private looking: Promise<readonly string[]> | null = null; // null between two look-ups

  /** @throws SetupError no connection can use one of them. */
  constructor(text: string) {
    const written = text.split(/,(?=\s*(?:\[|[^:/,]*:))/).map((each) => each.trim()); // a path may have commas
    if (written.length > MAX_BUSES) throw new SetupError(`the address has ${written.length} buses, it may have ${MAX_BUSES}`);
    this.entries = written.map((address) => {
      const [, prefix = "", host = "", named] = /^dns:((?:m?tls:)?)([^\s:/?#@,[\]]+):(\d{1,5})$/.exec(address) ?? [];
      if (isPort(named)) return { prefix, host, port: named, buses: [] };
      const port = /^(?:m?tls:(?:[^\s:/?#@,[\]]+@)?)?(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s:/?#@,[\]]+):(\d{1,5})$/.exec(address)?.[1];
      if (/^unix:./s.test(address) || isPort(port)) return address;
      const forms = address.startsWith("dns:") ? "dns:NAME:PORT, dns:tls:NAME:PORT or dns:mtls:NAME:PORT" : "HOST:PORT, unix:PATH, tls:HOST:PORT, mtls:HOST:PORT or dns:NAME:PORT";
      throw new SetupError(`the address is '${address}', it must be ${forms}`);
    });
    this.collect();
  }

  get hasNames(): boolean {
    return this.entries.some((each) => typeof each !== "string");
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
    for (const name of this.entries) {
      if (typeof name === "string") continue;
      try {
        const found = await lookup(name.host, { all: true });
        const buses = found.map(({ address, family }) => `${family === 6 ? `[${address}]` : address}:${name.port}`);
        const shown = name.prefix && `${name.prefix}${name.host}@`; // the certificate is that of the name
        name.buses = buses.map((_, i) => shown + (buses[(i + this.turn) % buses.length] as string));
      } catch (fault) {
        problem = `DNS has no address for ${name.host}: ${(fault as Error).message}`;
      }
    }
    this.looked = performance.now();
    this.collect();
    if (this.known.length === 0) throw new PeerLost("UNAVAILABLE", problem);
    return this.known;
  }

  private collect(): void {
    const all = this.entries.flatMap((each) => (typeof each === "string" ? [each] : each.buses));
    this.known = [...new Set(all)].slice(0, MAX_BUSES); // at one bus twice this peer would replace itself
  }
}

function isPort(text: string | undefined): text is string {
  return Number(text) > 0 && Number(text) < 65_536;
}
