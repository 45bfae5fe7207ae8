#!/bin/sh
# Writes src/main/java/dev/toolbus/pb from the proto files of the repository, with the protoc that Maven brings.
# PYTHON names an interpreter. The file DIGEST is that by which the tests of the repository see that all is up to date.
set -eu
export LC_ALL=C # the order of the files, in the digest
cd "$(dirname "$0")"
version=$(sed -n 's:.*<protobuf.version>\(.*\)</protobuf.version>.*:\1:p' pom.xml)
made=$(mktemp -d)
trap 'rm -rf "$made"' EXIT
mvn -q -B org.apache.maven.plugins:maven-dependency-plugin:3.11.0:copy \
    -Dartifact="com.google.protobuf:protoc:$version:exe:linux-x86_64" -DoutputDirectory="$made"
chmod +x "$made"/protoc-*.exe
for file in tool tool_bus_service; do
    mkdir -p "$made/toolbus/v1"
    sed 's/^package .*/&\noption java_package = "dev.toolbus.pb";\noption java_multiple_files = true;/' \
        "../../proto/toolbus/v1/$file.proto" >"$made/toolbus/v1/$file.proto"
done
rm -rf src/main/java/dev/toolbus/pb
"$made"/protoc-*.exe -I"$made" --java_out=lite:src/main/java toolbus/v1/tool.proto toolbus/v1/tool_bus_service.proto
cd src/main/java/dev/toolbus/pb
rm ToolBusServiceOuterClass.java ToolOuterClass.java # which are empty
cat ../../../../../../../../proto/toolbus/v1/*.proto ./*.java |
    "${PYTHON:-python3}" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())' >DIGEST
