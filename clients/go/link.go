package toolbus

import (
	"cmp"
	"context"
	"errors"
	"strconv"
	"sync"
	"time"

	"google.golang.org/protobuf/encoding/protowire"
	"google.golang.org/protobuf/proto"

	"toolbus/internal/pb"
)

const (
	messageItems = 128
	messageBytes = 1 << 20
	margin       = 1024                   // bytes of a message that its one item must leave free
	hold         = time.Millisecond       // that the results of calls of one message may wait for each other, and calls that are made together
	leaveTime    = 2 * time.Second        // for the bus to end the stream after our drain, and again after our half-close
	tick         = 500 * time.Millisecond // between two looks at the clock; later by as much means a standstill
)

// field is the number of a field of InvokeRequest.
type field protowire.Number

const (
	fieldAttach field = iota + 1
	fieldCalls
	fieldResults
	fieldProgress
	fieldCancels
	fieldHeartbeat
	fieldDrain
)

// single tells whether a message has at most one item of the field.
func (f field) single() bool { return f == fieldAttach || f >= fieldHeartbeat }

type item struct {
	field  field
	bytes  []byte
	callID string // of calls
}

// outbox collects items for a stream and makes messages of them: one queue, so that progress stays before its result. The
// mutex of the peer guards it.
type outbox struct {
	ready       chan struct{} // tells the writer to look; has room for one
	mutex       *sync.Mutex   // of the peer
	items       []item
	holding     bool        // whether all items are results or calls that wait for others
	holdTimer   *time.Timer // ends that; nil before the first time
	closed      bool
	resultBytes int // the largest payload of a result that the bus takes
	largestItem int // in bytes; a larger item would end the stream
}

// put adds an item; drops it if the stream is over. With wait it may stay a moment for others, which follow.
func (o *outbox) put(field field, bytes []byte, callID string, wait bool) {
	if o.closed {
		return
	}
	empty := len(o.items) == 0
	o.items = append(o.items, item{field, bytes, callID})
	switch {
	case !wait || !empty && !o.holding:
		o.wake()
	case empty:
		o.holding = true
		if o.holdTimer == nil {
			o.holdTimer = time.AfterFunc(hold, o.release)
		} else {
			o.holdTimer.Reset(hold)
		}
	}
}

// release lets the writer take what was held.
func (o *outbox) release() {
	o.mutex.Lock()
	defer o.mutex.Unlock()
	if o.holding {
		o.wake()
	}
}

// putMessage adds a message of this library's own making.
func (o *outbox) putMessage(field field, message proto.Message) {
	bytes, err := proto.Marshal(message)
	if err == nil {
		o.put(field, bytes, "", false)
	}
}

// close lets the writer send what waits and then half-close.
func (o *outbox) close() {
	o.closed = true
	o.wake()
}

func (o *outbox) wake() {
	if o.holding {
		o.holding = false
		o.holdTimer.Stop()
	}
	select {
	case o.ready <- struct{}{}:
	default:
	}
}

// take returns a message of the oldest items; nil if none waits.
func (o *outbox) take() []byte {
	if len(o.items) == 0 || o.holding {
		return nil
	}
	var message []byte
	var singles [fieldDrain + 1]bool
	count := 0
	for _, next := range o.items {
		size := protowire.SizeTag(protowire.Number(next.field)) + protowire.SizeBytes(len(next.bytes))
		if count > 0 && (count == messageItems || len(message)+size > messageBytes || singles[next.field]) {
			break
		}
		singles[next.field] = next.field.single()
		message = protowire.AppendTag(message, protowire.Number(next.field), protowire.BytesType)
		message = protowire.AppendBytes(message, next.bytes)
		count++
	}
	if count == len(o.items) {
		clear(o.items)
		o.items = o.items[:0]
	} else {
		o.items = o.items[count:]
	}
	return message
}

// unwrittenCalls returns the ids of the calls that are in no message yet.
func (o *outbox) unwrittenCalls() map[string]bool {
	ids := map[string]bool{}
	for _, each := range o.items {
		if each.field == fieldCalls {
			ids[each.callID] = true
		}
	}
	return ids
}

// link is the state of one stream, from its attach to its end: both tables of calls, its limits. A new stream begins with
// a new link, so that nothing of an old one can reach it. The mutex of the peer guards it.
type link struct {
	outbox
	connection    *connection
	giveUp        context.CancelCauseFunc // cancels the stream, with a reason
	running       map[string]*run         // calls that we answer, by the bus's id
	pending       map[string]*ask         // calls of our own that the bus has not answered, by our id
	waiting       []*ask                  // nested calls that wait for room, oldest first
	standstill    standstill
	attached      *pb.Attached // the bus's first answer; nil before it
	attachedAt    time.Time    // of that answer
	heardAt       time.Time    // the start of the stream, or the bus's last message
	declared      int          // the version of the tools in the newest attach
	unanswered    []int        // those of the attaches that the bus has not answered
	pages         [][]*pb.Tool // tools of that attach that did not fit into it
	declaring     bool         // whether another attach is about to be made
	subscribed    int          // how many feeds the newest attach subscribed to
	drainSent     bool
	drainReceived bool
	callsInFlight int
	argumentBytes int
	heartbeat     time.Duration
	leaveTimer    *time.Timer // half-closes, then cancels; nil while calls are left
	ids           int
	followers     int       // how many calls may follow the newest results, and wait for each other
	followUntil   time.Time // until when they may
}

