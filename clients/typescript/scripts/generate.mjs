// Writes src/gen from the proto files of the repository, with the protoc of grpcio-tools; PYTHON names the interpreter.
import { execFileSync } from "node:child_process";
import { resolve } from "node:path";

const proto = resolve("../../proto");
const files = ["tool", "tool_bus_service"].map((name) => `${proto}/toolbus/v1/${name}.proto`);
const plugin = `--plugin=protoc-gen-es=${resolve("node_modules/.bin/protoc-gen-es")}`;
const options = ["--es_out=src/gen", "--es_opt=target=ts,import_extension=js"];
execFileSync(process.env.PYTHON ?? "python3", ["-m", "grpc_tools.protoc", `-I${proto}`, plugin, ...options, ...files], { stdio: "inherit" });
