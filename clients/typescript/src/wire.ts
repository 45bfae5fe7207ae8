/**
 * Opens connections to a bus and streams on them, with grpc-js: the only file that knows gRPC.
 *
 * Addresses are `HOST:PORT` and `unix:PATH` without TLS, `tls:HOST:PORT` and `mtls:HOST:PORT` with it.
 */
import { fromBinary, toBinary, type DescMessage, type MessageInitShape, type MessageShape, create } from "@bufbuild/protobuf";
import * as grpc from "@grpc/grpc-js";
import { closeSync, fstatSync, openSync, readFileSync } from "node:fs";
import * as net from "node:net";
import * as tls from "node:tls";

import { InvokeResponseSchema, type InvokeResponse } from "./gen/toolbus/v1/tool_bus_service_pb.js";
import type { Outbox } from "./link.js";
import { PeerLost, RequestError, SetupError } from "./values.js";

const PROBE_MS = 3000; // that whyUnanswered waits for each answer
const SERVICE = "/toolbus.v1.ToolBusService/";
const OPTIONS = {
  "grpc.use_local_subchannel_pool": 1, // otherwise channels share a backoff of their own, up to minutes
  "grpc.enable_retries": 0,
  "grpc.enable_http_proxy": 0,
  "grpc.keepalive_time_ms": 30_000, // pings notice a dead machine
  "grpc.keepalive_timeout_ms": 10_000,
  "grpc.max_receive_message_length": -1, // the bus keeps to the `max_message_bytes` of the attach
  "grpc.max_send_message_length": -1,
};

/** The values of a credential file: where a bus on another machine is, and who this peer is; the last three are PEM. */
export type Credential = { readonly [name in "address" | "name" | "token" | "ca" | "certificate" | "key"]?: string };

/** How a stream ended: the name of its gRPC status, and its text. */
export interface End {
  readonly code: string;
  readonly text: string;
}

/** One Invoke stream. */
export interface Stream {
  readonly ended: Promise<End>;
  /** Cancels the stream; without effect on one that has ended. */
  giveUp(reason: string): void;
}

/** One connection to a bus, with the credential as it is now. */
export class Connection {
  private readonly client: grpc.Client;
  private readonly metadata = new grpc.Metadata(); // of every RPC

  /** @throws SetupError the credential cannot be used. */
  constructor(address: string, credentialPath: string, { token, ca, key, certificate }: Credential) {
    const [, prefix, name, target] = /^(?:(m?tls):(?:([^@]*)@)?)?(.*)$/s.exec(address) as unknown as [string, string | undefined, string | undefined, string];
    if (token && !prefix && !/^(unix:|127\.0\.0\.1:|localhost:|\[::1\]:)/.test(address)) {
      throw new SetupError(`a token is not sent to ${address} in plain text: write tls:${address}`);
    }
    const pem = (value?: string) => (value && key && certificate ? Buffer.from(value) : null); // both or none
    if (prefix === "mtls" && !pem(key)) throw new SetupError(`the bus at ${address} asks for a client certificate, and ${noCertificate(credentialPath)}`);
    try {
      const security = prefix ? grpc.credentials.createSsl(ca ? Buffer.from(ca) : null, pem(key), pem(certificate)) : grpc.credentials.createInsecure();
      const named = name ? { "grpc.ssl_target_name_override": name, "grpc.default_authority": name } : {};
      this.client = new grpc.Client(target, security, { ...OPTIONS, ...named });
    } catch (problem) {
      throw new SetupError(`the credential ${credentialPath} cannot be used (${(problem as Error).message}): create it anew`);
    }
    if (token) this.metadata.set("authorization", `Bearer ${token}`);
  }

  /**
   * Opens a stream, without a deadline and without waiting for the bus. It writes what the outbox holds, one message at a time,
   * and hands on what comes.
   */
  invoke(outbox: Outbox, onMessage: (message: InvokeResponse) => void): Stream {
    let reason = ""; // why this side cancelled the stream; empty while it has not
    let isWriting = false; // whether a write has not returned: there is one at a time
    let isOver = false; // whether this side has half-closed, or the stream has ended
    const pass = (bytes: Uint8Array) => bytes as Buffer;
    const read = (bytes: Buffer) => fromBinary(InvokeResponseSchema, bytes);
    const call = this.client.makeBidiStreamRequest(`${SERVICE}Invoke`, pass, read, this.metadata, {});
    call.on("data", onMessage);
    call.on("error", () => undefined); // `status` brings the same
    const ended = new Promise<End>((resolve) => {
      call.on("status", ({ code, details }: grpc.StatusObject) => {
        isOver = true;
        const end = reason ? { code: "UNAVAILABLE", text: reason } : { code: statusName(code), text: details };
        setImmediate(resolve, end); // after the messages that were read before
      });
    });
    const write = () => {
      if (isWriting || isOver) return;
      const bytes = outbox.take();
      isOver = bytes === null && outbox.closed;
      if (isOver) call.end();
      if (bytes === null) return;
      isWriting = true;
      call.write(bytes, () => {
        isWriting = false;
        write();
      });
    };
    outbox.onReady = write;
    const giveUp = (why: string) => {
      reason ||= why;
      call.cancel();
    };
    return { ended, giveUp };
  }

