"""Judges what must be true of every run. Pure: each check reads the evidence and yields what breaks its rule.

A check yields a sentence for each case that breaks its rule and None for each other case, so that a report can show how
many were judged. `lateness`, `deaths` and `hangs` yield times, which depend on the machine and are shown only; a death
or hang that was never noticed breaks a rule. A call without a result, or one that ran twice, always does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

from lab.chaos.cast import BUS, WATCHER, Kind, tools
from lab.chaos.evidence import RECOVERY, Call, Evidence, Moment
from lab.chaos.scene import Trouble
from lab.chaos.schedule import Act
from lab.chaos.watcher import AWAY
from lab.judge import Cases

# In seconds.
SLACK = 2.5  # after a call's deadline: an SDK waits 1 s for a bus that is late, the rest is a busy machine
DELIVERY = 5.0  # from the end of a run to its result at the caller, on a busy machine
PIPE = 2.0  # between a call's way out of its host and its run, where nothing may have happened either
DEATH = 1.0  # that nothing else may happen after a death for its notice to be timed
STANDSTILL = 1.5  # a stop that is always noticed by the stopped process; 1 s by the protocol
SUSPECT, GONE = 5.0, 23.5  # the same after a hang: 4 s and 22 s by the protocol, and a busy machine

Finding = Iterator[str | None]

# The stages of each code by docs/protocol.md; UNKNOWN is a client library's own.
_STAGES = {
    "TOOL": {"ACCEPTED"},
    "NOT_FOUND": {"NOT_DISPATCHED"},
    "OVERLOADED": {"NOT_DISPATCHED"},
    "UNAVAILABLE": {"NOT_DISPATCHED", "DISPATCHED", "ACCEPTED", "UNKNOWN"},
    "DEADLINE_EXCEEDED": {"NOT_DISPATCHED", "DISPATCHED", "ACCEPTED", "UNKNOWN"},
    "CANCELLED": {"NOT_DISPATCHED", "DISPATCHED", "ACCEPTED"},
    "LOST": {"UNKNOWN"},
    "AWAY": {"NOT_DISPATCHED"},
    "LEFT": {""},
}


def judge(evidence: Evidence) -> list[Cases]:
    return [Cases.of(rule, check(evidence)) for rule, check in CHECKS.items()]


def answered(evidence: Evidence) -> Finding:
    """Each call has one result; those of a host that was killed need none."""
    for call in evidence.calls.values():
        if len(call.results) > 1:
            yield f"{call} has {len(call.results)} results"
        elif call.results:
            yield None
        else:
            latest = call.deadline + SLACK
            latest += evidence.seconds_disturbed(_depends_on(evidence, call), call.order.at, latest)
            if not evidence.is_orphan(call, latest):
                yield f"{call} has no result"


def _depends_on(evidence: Evidence, call: Call) -> set[str]:
    """Returns the parts that a call's time depends on: an SDK keeps the time itself, others wait for the bus."""
    return {call.host} if evidence.parts[call.host].way == "sdk" else evidence.between(call)


def lateness(evidence: Evidence) -> Iterator[float]:
    """Yields how many seconds after its deadline each late result came, less what its parts stood still."""
    for call in evidence.calls.values():
        if call.results:
            at = call.results[0].at
            late = at - call.deadline - evidence.seconds_disturbed(_depends_on(evidence, call), call.order.at, at)
            if late > 0:
                yield late


def ran_once(evidence: Evidence) -> Finding:
    """No call runs twice unless its tool is idempotent, and nothing runs that no host called."""
    for call in evidence.calls.values():
        if not call.tool.idempotent:
            where = ", ".join(moment.part for moment in call.began)
            yield f"{call} ran {len(call.began)} times: at {where}" if len(call.began) > 1 else None
    for token in evidence.unknown:
        yield f"{token!r} ran and no host had called it"


def own_result(evidence: Evidence) -> Finding:
    """A success comes from a run of this very call."""
    for call in evidence.calls.values():
        if call.result("code") != "OK":
            continue
        if not call.began:
            yield f"{call} succeeded and never ran"
        elif call.result("ran") != call.token:
            yield f"{call} got the result of {call.result('ran')}"
        else:
            yield None


