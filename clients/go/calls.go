package toolbus

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	mathrand "math/rand/v2"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"toolbus/internal/pb"
)

// This file makes the calls of a peer, its own and the nested ones of its handlers: each ends in exactly one result. A call
// waits for a stream and for room on it, and is sent again where that is safe, until its deadline. Once it is with the bus,
// the bus measures its time; a second later it ends here, in case the bus hangs.

const (
	defaultTime = 30 * time.Second       // of a call that names none
	longestTime = 300 * time.Second      // of any call
	slack       = time.Second            // that the bus's answer may be late
	late        = 500 * time.Millisecond // a timer later than this shows that the process stood still
	callIDField = 1                      // of a ToolCall
	prompt      = 5 * time.Millisecond   // a call that is sent within this time states the caller's own timeout
	firstPause  = 10 * time.Millisecond  // before a refused call is sent again: the upper end, which doubles
	maxPause    = time.Second
)

// ask is a call of this peer until it has its result. The goroutine of its caller drives it; the mutex of the peer guards
// what stands below signal.
type ask struct {
	fields     *pb.ToolCall
	encoded    []byte  // the fields, without the id of the call
	fault      error   // why they cannot be encoded
	timeout    float64 // in seconds, as the caller states it; 0 for none
	background float64 // the same of the moment when the call becomes a task
	parent     *link   // the stream of the call that this one is part of; nil for others
	onProgress func(Progress)
	started    time.Time
	deadline   time.Time     // until when it waits for a stream, for room, and between attempts
	lastMoment time.Time     // when it ends even if the bus has not answered
	signal     chan struct{} // of its waiter
	id         string        // of the newest attempt
	sentOn     *link         // the stream on which it is; nil while it waits
	accepted   bool          // whether progress has shown that a plugin works on it
	over       bool          // whether its maker has given it up, or has its result
	items      []*pb.ToolProgress
	result     *pb.ToolResult // of the newest attempt; nil while there is none
	refusal    *pb.ToolResult // the newest of the bus that may be tried again; nil before the first
	attempts   int
}

// waiter wakes the goroutine of a call. It serves one call after the other: one that is woken for the call before sees that
// nothing has happened to its own.
type waiter struct {
	signal chan struct{} // has room for one
	timer  *time.Timer
}

var waiters = sync.Pool{New: func() any {
	timer := time.NewTimer(time.Hour)
	timer.Stop()
	return &waiter{make(chan struct{}, 1), timer}
}}

func (a *ask) end(result *pb.ToolResult) {
	if a.over || a.result != nil {
		return
	}
	a.result = result
	a.notify()
}

// stage returns how far a call has got, if no progress has shown more.
func (a *ask) stage(least Stage) Stage {
	if a.accepted {
		return StageAccepted
	}
	return least
}

func (a *ask) notify() {
	select {
	case a.signal <- struct{}{}:
	default:
	}
}

// callTool makes a call, of a handler or of this peer's own.
func (p *peer) callTool(ctx context.Context, name string, arguments any, options CallOptions, parent *run) (*Result, error) {
	if err := p.begin(); err != nil {
		return nil, err
	}
	fields, err := callFields(name, arguments, options)
	if err != nil {
		return nil, err
	}
	var link *link
	if parent != nil {
		call := parent.call
		fields.ParentCallId, fields.Traceparent, fields.Tracestate = call.CallId, call.Traceparent, call.Tracestate
		fields.BackgroundAfterSeconds, fields.Context = 0, nil
		link = parent.link
	}
	result, err := p.call(ctx, fields, link, options.OnProgress)
	if err != nil {
		return nil, err
	}
	return resultFromWire(result), nil
}