  /** Makes a unary RPC. @throws RequestError, PeerLost the bus did not answer with OK. */
  unary<I extends DescMessage, O extends DescMessage>(
    method: string, input: I, request: MessageInitShape<I>, output: O, seconds: number,
  ): Promise<MessageShape<O>> { // prettier-ignore
    return new Promise<MessageShape<O>>((resolve, reject) => {
      this.client.makeUnaryRequest(
        SERVICE + method,
        (message: MessageShape<I>) => Buffer.from(toBinary(input, message)),
        (bytes: Buffer) => fromBinary(output, bytes),
        create(input, request) as MessageShape<I>,
        this.metadata,
        { deadline: Date.now() + seconds * 1000 },
        (error, response) => {
          if (!error) return resolve(response as MessageShape<O>);
          const lost = ["UNAVAILABLE", "DEADLINE_EXCEEDED", "CANCELLED"].includes(statusName(error.code));
          reject(new (lost ? PeerLost : RequestError)(statusName(error.code), error.details));
        },
      );
    }).catch((problem: Error) => {
      throw problem instanceof RequestError ? problem : new PeerLost("UNAVAILABLE", problem.message); // it is closed
    });
  }

  close(): void { this.client.close(); }
}

/**
 * Returns a connection by the credential as its file has it now, and that credential; while that cannot be used, as where it
 * is about to be copied, by the one before, which is null at first: `why` says why.
 *
 * @throws SetupError neither can be used.
 */
export function renewed(address: string, path: string, before: Credential | null): { connection: Connection; credential: Credential; why: string } {
  try {
    const credential = readCredential(path);
    if (!(credential.token || credential.certificate) && (before?.token || before?.certificate)) {
      throw new SetupError(`the credential ${path} has neither token nor certificate`);
    }
    return { connection: new Connection(address, path, credential), credential, why: "" };
  } catch (problem) {
    if (before === null) throw problem;
    const why = `${(problem as Error).message}; using the credential that was read before`;
    return { connection: new Connection(address, path, before), credential: before, why };
  }
}

function noCertificate(path: string): string {
  if (!path) return "there is no credential: name its file in TOOLBUS_CREDENTIAL (toolbus keys add NAME -o FILE)";
  return `the credential ${path} has none: write one with toolbus keys add NAME -o FILE, and mtls: before the address`;
}

type HandshakeError = NodeJS.ErrnoException & { readonly cert?: { readonly subjectaltname?: string } };

const NO_TLS = ["ERR_SSL_WRONG_VERSION_NUMBER", "ERR_SSL_PACKET_LENGTH_TOO_LONG"];
const EXPIRED = ["CERT_HAS_EXPIRED", "CERT_NOT_YET_VALID"];
const UNSIGNED = [
  "SELF_SIGNED_CERT_IN_CHAIN", "DEPTH_ZERO_SELF_SIGNED_CERT", "UNABLE_TO_GET_ISSUER_CERT_LOCALLY", "UNABLE_TO_VERIFY_LEAF_SIGNATURE",
  "CERT_SIGNATURE_FAILURE",
]; // prettier-ignore