def no_strays(evidence: Evidence) -> Finding:
    """On one stream no result comes twice, and none of an unknown call."""
    for call in evidence.calls.values():
        if evidence.parts[call.host].way == "raw":
            yield None
    yield from evidence.strays


def delivered(evidence: Evidence) -> Finding:
    """What a plugin finished undisturbed reaches the caller; a drain of any part is not an excuse."""
    for call in evidence.calls.values():
        for ended in call.ended:
            if call.leaves or not call.results:
                continue
            began = next((m.at for m in call.began if m.pid == ended.pid), ended.at)
            begin, until = min(call.order.at, began - PIPE), min(call.results[0].at, ended.at + DELIVERY)
            if evidence.disturbed(evidence.between(call, ended.part), begin, until, but=Act.DRAIN):
                continue
            if call.result("code") == "DEADLINE_EXCEEDED" and ended.at + DELIVERY > call.deadline:
                continue  # the pace of the machine, as below
            if call.result("code") in ("OK", "TOOL") or (call.order.line["refuse"] and not call.result("stage")):
                yield None
            else:
                yield f"{call} ran to its end at {ended.part} and its caller got {_words(call)}"


def honest(evidence: Evidence) -> Finding:
    """Code, stage and retry_safe agree with the ledgers."""
    for call in evidence.calls.values():
        if call.results and call.result("code") != "OK" and evidence.parts[call.host].kind is Kind.HOST:
            yield _dishonest(call)


def _dishonest(call: Call) -> str | None:
    code, stage, safe = call.result("code"), call.result("stage"), call.result("retry_safe")
    if stage not in _STAGES.get(code, set()):
        return f"{call} got {_words(call)}, which no call ends in"
    if stage == "NOT_DISPATCHED" and call.began:
        return f"{call} got {_words(call)} and ran at {call.began[0].part}"
    if stage == "ACCEPTED" and not call.began:
        return f"{call} got {_words(call)} and never ran"
    if safe and not (call.tool.idempotent and call.tool.trusted) and call.began:
        return f"{call} may be repeated by its result ({_words(call)}) and ran at {call.began[0].part}"
    repeatable = call.tool.idempotent and call.tool.trusted
    if code == "UNAVAILABLE" and repeatable and not safe and stage in ("DISPATCHED", "ACCEPTED"):
        return f"{call} must not be repeated by its result ({_words(call)}), though its tool is idempotent"
    if code == "DEADLINE_EXCEEDED":
        early = call.deadline - call.results[0].at
        if early > 0.05 or call.result("limit") != "timeout_seconds":
            return f"{call} got {_words(call)} {early:.2f} s before its deadline, limit {call.result('limit')!r}"
    return None


def no_failure_without_cause(evidence: Evidence) -> Finding:
    """Where nothing was done to anything that a call depends on, it succeeds."""
    for call in evidence.calls.values():
        if not call.results or evidence.disturbed(evidence.between(call), call.order.at - RECOVERY, call.results[0].at):
            continue
        if evidence.is_recovering(call):
            continue  # how long that takes is a figure
        code = call.result("code")
        wanted = (
            code == "OK"
            or call.order.line["refuse"]
            or (call.leaves and code in ("LEFT", "CANCELLED"))
            or code == "DEADLINE_EXCEEDED"  # the pace of the machine; `honest` holds that the deadline was there
        )
        yield None if wanted else f"{call} got {_words(call)} while nothing had happened to what it needs"


def death_is_noticed(evidence: Evidence) -> Finding:
    """Callers of a process that was killed get an error, and the catalog shows its tools as gone."""
    for what, seconds in deaths(evidence):
        yield f"{what} never after it was killed" if seconds == math.inf else None


