#!/bin/sh
# Writes internal/pb from the proto files of the repository, with the protoc of grpcio-tools (PYTHON names its interpreter)
# and the protoc-gen-go that go.mod pins. With an argument it writes into that folder.
set -eu
cd "$(dirname "$0")"
into=${1:-internal/pb}
"${PYTHON:-python3}" -m grpc_tools.protoc -I../../proto --plugin=protoc-gen-go="$(go tool -n protoc-gen-go)" --go_out="$into" \
    --go_opt=module=toolbus/internal/pb,Mtoolbus/v1/tool.proto=toolbus/internal/pb,Mtoolbus/v1/tool_bus_service.proto=toolbus/internal/pb \
    toolbus/v1/tool.proto toolbus/v1/tool_bus_service.proto
