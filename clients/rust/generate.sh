#!/bin/sh
# Writes src/pb.rs from the proto files of the repository, with the protoc of grpcio-tools (PYTHON names its interpreter).
# Its first line has the digest by which the tests of the repository see that it is up to date.
set -eu
cd "$(dirname "$0")"
export PYTHON=${PYTHON:-python3}
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
"$PYTHON" -m grpc_tools.protoc -I../../proto --include_source_info --descriptor_set_out="$made/set" \
    toolbus/v1/tool.proto toolbus/v1/tool_bus_service.proto
cargo run --quiet --locked --manifest-path generate/Cargo.toml "$made/set" "$made"
digest=$(cat ../../proto/toolbus/v1/*.proto "$made/toolbus.v1.rs" | "$PYTHON" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())')
{ echo "// Made by generate.sh; do not edit. $digest" && cat "$made/toolbus.v1.rs"; } > src/pb.rs