def deaths(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Yields how long after a death its callers and the catalog showed it."""
    for trouble in evidence.troubles:
        part = evidence.parts.get(trouble.part)
        if part is None or not trouble.pids or part.kind not in (Kind.PLUGIN, Kind.FOLDER, Kind.CALLBACK):
            continue
        until = trouble.began + DEATH
        for call, _ in _cut_off(evidence, trouble):
            failed_at = call.results[0].at if call.results else math.inf
            calm = not evidence.disturbed(evidence.between(call) - {trouble.part}, trouble.began - PIPE, until)
            waits = call.deadline > until and not call.leaves and not evidence.is_orphan(call, trouble.began)
            if calm and failed_at > trouble.began and waits:
                yield f"{call} failed since {trouble.part} is dead", failed_at - trouble.began
        calm = not evidence.disturbed({BUS, WATCHER}, trouble.began - RECOVERY, until)
        watched = calm and part.kind is not Kind.CALLBACK and not part.line
        for tool in _tools_of(evidence, trouble.part) if watched else ():
            if evidence.state(tool, trouble.began) == "live":
                move = evidence.first_move(tool, (AWAY,), trouble.began)
                yield f"{tool} was seen to go", (move.at if move else math.inf) - trouble.began


def _cut_off(evidence: Evidence, trouble: Trouble) -> Iterator[tuple[Call, Moment]]:
    """Yields calls of tools that are not idempotent and that ran in a process when that was killed."""
    for call in evidence.calls.values():
        for began in call.began if not call.tool.idempotent else ():
            ended = any(moment.pid == began.pid for moment in call.ended)
            if began.pid in trouble.pids and began.at < trouble.began and not ended:
                yield call, began


def _tools_of(evidence: Evidence, part: str) -> set[str]:
    """Returns the tools that only this part offers."""
    return {tool.name for tool in tools(list(evidence.parts.values())).values() if tool.parts == (part,)}


def given_up_stays_unrun(evidence: Evidence) -> Finding:
    """What ended for its caller while the bus or its plugin was stopped does not begin when that goes on."""
    for trouble in evidence.troubles:
        stopped_at, resumed_at = trouble.standstill
        if trouble.act is not Act.FREEZE or resumed_at - stopped_at < STANDSTILL:
            continue
        if evidence.parts[trouble.part].kind not in (Kind.BUS, Kind.PLUGIN):  # others are not peers with a stream
            continue
        for call in evidence.calls.values():
            if trouble.part == BUS:  # one that was sent before may be on its way to the plugin already
                concerns = call.order.at > stopped_at
            else:
                concerns = call.tool.parts == (trouble.part,)
            if concerns and call.results and stopped_at < call.results[0].at < resumed_at:
                late = [moment for moment in call.began if moment.at > resumed_at]
                yield (
                    f"{call} got {_words(call)} while {trouble.part} was stopped, and ran after that" if late else None
                )


def hang_is_noticed(evidence: Evidence) -> Finding:
    """A process that hangs becomes suspect, and then is gone."""
    for what, seconds in hangs(evidence):
        yield f"{what} never after it was stopped" if seconds == math.inf else None


def hangs(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Yields how long after a stop a tool was seen suspect or gone."""
    for trouble in evidence.troubles:
        frozen = trouble.act in (Act.FREEZE, Act.FREEZE_CHILD)
        if not frozen or evidence.parts[trouble.part].kind not in (Kind.PLUGIN, Kind.FOLDER):
            continue
        for tool in sorted(_tools_of(evidence, trouble.part)):
            for word, states, most in (("suspect", ("suspect", AWAY), SUSPECT), ("gone", (AWAY,), GONE)):
                until = trouble.began + most
                names = {BUS, WATCHER, evidence.parts[trouble.part].line}
                if trouble.ended < until or evidence.disturbed(names, trouble.began - RECOVERY, until):
                    continue
                if evidence.state(tool, trouble.began) == "live":
                    move = evidence.first_move(tool, states, trouble.began)
                    yield f"{tool} was seen {word}", (move.at if move else math.inf) - trouble.began


def _words(call: Call) -> str:
    message = f"({call.result('message')})" if call.result("message") else ""
    return " ".join(filter(None, (call.result("code"), call.result("stage"), message)))


CHECKS: dict[str, Callable[[Evidence], Finding]] = {
    "every call has one result": answered,
    "no call runs twice unless its tool is idempotent": ran_once,
    "a success is this call's own": own_result,
    "a stream brings no result twice, and none of an unknown call": no_strays,
    "what a plugin finished undisturbed reaches the caller": delivered,
    "code, stage and retry_safe agree with the ledgers": honest,
    "no failure without a cause": no_failure_without_cause,
    "a death is noticed": death_is_noticed,
    "a hang is noticed: suspect, then gone": hang_is_noticed,
    "what was given up during a standstill does not run after it": given_up_stays_unrun,
}