// call makes a call and returns its result; a failure is a result with an error. It returns the cause of a context that is
// cancelled. The deadline of the context is that of the call; the bus answers it.
func (p *peer) call(ctx context.Context, fields *pb.ToolCall, parent *link, onProgress func(Progress)) (*pb.ToolResult, error) {
	if deadline, has := ctx.Deadline(); has && fields.BackgroundAfterSeconds == 0 {
		left := max(time.Until(deadline), time.Millisecond).Seconds()
		if fields.TimeoutSeconds == 0 || left < fields.TimeoutSeconds {
			fields.TimeoutSeconds = left
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, context.Cause(ctx)
	}
	own := waiters.Get().(*waiter)
	defer waiters.Put(own)
	named := seconds(cmp.Or(fields.BackgroundAfterSeconds, fields.TimeoutSeconds))
	started := time.Now()
	a := &ask{
		fields: fields, timeout: fields.TimeoutSeconds, background: fields.BackgroundAfterSeconds, parent: parent,
		onProgress: onProgress, started: started, signal: own.signal,
		deadline: started.Add(cmp.Or(named, defaultTime)), lastMoment: started.Add(min(cmp.Or(named, longestTime), longestTime) + slack),
	}
	a.encoded, a.fault = proto.Marshal(fields) // not with the mutex: it may be large
	p.mutex.Lock()
	p.unfinished[a] = true
	p.submit(a)
	p.mutex.Unlock()
	result, err := p.drive(ctx, a, own.timer)
	if err != nil {
		p.mutex.Lock()
		defer p.mutex.Unlock()
		p.giveUp(a, "cancelled")
		delete(p.unfinished, a)
	}
	return result, err
}

// drive waits for what happens to a call, until it has its result or its context is cancelled.
func (p *peer) drive(ctx context.Context, a *ask, timer *time.Timer) (*pb.ToolResult, error) {
	timer.Reset(a.deadline.Sub(a.started))
	defer timer.Stop()
	moment, done := a.deadline, ctx.Done()
	var pause <-chan time.Time // until a refused call is sent again; nil otherwise
	for {
		select {
		case <-a.signal:
			p.mutex.Lock()
			items, result := a.items, a.result
			a.items = nil
			if result != nil {
				if wait := p.again(a, result); wait > 0 {
					result, pause = nil, time.After(wait)
				} else {
					delete(p.unfinished, a)
					a.over = true
				}
			}
			p.mutex.Unlock()
			for _, item := range items {
				if a.onProgress != nil {
					a.onProgress(progressFromWire(item))
				}
			}
			if result != nil {
				return result, nil
			}
		case <-pause:
			pause = nil
			p.mutex.Lock()
			if a.result == nil {
				p.submit(a)
			}
			p.mutex.Unlock()
		case <-done:
			if !errors.Is(ctx.Err(), context.DeadlineExceeded) || a.fields.BackgroundAfterSeconds > 0 {
				return nil, context.Cause(ctx)
			}
			done = nil // the bus answers the deadline
		case <-timer.C:
			if now := time.Now(); now.Sub(moment) > late {
				moment = now.Add(slack) // this process stood still: the result may wait in the socket, so read first
			} else {
				moment = p.expire(a, now)
			}
			timer.Reset(time.Until(moment))
		}
	}
}

// submit sends a call, or lets it wait for a stream or for room.
func (p *peer) submit(a *ask) {
	link, queue, open := p.link, p.queueOf(a), p.attached != nil
	if a.parent != nil {
		link, open = a.parent, true
	}
	switch {
	case a.parent != nil && (link.closed || link != p.link):
		p.broke(a, true)
	case a.parent == nil && p.closed != "":
		p.refuse(a)
	case open && len(*queue) == 0 && link.hasRoom():
		p.send(a, link)
	default:
		*queue = append(*queue, a)
	}
}

// queueOf returns where a call waits, oldest first; nested ones wait at their link.
func (p *peer) queueOf(a *ask) *[]*ask {
	if a.parent != nil {
		return &a.parent.waiting
	}
	return &p.waiting
}

func (p *peer) send(a *ask, link *link) {
	call, now := a.fields, time.Now()
	if waited := now.Sub(a.started); waited > prompt {
		left := func(seconds float64) float64 {
			if seconds > 0 {
				return max(seconds-waited.Seconds(), 0.001)
			}
			return 0
		}
		call.TimeoutSeconds, call.BackgroundAfterSeconds = left(a.timeout), left(a.background)
		a.encoded, a.fault = proto.Marshal(call)
	}
	a.id = link.nextID()
	bytes := protowire.AppendTag(make([]byte, 0, len(a.encoded)+len(a.id)+2), callIDField, protowire.BytesType)
	bytes = append(protowire.AppendString(bytes, a.id), a.encoded...)
	over := func(name string, size, limit int) {
		text := fmt.Sprintf("the call has %d bytes, more than the limit %s = %d: send less", size, name, limit)
		a.end(failedAt(CodeInvalidArguments, StageNotDispatched, text, name, float64(limit)))
	}
	switch {
	case a.fault != nil:
		a.end(failed(CodeInvalidArguments, StageNotDispatched, "the name or the arguments hold bytes that are not UTF-8: send text"))
	case len(call.ArgumentsJson) > link.argumentBytes:
		over("arguments_bytes", len(call.ArgumentsJson), link.argumentBytes)
	case len(bytes) > link.largestItem:
		over("message_bytes", len(bytes), link.largestItem)
	default:
		link.pending[a.id] = a
		a.sentOn = link
		link.followers--
		link.put(fieldCalls, bytes, a.id, link.followers > 0 && now.Before(link.followUntil))
	}
}

// again tells how long to wait before a call that failed is made again; 0 if its result is final.
func (p *peer) again(a *ask, result *pb.ToolResult) time.Duration {
	failure := result.Error
	temporary := failure.GetCode() == pb.ErrorCode_ERROR_CODE_UNAVAILABLE || failure.GetCode() == pb.ErrorCode_ERROR_CODE_OVERLOADED
	if a.over || !temporary || !failure.RetrySafe || a.sentOn == nil {
		return 0
	}
	pause := max(mathrand.N(min(maxPause, firstPause<<min(a.attempts, 10)))+1, seconds(failure.RetryAfterSeconds))
	if time.Now().Add(pause).After(a.deadline) || p.closed != "" {
		return 0
	}
	a.attempts++
	a.refusal, a.result, a.sentOn = result, nil, nil
	return pause
}

// expire handles the end of a call's time; it returns when to look again.
func (p *peer) expire(a *ask, now time.Time) time.Time {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	switch {
	case a.result != nil:
	case a.sentOn == nil:
		p.unqueue(a)
		p.refuse(a)
	case now.Before(a.lastMoment):
		return a.lastMoment
	default:
		limit := (a.lastMoment.Sub(a.started) - slack).Seconds()
		text := fmt.Sprintf("the bus gave no answer within %g s: it hangs", limit)
		a.end(failedAt(CodeDeadlineExceeded, a.stage(StageUnknown), text, "timeout_seconds", limit))
		p.giveUp(a, "timeout_seconds")
	}
	return now.Add(time.Hour)
}

// giveUp takes a call back. It counts as in flight until the bus has answered.
func (p *peer) giveUp(a *ask, reason string) {
	a.over = true
	p.unqueue(a)
	if a.sentOn != nil && a.sentOn.pending[a.id] == a {
		a.sentOn.putMessage(fieldCancels, &pb.ToolCancel{CallId: a.id, Reason: reason})
	}
	if a.parent != nil {
		a.parent.whenIdle()
	}
}

func (p *peer) unqueue(a *ask) {
	queue := p.queueOf(a)
	if i := slices.Index(*queue, a); i >= 0 {
		*queue = slices.Delete(*queue, i, i+1)
	}
}

// refuse ends a call that was not sent: with the last refusal, or because there is no bus.
func (p *peer) refuse(a *ask) {
	result := a.refusal
	if result == nil {
		result = failed(CodeUnavailable, StageNotDispatched, cmp.Or(p.closed, "no bus took the call in time"))
		result.Error.RetrySafe = p.closed == "" && a.parent == nil
	}
	a.sentOn = nil
	a.end(result)
}

func (p *peer) broke(a *ask, unread bool) {
	stage := StageUnknown
	if unread {
		stage = StageNotDispatched
	}
	a.sentOn = nil
	a.end(failed(CodeUnavailable, a.stage(stage), "the connection to the bus broke"))
}

// -- for the peer -----------------------------------------------------------------------------------------------------

// closeCalls ends the calls that were not sent, and those that are made later; the first reason stays.
func (p *peer) closeCalls(reason string) {
	if p.closed == "" {
		p.closed = reason
	}
	for _, a := range p.waiting {
		p.refuse(a)
	}
	p.waiting = nil
}

// cancelAll ends all calls that have no result yet in CANCELLED.
func (p *peer) cancelAll(reason string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	for a := range p.unfinished {
		stage := StageNotDispatched
		if a.sentOn != nil {
			stage = StageDispatched
		}
		a.end(failed(CodeCancelled, a.stage(stage), reason))
		p.giveUp(a, reason)
	}
}

func (p *peer) onProgress(items []*pb.ToolProgress, link *link) {
	for _, item := range items {
		if a := link.pending[item.CallId]; a != nil && !a.over {
			a.accepted = true
			a.items = append(a.items, item)
			a.notify()
		}
	}
}

func (p *peer) onResults(results []*pb.ToolResult, link *link) {
	if len(results) == 0 {
		return
	}
	// Those who waited for the results are likely to call again: their calls then go in one message.
	link.followers, link.followUntil = len(results), time.Now().Add(hold)
	for _, result := range results {
		if a := link.pending[result.CallId]; a != nil {
			delete(link.pending, result.CallId)
			if !a.over && a.result == nil {
				a.result = result
				p.woken = append(p.woken, a)
			}
		}
	}
	p.sendWaiting(link)
}

// sendWaiting sends waiting calls while there is room, nested ones first.
func (p *peer) sendWaiting(link *link) {
	for _, queue := range []*[]*ask{&link.waiting, &p.waiting} {
		for len(*queue) > 0 && link.hasRoom() && (queue == &link.waiting || p.attached != nil && link == p.link) {
			a := (*queue)[0]
			*queue = (*queue)[1:]
			p.send(a, link)
		}
	}
}

// lostCalls handles the end of a stream: calls that the bus cannot have read are sent on the next one, the others fail.
// The bus has answered all that it read where it shut down gracefully.
func (p *peer) lostCalls(link *link, allRead bool) {
	unwritten := link.unwrittenCalls()
	later := p.waiting
	p.waiting = nil
	oldestFirst := func(a, b *ask) int { return a.started.Compare(b.started) }
	for _, a := range slices.SortedFunc(maps.Values(link.pending), oldestFirst) {
		unread := allRead || unwritten[a.id]
		switch {
		case a.over:
		case !unread || a.parent != nil:
			p.broke(a, unread)
		case time.Now().After(a.deadline):
			p.refuse(a)
		default:
			a.sentOn = nil
			p.submit(a)
		}
	}
	p.waiting = append(p.waiting, later...)
	for _, a := range link.waiting {
		p.broke(a, true)
	}
	clear(link.pending)
	link.waiting = nil
}
