"""Holds the limits and the lengths of time of a bus as frozen records, each next to its reason.

The values are injected: a bus gets them from its configuration, a test gives its own. Where neither gives one, the
default here applies.
"""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024
MIB = 1024 * KIB
MAX_SEARCH_RESULTS = 50  # of one search of tools
MAX_SPANS_PER_SECOND = 100  # a caller that samples everything would else fill the queue and the trace store


@dataclass(frozen=True, slots=True)
class Limits:
    """What the bus accepts. Each limit is named in the error that it causes, and can be configured.

    Attributes:
        message_bytes: one gRPC message towards the bus.
        calls_in_flight: calls a session may hold in each direction, unless it requests another number.
        calls_in_flight_most: the highest number a session may request.
        arguments_bytes: arguments of one call, in UTF-8.
        result_bytes: output and content of one result. A caller over gRPC gets none that is larger than what it
            receives: 4 MiB - 4 KiB for a default client, whose whole stream a larger frame would end.
        held_bytes: arguments and results that the bus holds in all.
        held_bytes_per_source: the same for the callers of one source; also of the messages of an account that wait.
        waiting_bytes: what may wait for a peer that reads slowly; above it the session is closed.
        schema_bytes, schema_depth, schema_nodes: one tool's schema; nodes are counted with references expanded.
        pattern_cost: what the patterns of one schema take to compile, in plain characters.
        description_bytes: one tool's description.
        declared_bytes, declared_bytes_per_source: memory, about, of the tools of guarded sources and identities: of
            all together, and of one; the latter also of a mount.
        tools: tools of one session.
        tools_per_role: tools that one role has.
        unconfigured_roles: adopted roles; and as many roles that do not exist and that tools wait for.
        http_body_bytes: the body of one HTTP request.
        callback_bytes: the body of a callback's answer.
        sessions: sessions of the bus, zombies included.
        call_depth: nested calls above one another.
        input_requests, input_requests_bytes: questions of one result, and their JSON.
        request_state_bytes: the state that a tool sends with its questions, and gets back with the answers.
    """

    message_bytes: int = 16 * MIB
    calls_in_flight: int = 256
    calls_in_flight_most: int = 4096
    arguments_bytes: int = 1 * MIB
    result_bytes: int = 4 * MIB
    held_bytes: int = 256 * MIB
    held_bytes_per_source: int = 64 * MIB
    waiting_bytes: int = 64 * MIB
    schema_bytes: int = 256 * KIB
    schema_depth: int = 64
    schema_nodes: int = 10_000
    pattern_cost: int = 150_000
    description_bytes: int = 16 * KIB
    declared_bytes: int = 128 * MIB
    declared_bytes_per_source: int = 32 * MIB
    tools: int = 100_000
    tools_per_role: int = 250_000
    unconfigured_roles: int = 100
    http_body_bytes: int = 1 * MIB
    callback_bytes: int = 4 * MIB
    sessions: int = 10_000
    call_depth: int = 8
    input_requests: int = 8
    input_requests_bytes: int = 64 * KIB
    request_state_bytes: int = 16 * KIB


@dataclass(frozen=True, slots=True)
class Timings:
    """The timeouts and intervals of the bus, in seconds. Tests give tiny values.

    Attributes:
        tick_seconds: how often the silence of peers is judged, and grace periods are checked.
        stall_seconds: how late the bus's own clock may tick without meaning that the bus stood still, so that the
            next calls that it reads may be older than their callers wait.
        attach_seconds: timeout of the attach; a stream has no heartbeats before it.
        busy_heartbeat_seconds: between heartbeats while calls are pending, so that a hung plugin fails them soon; also
            how long the echo of a heartbeat may take before it counts as missed.
        idle_heartbeat_seconds: between heartbeats of an idle session, which gets fewer: an exchange costs the bus
            about 300 µs.
        missed_heartbeats: in a row, after which the calls of a session end or move; after half as many it gets no new
            ones. With the default a call on a stopped process ends within 6 s, and a tool may keep its process from
            echoing for 4 s.
        missed_heartbeats_gone: in a row, after which a session ends: until then a peer that was only busy returns
            without a new stream.
        watch_seconds: how often a watcher is notified at most: 1,000 attaches before 1,000 watchers stay 1,000 frames.
        stuck_seconds: how long a call that ended early may keep its slot while the plugin has not confirmed the end:
            a bus that forgets what is still running would overload the plugin.
        quiet_seconds: how long a drained peer may send nothing before the bus ends its stream.
        reachable_seconds: how long a start waits for the callback URLs of restored tools to accept a connection.
        note_seconds: how often it is persisted which callback URLs answered, and the silent ones are probed.
        store_retry_seconds: until a change that could not be persisted is tried again; each try may hold the loop up.
        keys_seconds: how often the files of the keys are checked: a revoked key ends within a second.
        head_seconds: timeout of the request line and headers of an HTTP request, so that a client that sends a byte now
            and then does not hold its connection.
        ping_seconds: how long a stream of server-sent events may be silent before a ping; below the minute or so after
            which proxies and clients give up on silence.
        digest_seconds: between two digests for the console while something happens; people cannot read faster.
        digest_idle_seconds: between two digests without news, so that a watcher knows that the bus runs.
        resumable_seconds: after which the answer to an MCP client with a session becomes a stream that can be resumed.
        poll_seconds: after which such a stream is closed, to go on when its client resumes it (SEP-1699): proxies
            between them may end long responses.
        audit_sync_seconds: how often the audit is forced to disk; the acts of operators are at once.
        span_seconds: how long a span waits for others that are exported with it.
        audit_head_seconds: how often the head of the audit is logged, so that a copy of it is elsewhere.
    """

    tick_seconds: float = 0.5
    stall_seconds: float = 0.5
    attach_seconds: float = 30.0
    busy_heartbeat_seconds: float = 1.0
    idle_heartbeat_seconds: float = 10.0
    missed_heartbeats: int = 4
    missed_heartbeats_gone: int = 20
    watch_seconds: float = 0.02
    stuck_seconds: float = 60.0
    quiet_seconds: float = 1.0
    reachable_seconds: float = 0.25
    note_seconds: float = 3_600.0
    store_retry_seconds: float = 5.0
    keys_seconds: float = 0.5
    head_seconds: float = 10.0
    ping_seconds: float = 15.0
    digest_seconds: float = 0.5
    digest_idle_seconds: float = 2.0
    resumable_seconds: float = 1.0
    poll_seconds: float = 10.0
    audit_sync_seconds: float = 1.0
    audit_head_seconds: float = 3_600.0
    span_seconds: float = 1.0


DEFAULT_TIMINGS = Timings()