/** Returns the reason for an error of a handshake, and how to fix it; "" for one that says enough. */
function whyUntrusted({ code = "", cert }: HandshakeError, address: string, path: string, renewal: string): string {
  const server = `the certificate of the server at ${address}`;
  if (NO_TLS.includes(code)) {
    return `the server at ${address} does not speak TLS: use the port of a listener with TLS, or write ${address.replace(/^m?tls:/, "")} for a bus of this machine`;
  }
  if (EXPIRED.includes(code)) return `${server} has expired or is not valid yet: check the clock of this machine, or renew it there with toolbus keys init`;
  if (code === "ERR_TLS_CERT_ALTNAME_INVALID") {
    return `${server} is for ${(cert?.subjectaltname ?? "").replace(/(DNS|IP Address):/g, "")}: use one of these names in the address, or add this one there with toolbus keys init --name`;
  }
  if (!UNSIGNED.includes(code)) return "";
  if (!path) return `${server} is not signed by an authority that is trusted here: check the address, or name a credential in TOOLBUS_CREDENTIAL`;
  return `${server} is not signed by the ca of the credential ${path}: check the address, or ${renewal}`;
}

/**
 * Finds out why nothing answers at an address although there is a listener, by a TLS handshake of its own. gRPC does not say
 * that it is spoken to without TLS, or that the connection ended because of a client's certificate. Returns the reason and how
 * to fix it, "" where there is nothing better to say, and whether anything listens.
 */
export function whyUnanswered(address: string, path: string, { ca, certificate, key, name = "NAME" }: Credential): Promise<{ why: string; reached: boolean }> {
  const [, prefix = "", named, dialed = "", port = ""] = /^(?:(m?tls:)(?:([^@]*)@)?)?\[?(.*?)\]?:(\d+)$/s.exec(address) ?? [];
  if (!port || /^(unix|dns):/.test(address)) return Promise.resolve({ why: "", reached: true });
  const renewal = `write it anew on the machine of the bus with toolbus keys renew ${name}, and copy it here`;
  const refusal = certificate
    ? `the bus at ${address} does not accept the certificate of the credential ${path}, which has expired or is for another bus: ${renewal}`
    : `the bus at ${address} asks for a client certificate, and ${noCertificate(path)}`;
  const host = named ?? dialed;
  const trust = prefix ? { ca, ...(certificate && key ? { cert: certificate, key } : {}) } : { rejectUnauthorized: false }; // nothing is sent to it
  return new Promise((resolve) => {
    const socket = net.connect({ host: dialed, port: Number(port) });
    const done = (why: string, reached: boolean) => {
      resolve({ why, reached });
      socket.destroy();
    };
    let shakenHands = false;
    socket.setTimeout(PROBE_MS, () => done("", true));
    socket.on("error", () => done(shakenHands ? refusal : "", shakenHands));
    socket.on("connect", () => {
      const secure = tls.connect({ socket, host, ...(net.isIP(host) ? {} : { servername: host }), ALPNProtocols: ["h2"], ...trust }, () => {
        if (!prefix) return done(`the server at ${address} speaks TLS: write tls:${address} or mtls:${address}, and name a credential in TOOLBUS_CREDENTIAL`, true);
        shakenHands = true;
        secure.write("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0"); // the preface, and empty SETTINGS
      });
      secure.on("data", () => done("", true)); // the server's SETTINGS
      secure.on("error", (error: HandshakeError) => done(shakenHands ? refusal : prefix && whyUntrusted(error, address, path, renewal), true));
      secure.on("close", () => done(shakenHands ? refusal : "", true));
    });
  });
}

/**
 * Returns the values of a credential file; none without a path.
 *
 * @throws SetupError other users can read the file, or it cannot be read.
 */
export function readCredential(path: string): Credential {
  const values: Record<string, string> = {};
  if (!path) return values;
  let file: number | undefined;
  try {
    file = openSync(path, "r");
    const { uid, mode } = fstatSync(file);
    const isOwn = process.getuid === undefined || ([process.getuid(), 0].includes(uid) && (mode & 0o077) === 0);
    if (!isOwn) throw new SetupError(`${path} must belong to this user, who alone may read it: chmod 600 ${path}`);
    // What `toolbus keys add` writes: basic and multi-line texts; other values are for people.
    for (const [, name, long, long2, short = "", short2] of readFileSync(file, "utf8").matchAll(
      /^\s*(\w+)\s*=\s*(?:"""\r?\n?(.*?)"""|'''\r?\n?(.*?)'''|"((?:[^"\\\n]|\\.)*)"|'([^'\n]*)')/gms,
    )) {
      values[name as string] = long ?? long2 ?? short2 ?? (JSON.parse(`"${short}"`) as string);
    }
    return values;
  } catch (problem) {
    throw problem instanceof SetupError ? problem : new SetupError(`the credential ${path} cannot be read: ${String(problem)}`);
  } finally {
    if (file !== undefined) closeSync(file);
  }
}

function statusName(code: number): string {
  return grpc.status[code] ?? String(code);
}
