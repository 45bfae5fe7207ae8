"""What has to be true of every run. Pure: each check reads the evidence and says what breaks its rule.

A check yields a sentence for each case that breaks it and None for each that holds, so that a report can say how much
was judged. What happened in a disturbance is judged by what cannot be excused by it: a call without a result, or one
that ran twice, never can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from lab.chaos.cast import BUS, Kind, tools
from lab.chaos.evidence import Call, Evidence, Moment
from lab.chaos.scene import Trouble
from lab.chaos.schedule import Act
from lab.chaos.watcher import AWAY

# The bounds that docs/about/testing.md states, in seconds.
SLACK = 2.5  # after a call's deadline: an SDK waits 1 s for a bus that is late, the rest is a busy machine
DELIVERY = 1.0  # from the end of a run to its result at the caller
PIPE = 2.0  # between a call's way out of its host and its run, where nothing may have happened either
RECOVERY = 10.0  # from the end of a disturbance to a time without failures
DEATH = 1.0
SUSPECT, GONE = 9.5, 23.5  # 8 s and 22 s, half a second until the bus looks, and a busy machine

Finding = Iterator[str | None]

# What docs/protocol.md says about codes; UNKNOWN is a client library's own.
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


@dataclass(slots=True)
class Verdict:
    """What became of one check.

    Attributes:
        judged: how many cases there were.
        broken: those that broke the rule, a sentence each.
    """

    rule: str
    judged: int = 0
    broken: list[str] = field(default_factory=list)

    def take(self, finding: str | None) -> None:
        """Counts one case."""
        self.judged += 1
        if finding is not None:
            self.broken.append(finding)


def judge(evidence: Evidence) -> list[Verdict]:
    """Applies every check."""
    verdicts = []
    for rule, check in CHECKS.items():
        verdict = Verdict(rule)
        for finding in check(evidence):
            verdict.take(finding)
        verdicts.append(verdict)
    return verdicts


def answered(evidence: Evidence) -> Finding:
    """One result for each call, by its deadline; a host that was killed heard nothing."""
    for call in evidence.calls.values():
        # An SDK keeps the time itself; others wait for a bus that stands still.
        waits_for = {call.host} if evidence.parts[call.host].way == "sdk" else evidence.between(call)
        if not call.told:
            latest = call.deadline + SLACK
            latest += evidence.seconds_disturbed(waits_for, call.asked.at, latest)
            if not evidence.is_orphan(call, latest):
                yield f"{call} has no result"
            continue
        if len(call.told) > 1:
            yield f"{call} was told {len(call.told)} results"
            continue
        told = call.told[0].at
        excused = evidence.seconds_disturbed(waits_for, call.asked.at, told)
        late = told - call.deadline - excused
        yield f"{call} has its result {late:.1f} s after its deadline" if late > SLACK else None


def ran_once(evidence: Evidence) -> Finding:
    """No call runs twice unless its tool is idempotent, and nothing runs that nobody asked for."""
    for call in evidence.calls.values():
        if not call.tool.idempotent:
            where = ", ".join(moment.part for moment in call.began)
            yield f"{call} ran {len(call.began)} times: at {where}" if len(call.began) > 1 else None
    for token in evidence.unknown:
        yield f"{token!r} ran and nobody had asked for it"


def own_result(evidence: Evidence) -> Finding:
    """A success comes from a run of this very call."""
    for call in evidence.calls.values():
        if call.says("code") != "OK":
            continue
        if not call.began:
            yield f"{call} succeeded and never ran"
        elif call.says("ran") != call.token:
            yield f"{call} was told the result of {call.says('ran')}"
        else:
            yield None


def no_strays(evidence: Evidence) -> Finding:
    """On one stream no result comes twice, and none that was not asked for."""
    for call in evidence.calls.values():
        if evidence.parts[call.host].way == "raw":
            yield None
    yield from evidence.strays


def delivered(evidence: Evidence) -> Finding:
    """What a plugin finished in peace is told to the caller; a drain, of whomever, is no excuse."""
    for call in evidence.calls.values():
        for ended in call.ended:
            if call.leaves or ended.at + DELIVERY > call.deadline or not call.told:
                continue
            began = next((m.at for m in call.began if m.pid == ended.pid), ended.at)
            begin = min(call.asked.at, began - PIPE)
            if evidence.disturbed(evidence.between(call, ended.part), begin, ended.at + DELIVERY, but=Act.DRAIN):
                continue
            if call.says("code") in ("OK", "TOOL") or (call.asked.line["refuse"] and not call.says("stage")):
                yield None
            else:
                yield f"{call} ran to its end at {ended.part} and its caller was told {_words(call)}"


def honest(evidence: Evidence) -> Finding:
    """Code, stage and retry_safe say what the ledgers say."""
    for call in evidence.calls.values():
        if call.told and call.says("code") != "OK" and evidence.parts[call.host].kind is Kind.HOST:
            yield _dishonest(call)


def _dishonest(call: Call) -> str | None:
    code, stage, safe = call.says("code"), call.says("stage"), call.says("retry_safe")
    if stage not in _STAGES.get(code, set()):
        return f"{call} was told {_words(call)}, which no call ends in"
    if stage == "NOT_DISPATCHED" and call.began:
        return f"{call} was told {_words(call)} and ran at {call.began[0].part}"
    if stage == "ACCEPTED" and not call.began:
        return f"{call} was told {_words(call)} and never ran"
    if safe and not call.tool.idempotent and call.began:
        return f"{call} was told that it is safe to repeat ({_words(call)}) and ran at {call.began[0].part}"
    if code == "UNAVAILABLE" and call.tool.idempotent and not safe and stage in ("DISPATCHED", "ACCEPTED"):
        return f"{call} was told that it is not safe to repeat ({_words(call)}), though its tool is idempotent"
    if code == "DEADLINE_EXCEEDED":
        early = call.deadline - call.told[0].at
        if early > 0.05 or call.says("limit") != "timeout_seconds":
            return f"{call} was told {_words(call)} {early:.2f} s before its deadline, limit {call.says('limit')!r}"
    return None


def no_failure_without_cause(evidence: Evidence) -> Finding:
    """Where nothing was done to anything that a call depends on, it succeeds."""
    for call in evidence.calls.values():
        if not call.told or evidence.disturbed(evidence.between(call), call.asked.at - RECOVERY, call.told[0].at):
            continue
        code = call.says("code")
        slow = call.asked.line["seconds"] > call.timeout - 0.5
        wanted = (
            code == "OK"
            or call.asked.line["refuse"]
            or (call.leaves and code in ("LEFT", "CANCELLED"))
            or (slow and code == "DEADLINE_EXCEEDED")
        )
        yield None if wanted else f"{call} was told {_words(call)} while nothing had happened to what it needs"


def death_is_noticed(evidence: Evidence) -> Finding:
    """Callers of a process that was killed hear of it at once, and so does whoever follows the catalog."""
    for what, seconds in deaths(evidence):
        yield f"{what} {seconds:.1f} s after it was killed" if seconds > DEATH else None


def deaths(evidence: Evidence) -> Iterator[tuple[str, float]]:
    """Yields how long after a death somebody heard of it."""
    for trouble in evidence.troubles:
        part = evidence.parts[trouble.part]
        if not trouble.pids or part.kind not in (Kind.PLUGIN, Kind.FOLDER, Kind.CALLBACK):
            continue
        until = trouble.began + DEATH
        for call, _ in _cut_off(evidence, trouble):
            told = call.told[0].at if call.told else float("inf")
            calm = not evidence.disturbed(evidence.between(call) - {trouble.part}, trouble.began - PIPE, until)
            waits = call.deadline > until and not call.leaves and not evidence.is_orphan(call, trouble.began)
            if calm and told > trouble.began and waits:
                yield f"{call} was told that {trouble.part} is dead", told - trouble.began
        for tool in _tools_of(evidence, trouble.part):
            if part.kind is Kind.CALLBACK or part.line or evidence.disturbed({BUS}, trouble.began - RECOVERY, until):
                continue
            if evidence.state(tool, trouble.began) == "live":
                move = evidence.first_move(tool, (AWAY,), trouble.began)
                yield f"{tool} was seen to go", (move.at if move else float("inf")) - trouble.began


def _cut_off(evidence: Evidence, trouble: Trouble) -> Iterator[tuple[Call, Moment]]:
    """Yields calls of tools that are not idempotent and that ran in a process when that was killed."""
    for call in evidence.calls.values():
        for began in call.began if not call.tool.idempotent else ():
            ended = any(moment.pid == began.pid for moment in call.ended)
            if began.pid in trouble.pids and began.at < trouble.began and not ended:
                yield call, began


def _tools_of(evidence: Evidence, part: str) -> set[str]:
    """Returns the tools that nobody else offers."""
    return {tool.name for tool in tools(list(evidence.parts.values())).values() if tool.parts == (part,)}


def hang_is_noticed(evidence: Evidence) -> Finding:
    """A process that hangs is suspect after 8 s and gone after 22 s."""
    for what, seconds, most in hangs(evidence):
        yield f"{what} {seconds:.1f} s after it was stopped" if seconds > most else None


def hangs(evidence: Evidence) -> Iterator[tuple[str, float, float]]:
    """Yields how long after a stop a tool was seen suspect or gone, and how long that may take."""
    for trouble in evidence.troubles:
        frozen = trouble.act in (Act.FREEZE, Act.FREEZE_CHILD)
        if not frozen or evidence.parts[trouble.part].kind not in (Kind.PLUGIN, Kind.FOLDER):
            continue
        for tool in sorted(_tools_of(evidence, trouble.part)):
            for word, states, most in (("suspect", ("suspect", AWAY), SUSPECT), ("gone", (AWAY,), GONE)):
                until = trouble.began + most
                names = {BUS, evidence.parts[trouble.part].line}
                if trouble.ended < until or evidence.disturbed(names, trouble.began - RECOVERY, until):
                    continue
                if evidence.state(tool, trouble.began) == "live":
                    move = evidence.first_move(tool, states, trouble.began)
                    yield f"{tool} was seen {word}", (move.at if move else float("inf")) - trouble.began, most


def _words(call: Call) -> str:
    stage = f" {call.says('stage')}" if call.says("stage") else ""
    return (
        f"{call.says('code')}{stage} ({call.says('message')})"
        if call.says("message")
        else f"{call.says('code')}{stage}"
    )


CHECKS: dict[str, Callable[[Evidence], Finding]] = {
    "every call has one result, in time": answered,
    "no call runs twice unless its tool is idempotent": ran_once,
    "a success is this call's own": own_result,
    "a stream brings no result twice, and no stranger's": no_strays,
    "what a plugin finished in peace reaches the caller": delivered,
    "code, stage and retry_safe agree with the ledgers": honest,
    "no failure without a cause": no_failure_without_cause,
    f"a death is noticed within {DEATH:g} s": death_is_noticed,
    f"a hang is suspect within {SUSPECT:g} s, gone within {GONE:g} s": hang_is_noticed,
}
