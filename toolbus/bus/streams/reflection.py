"""Serves gRPC reflection as `grpc.reflection.v1`, and as the older `v1alpha`, which some clients ask for first.

The library serves `v1alpha` only. Both have the same messages under another name, so one servicer answers both, from a
copy of its descriptors under the new name.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool
from grpc_reflection.v1alpha import _async, reflection, reflection_pb2

_OLD, _NEW = "grpc.reflection.v1alpha", "grpc.reflection.v1"
_SERVICE, _METHOD = f"{_NEW}.ServerReflection", "ServerReflectionInfo"


def add_reflection(server: grpc.aio.Server, services: Sequence[str]) -> None:
    """Adds reflection of some services, and of itself, to a server."""
    names = (*services, _SERVICE, reflection.SERVICE_NAME)
    pool: Any = _Pool(_described())
    reflection.enable_server_reflection(names, server, pool=pool)
    handler = grpc.stream_stream_rpc_method_handler(
        _async.ReflectionServicer(names, pool=pool).ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))


def _described() -> descriptor_pool.DescriptorPool:
    """Returns a pool with the descriptors of the new name; the process's own pool stays as it is."""
    file = descriptor_pb2.FileDescriptorProto()
    reflection_pb2.DESCRIPTOR.CopyToProto(file)
    file.name, file.package = "grpc/reflection/v1/reflection.proto", _NEW
    for field in (field for message in file.message_type for field in message.field if field.type_name):
        field.type_name = field.type_name.replace(_OLD, _NEW)
    for method in file.service[0].method:
        method.input_type = method.input_type.replace(_OLD, _NEW)
        method.output_type = method.output_type.replace(_OLD, _NEW)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return pool


class _Pool:
    """The descriptors of a pool, and behind them those of the process."""

    def __init__(self, first: descriptor_pool.DescriptorPool) -> None:
        self._first = first
        self._rest = descriptor_pool.Default()

    def __getattr__(self, name: str) -> Any:
        first, rest = getattr(self._first, name), getattr(self._rest, name)

        def find(*arguments: Any) -> Any:
            try:
                return first(*arguments)
            except KeyError:
                return rest(*arguments)

        return find