func newLink(mutex *sync.Mutex, connection *connection, giveUp context.CancelCauseFunc, callsInFlight int) *link {
	return &link{
		outbox:        outbox{ready: make(chan struct{}, 1), mutex: mutex, resultBytes: 4 << 20, largestItem: 16<<20 - margin},
		connection:    connection,
		giveUp:        giveUp,
		running:       map[string]*run{},
		pending:       map[string]*ask{},
		heardAt:       time.Now(),
		callsInFlight: cmp.Or(callsInFlight, 256),
		argumentBytes: 1 << 20,
		heartbeat:     10 * time.Second,
	}
}

// open takes the bus's first answer, and with it the limits; what is unset has its default.
func (l *link) open(attached *pb.Attached) {
	l.attached, l.attachedAt = attached, time.Now()
	set := func(limit *int, value uint32, less int) {
		if value > 0 {
			*limit = int(value) - less
		}
	}
	set(&l.callsInFlight, attached.Limits.GetCallsInFlight(), 0)
	set(&l.argumentBytes, attached.Limits.GetArgumentsBytes(), 0)
	set(&l.resultBytes, attached.Limits.GetResultBytes(), 0)
	set(&l.largestItem, attached.Limits.GetMessageBytes(), margin)
	if attached.HeartbeatSeconds > 0 {
		l.heartbeat = seconds(attached.HeartbeatSeconds)
	}
	l.standstill.echoes = attached.Echoes
}

// leaving tells whether either side has sent a drain: then only nested calls are made.
func (l *link) leaving() bool { return l.drainSent || l.drainReceived }

func (l *link) hasRoom() bool { return len(l.pending) < l.callsInFlight }

func (l *link) nextID() string {
	l.ids++
	return "c" + strconv.Itoa(l.ids)
}

// lived returns how long the session has been live; below 0 if it never was.
func (l *link) lived() time.Duration {
	if l.attached == nil {
		return -1
	}
	return time.Since(l.attachedAt)
}

// drain sends the bus a drain, once.
func (l *link) drain(reason string) {
	if !l.drainSent {
		l.drainSent = true
		l.putMessage(fieldDrain, &pb.Drain{Reason: reason})
		l.whenIdle()
	}
}

// whenIdle takes the next step towards the end of the stream; it is called after each message and each end of a call.
// After our own drain the bus ends the stream: it may have sent a call before it read the drain.
func (l *link) whenIdle() {
	if !l.leaving() {
		return
	}
	switch idle := len(l.running)+len(l.pending)+len(l.waiting)+len(l.standstill.held) == 0; {
	case !idle:
		l.stopLeaving()
	case l.drainReceived:
		l.close()
	case l.leaveTimer == nil:
		l.leaveTimer = time.AfterFunc(leaveTime, func() {
			l.mutex.Lock()
			defer l.mutex.Unlock()
			if l.leaveTimer != nil && len(l.running)+len(l.pending) == 0 {
				l.close()
				l.leaveTimer = time.AfterFunc(leaveTime, func() { l.giveUp(errors.New("the bus does not end the stream")) })
			}
		})
	}
}

func (l *link) stopLeaving() {
	if l.leaveTimer != nil {
		l.leaveTimer.Stop()
		l.leaveTimer = nil
	}
}

// silent tells whether the bus has sent nothing for too long. Time in which this process stood still does not count.
func (l *link) silent() (time.Duration, bool) {
	if l.look() {
		l.heardAt = time.Now()
	}
	limit := attachTime
	if l.attached != nil {
		limit = missedHeartbeats * l.heartbeat
	}
	return limit, time.Since(l.heardAt) > limit
}

// standstill notices that this process stood still (stopped, or its machine suspended); then the calls that it reads are
// held. The bus may have ended them meanwhile. It echoes a heartbeat behind everything that it has sent before, so the
// callers of calls that are not cancelled by then still wait.
type standstill struct {
	held     []*pb.ToolCall // calls that may have ended
	echoes   bool           // whether the bus echoes heartbeats of ours
	holding  bool           // whether calls that arrive are held
	sequence uint64         // of our newest heartbeat
	due      time.Time      // when look is called next, at the latest; zero before the first time
}

// look looks at the clocks, at least every tick; it returns whether the process stood still since the last look.
func (l *link) look() bool {
	s, now := &l.standstill, time.Now()
	// One comparison is by a clock that stops in a suspended machine, the other by the clock of the wall.
	late := !s.due.IsZero() && (now.After(s.due) || now.Round(0).After(s.due.Round(0)))
	s.due = now.Add(2 * tick)
	if late && s.echoes {
		s.holding = true
		s.sequence++
		l.putMessage(fieldHeartbeat, &pb.Heartbeat{Sequence: s.sequence, FromPeer: true})
	}
	return late
}

// echoed takes the echo of a heartbeat of ours; it returns the calls that may begin now.
func (s *standstill) echoed(sequence uint64) []*pb.ToolCall {
	if sequence != s.sequence {
		return nil
	}
	calls := s.held
	s.holding, s.held = false, nil
	return calls
}
