package toolbus

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"maps"
	mathrand "math/rand/v2"
	"os"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/protobuf/proto"

	"toolbus/internal/pb"
)

const (
	defaultAddress   = "127.0.0.1:48930"
	attachTime       = 10 * time.Second   // for connecting, and for the answer to the attach
	missedHeartbeats = 4                  // after so many intervals without a message the bus counts as lost
	steady           = time.Second        // a session that lived so long resets the backoff
	expiryWarning    = 7 * 24 * time.Hour // before a key expires: then a warning is logged
	maxUnread        = 1000               // items of a subscription that wait for one reader
	attachBytes      = 12 << 20           // of the tools in one request; those that do not fit follow by Register
	joinChanges      = time.Millisecond   // changes of the tools within this time go into one attach
)

var (
	digits     = regexp.MustCompile(`[0-9]+`) // of times and ports, which differ in texts that say the same
	sourceRule = regexp.MustCompile(`^[A-Za-z0-9_.:-]{1,128}$`)
	// After these statuses another attempt would be refused too.
	final = []string{"INVALID_ARGUMENT", "FAILED_PRECONDITION", "NOT_FOUND", "PERMISSION_DENIED", "ALREADY_EXISTS", "UNIMPLEMENTED"}
)

// Options are what plugins and hosts can state about their connection.
type Options struct {
	// Address is HOST:PORT, unix:PATH, tls:HOST:PORT, mtls:HOST:PORT, dns: before a name for every bus that DNS has for it, or
	// several of them, separated by commas; by default TOOLBUS_ADDRESS, then the credential's, then 127.0.0.1:48930. A plugin
	// attaches to all, a host to one at a time.
	Address string
	// Credential is the file that proves who this peer is, to a bus on another machine; by default TOOLBUS_CREDENTIAL.
	Credential string
	// Token binds the source: while it is in use, only processes with the same token may use it; by default TOOLBUS_TOKEN.
	Token string
	// Instance names the process, so that its new connection replaces its old one; by default random.
	Instance string
	// MaxInFlight is the number of calls at once; 256 by default.
	MaxInFlight int
	// Log takes warnings for the author; by default slog.Default().
	Log *slog.Logger
}

// RefusedTool is a tool that the bus does not offer.
type RefusedTool struct {
	Name, Error, Role string
	Source            string // in a listing
}

// WaitingTool is a tool that waits for a role which the bus does not have.
type WaitingTool struct{ Name, Role string }

// role has the fields of the attach that only plugins have.
type role struct {
	qualified, allOrNone bool
	notices              []string
	onRefused            func(RefusedTool)
}

// attempt says why the last attempt at a bus failed: as it was logged, and what a look at the bus has found; empty before that.
type attempt struct{ text, why string }

// toolKey names a tool of a role.
type toolKey struct{ role, name string }

// peer holds one stream to a bus while it runs, to the next one of its buses when that is gone: offers tools, answers calls,
// makes calls; in the order of docs/protocol.md. tools.go answers the calls of the bus, calls.go makes calls, link.go has the state of one stream.
type peer struct {
	buses    *addresses // only its goroutine looks names up
	source   string
	options  Options
	role     role
	fault    error         // of the options; nil where they have none
	ended    chan struct{} // closed when run has returned
	leaving  chan struct{} // closed when this peer is to leave
	work     chan *run     // takes calls for goroutines that have answered earlier ones
	idle     atomic.Int32  // how many goroutines wait for work
	catalogs feed[CatalogChange]
	notes    feed[Notification]

	mutex        sync.Mutex        // guards all that follows, and the links
	changed      chan struct{}     // closed, and replaced, when something has changed that others wait for
	credential   map[string]string // of the newest connection
	unusable     string            // why its file could not be used; empty where it could
	link         *link             // the current stream; nil between two
	attached     *pb.Attached      // the first answer on the current stream; nil without a session that takes calls
	left         string            // why this peer does not attach again; empty while it does
	fatal        error             // why the bus refused tools that are to be offered all or none; nil otherwise
	refusal      error             // why run ended; nil unless the bus refused this peer
	begun        bool
	shown        map[string]attempt // by bus; empty while attached
	explained    bool               // whether it was looked into why a bus that is there does not answer, or is not needed
	answered     int                // the version of the tools for which the bus has answered last
	refused      map[toolKey]RefusedTool
	waitingTools map[toolKey]bool
	noted        map[string]bool        // what was logged about tools
	warnings     []string               // that are not logged yet
	catalog      map[ToolRef]ListedTool // what the watch has brought
	order        []ToolRef              // of the names in catalog
	revision     uint64                 // of the catalog here; 0 before the first list came
	newest       uint64                 // the number of the newest notification
	wanted       []pb.Subscription      // the feeds that were ever read
	closed       string                 // why calls are not sent any more; empty while they are
	waiting      []*ask                 // calls that wait for a stream or for room, oldest first
	unfinished   map[*ask]bool
	beginning    []*run     // calls of a message that is being handled
	woken        []*ask     // whose result is in that message
	tools        []*offered // in the order in which they were added
	version      int        // of the tools; rises with every change
}

// complete returns the options with what the environment and the credential state, and the buses of the address.
func complete(source string, options Options) (Options, *addresses, error) {
	if !sourceRule.MatchString(source) {
		return options, nil, setupErrorf("the source is %q, it must be 1 to 128 of [A-Za-z0-9_.:-]", source)
	}
	options.Credential = cmp.Or(options.Credential, os.Getenv("TOOLBUS_CREDENTIAL"))
	options.Token = cmp.Or(options.Token, os.Getenv("TOOLBUS_TOKEN"))
	credential, err := readCredential(options.Credential)
	if err != nil {
		return options, nil, err
	}
	options.Instance = cmp.Or(options.Instance, rand.Text())
	options.Log = cmp.Or(options.Log, slog.Default())
	options.Address = cmp.Or(options.Address, os.Getenv("TOOLBUS_ADDRESS"), credential["address"], defaultAddress)
	buses, err := readAddresses(options.Address)
	return options, buses, err
}

func newPeer(source string, options Options, buses *addresses, role role) *peer {
	return &peer{
		buses: buses, source: source, options: options, role: role, shown: map[string]attempt{}, noted: map[string]bool{},
		ended: make(chan struct{}), leaving: make(chan struct{}), work: make(chan *run), changed: make(chan struct{}), answered: -1,
		refused: map[toolKey]RefusedTool{}, waitingTools: map[toolKey]bool{}, catalog: map[ToolRef]ListedTool{}, unfinished: map[*ask]bool{},
		catalogs: feed[CatalogChange]{kind: pb.Subscription_SUBSCRIPTION_CATALOG}, notes: feed[Notification]{kind: pb.Subscription_SUBSCRIPTION_NOTIFICATIONS},
	}
}

// begin connects in the background, unless it does already or has left; the error is that of the options.
func (p *peer) begin() error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.fault == nil && !p.begun && p.left == "" {
		p.begun = true
		go p.run()
	}
	return p.fault
}

// leave shuts down gracefully: the bus sends no new calls, those in flight are finished, then the stream ends.
func (p *peer) leave(reason string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.leaveLocked("this peer has left the bus")
	if p.link != nil {
		p.link.drain(reason)
	}
	if !p.begun {
		p.begun = true
		close(p.ended)
	}
	p.notifyChanged()
}

func (p *peer) leaveLocked(why string) {
	p.attached = nil
	if p.left == "" {
		p.left = why
		close(p.leaving)
	}
	p.closeCalls(p.left)
}

// wait waits for the end of a peer that leaves; when the context is done it gives up the calls in flight.
func (p *peer) wait(ctx context.Context) {
	select {
	case <-p.ended:
	case <-ctx.Done():
		p.mutex.Lock()
		if p.link != nil {
			p.link.giveUp(errors.New("the calls in flight took too long"))
		}
		p.mutex.Unlock()
		<-p.ended
	}
}

// until waits until a condition holds. The error says why it will not: the bus refused this peer, this peer has left, or
// the time is over.
func (p *peer) until(ctx context.Context, condition func() bool) error {
	for {
		p.mutex.Lock()
		met, refusal, left, changed := condition(), p.refusal, p.left, p.changed
		p.mutex.Unlock()
		switch {
		case met:
			return nil
		case refusal != nil:
			return refusal
		case left != "":
			return &PeerLost{"UNAVAILABLE", left}
		}
		select {
		case <-changed:
			continue
		case <-ctx.Done():
		}
		if errors.Is(ctx.Err(), context.Canceled) {
			return context.Cause(ctx)
		}
		var shown []string
		p.mutex.Lock()
		for _, each := range p.shown {
			shown = append(shown, cmp.Or(each.why, each.text))
		}
		p.mutex.Unlock()
		slices.Sort(shown)
		details := fmt.Sprintf("no bus answered at %s in time: %s", p.buses.text, cmp.Or(strings.Join(shown, "; "), "is it running?"))
		return &PeerLost{"DEADLINE_EXCEEDED", details}
	}
}

func (p *peer) notifyChanged() {
	close(p.changed)
	p.changed = make(chan struct{})
}

// -- the life of the connection ---------------------------------------------------------------------------------------

// run attaches, serves and reconnects, until leave is called or the bus ends this peer.
func (p *peer) run() {
	refusal := p.live()
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.refusal = refusal; refusal != nil {
		p.closeCalls("the bus refuses this peer: " + refusal.Error())
	}
	p.leaveLocked("this peer has left the bus")
	p.notifyChanged()
	close(p.ended)
	close(p.work)
}

func (p *peer) live() error {
	failures := 0     // attempts since the last steady session
	keyEnded := false // whether the session before ended because the bus no longer accepts its key
	for attempt := 0; ; attempt++ {
		bus, end, lived := p.options.Address, end{code: "UNAVAILABLE"}, time.Duration(-1)
		buses, err := p.lookUp()
		if err != nil {
			end.text = err.Error()
		} else {
			bus = buses[attempt%len(buses)]
			if end, lived, err = p.serve(bus); err != nil {
				return err
			}
		}
		again := lived < steady && (lived < 0 || keyEnded)
		keyEnded = end.code == "UNAUTHENTICATED"
		if slices.Contains(final, end.code) || keyEnded && again {
			return &RequestError{end.code, p.whyRefused(bus, end)}
		}
		if lived >= steady {
			failures = 0
		}
		pause, left := p.failed(bus, end, failures)
		if left {
			return nil
		}
		if lived < 0 && (attempt+1)%max(len(buses), 1) != 0 {
			continue // another bus may be there
		}
		select {
		case <-time.After(pause):
			failures++
		case <-p.leaving:
			return nil
		}
	}
}

// lookUp returns the buses of now, unless this peer leaves meanwhile.
func (p *peer) lookUp() ([]string, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if p.buses.hasNames {
		go func() {
			select {
			case <-p.leaving:
				cancel()
			case <-ctx.Done():
			}
		}()
	}
	return p.buses.lookUp(ctx)
}

// failed logs why an attempt failed, once. It returns how long to wait before another one, a random time whose upper end
// doubles, and whether this peer has left.
func (p *peer) failed(bus string, end end, failures int) (time.Duration, bool) {
	first, longest := 50*time.Millisecond, 800*time.Millisecond
	if end.code == "RESOURCE_EXHAUSTED" || end.code == "INTERNAL" {
		first, longest = 500*time.Millisecond, 10*time.Second
	}
	p.mutex.Lock()
	defer p.mutex.Unlock()
	text := fmt.Sprintf("not attached to %s (%s: %s): trying again, at least every %v", bus, end.code, end.text, longest)
	before, left := p.shown[bus], p.left != ""
	isKnown := before.why != "" && end.code == "UNAVAILABLE" || digits.ReplaceAllString(before.text, "") == digits.ReplaceAllString(text, "")
	if !isKnown && !left {
		p.shown[bus] = attempt{text: text}
		p.warn("%s", text)
	}
	if !p.explained && end.code == "UNAVAILABLE" {
		p.explained = true
		go p.explain(bus, p.credential)
	}
	return mathrand.N(min(longest, first<<min(failures, 10)) + 1), left
}

// explain logs why a bus that is there does not answer, if that can be found out.
func (p *peer) explain(bus string, credential map[string]string) {
	why, reached := whyUnanswered(bus, p.options.Credential, credential)
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.explained = reached; why != "" && p.attached == nil && p.left == "" {
		p.warn("%s", why)
		p.shown[bus] = attempt{p.shown[bus].text, why}
		p.notifyChanged()
	}
}

// whyRefused returns the text of a bus that refuses this peer, with its address and what to do.
func (p *peer) whyRefused(bus string, end end) string {
	text := end.text
	switch {
	case end.code == "UNIMPLEMENTED":
		text = "it is not a toolbus, check the address: " + text
	case end.code == "UNAUTHENTICATED" && p.options.Credential == "":
		text += " (no credential: name its file in TOOLBUS_CREDENTIAL)"
	case end.code == "UNAUTHENTICATED":
		text += " (the credential " + p.options.Credential + ")"
	}
	return fmt.Sprintf("the bus at %s refuses %s: %s", bus, p.source, text)
}

// serve runs one stream from its attach to its end; it returns its status, and how long the session was live. The error ends
// this peer.
func (p *peer) serve(bus string) (end, time.Duration, error) {
	connection, credential, why, err := renewed(bus, p.options.Credential, p.credential)
	if err != nil {
		return end{}, -1, err
	}
	defer connection.close()
	ctx, giveUp := context.WithCancelCause(context.Background())
	link := newLink(&p.mutex, connection, giveUp, p.options.MaxInFlight)
	p.mutex.Lock()
	if why != p.unusable && why != "" {
		p.warn("%s", why)
	}
	p.credential, p.unusable, p.link = credential, why, link
	p.declare(link)
	if p.left != "" {
		link.drain("leaving")
	}
	p.mutex.Unlock()
	go p.monitor(ctx, link)
	stream, err := connection.invoke(ctx)
	if err == nil {
		go write(stream, link)
	}
	for err == nil {
		message := new(pb.InvokeResponse)
		if err = stream.RecvMsg(message); err == nil {
			p.receive(message, link)
		}
	}
	end := endOf(err)
	if reason := context.Cause(ctx); reason != nil && end.code != "OK" {
		end.code, end.text = "UNAVAILABLE", reason.Error()
	}
	giveUp(nil)
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.link, p.attached = nil, nil
	p.lostTools(link)
	p.lostCalls(link, end.code == "OK" && link.drainReceived)
	link.stopLeaving()
	link.close()
	p.notifyChanged()
	return end, link.lived(), p.fatal
}

// write sends what the outbox holds, one message at a time, until the stream ends; then it half-closes.
func write(stream grpc.ClientStream, link *link) {
	for {
		link.mutex.Lock()
		message, over := link.take(), link.closed
		link.mutex.Unlock()
		if message != nil && stream.SendMsg(message) != nil {
			return // the reader gets the status
		} else if message == nil && over {
			_ = stream.CloseSend()
			return
		} else if message == nil {
			select {
			case <-link.ready:
				runtime.Gosched() // what others are about to add goes with it
			case <-stream.Context().Done():
				return
			}
		}
	}
}

// monitor gives up a stream on which the bus is silent.
func (p *peer) monitor(ctx context.Context, link *link) {
	for ; ctx.Err() == nil; time.Sleep(tick) {
		p.mutex.Lock()
		if limit, silent := link.silent(); silent {
			link.giveUp(fmt.Errorf("the bus has sent nothing for %v", limit))
		}
		p.mutex.Unlock()
	}
}

// declare puts an attach with the tools as they are now into the outbox.
func (p *peer) declare(link *link) {
	link.declared, link.subscribed = p.version, len(p.wanted)
	attach := &pb.Attach{
		ProtocolVersion: 1, Source: p.source, Instance: p.options.Instance, Token: p.options.Token,
		MaxInFlight: uint32(p.options.MaxInFlight), NotificationsAfter: p.newest,
		Qualified: p.role.qualified, Notices: p.role.notices, AllOrNone: p.role.allOrNone, Subscribe: p.wanted,
	}
	if link.pages = pagesOf(p.tools); len(link.pages) > 0 {
		attach.Tools, link.pages = link.pages[0], link.pages[1:]
	}
	link.unanswered = append(link.unanswered, link.declared)
	link.putMessage(fieldAttach, attach)
}

// declareAgain attaches again on the stream that there is.
func (p *peer) declareAgain() {
	if link := p.link; link != nil && link.attached != nil && !link.leaving() {
		p.declare(link)
	}
}

// pagesOf returns tools in as many lists as requests are needed for them.
func pagesOf(tools []*offered) [][]*pb.Tool {
	var pages [][]*pb.Tool
	room := 0
	for _, tool := range tools {
		size := proto.Size(tool.declaration)
		if room -= size; len(pages) == 0 || room < 0 {
			pages = append(pages, nil)
			room = attachBytes - size
		}
		last := &pages[len(pages)-1]
		*last = append(*last, tool.declaration)
	}
	return pages
}

// register offers the tools that did not fit into the attach.
func (p *peer) register(link *link, session string, pages [][]*pb.Tool, version int) {
	ctx, cancel := context.WithTimeout(context.Background(), longestTime)
	defer cancel()
	for i, tools := range pages {
		request := &pb.RegisterRequest{SessionId: session, Tools: tools, AllOrNone: p.role.allOrNone}
		response := new(pb.RegisterResponse)
		err := link.connection.unary(ctx, "Register", request, response)
		p.mutex.Lock()
		isCurrent := link == p.link && link.declared == version // otherwise a later attach declares them again
		if isCurrent && err != nil {
			p.warn("the bus refused tools that did not fit into one message: %v", err)
			if p.role.allOrNone && errors.As(err, new(*RequestError)) {
				p.fatal = err
			}
			link.giveUp(err)
		} else if isCurrent {
			p.noteTools(response.Refused, response.Waiting)
			if i == len(pages)-1 {
				p.answered = version
				p.notifyChanged()
			}
		}
		p.mutex.Unlock()
		if !isCurrent || err != nil {
			return
		}
	}
}

// toolsChanged attaches again if the tools have changed; changes that come together go into one attach.
func (p *peer) toolsChanged() {
	link := p.link
	if link == nil || link.attached == nil || link.declaring || link.declared == p.version {
		return
	}
	link.declaring = true
	time.AfterFunc(joinChanges, func() {
		p.mutex.Lock()
		defer p.mutex.Unlock()
		if link.declaring = false; link == p.link && link.declared != p.version {
			p.declareAgain()
		}
	})
}

// -- messages of the bus ----------------------------------------------------------------------------------------------

// receive handles a message. Then it starts the handlers of its calls and wakes the callers of its results: with the mutex
// all of them would wait for it.
func (p *peer) receive(message *pb.InvokeResponse, link *link) {
	p.mutex.Lock()
	p.handle(message, link)
	runs := slices.DeleteFunc(p.beginning, func(run *run) bool { return run.ended }) // cancelled by the same message
	woken := p.woken
	p.beginning, p.woken = nil, nil
	p.mutex.Unlock()
	p.startRuns(runs)
	for _, a := range woken {
		a.notify()
	}
}

// handle handles the fields of a message, in the order of the protocol.
func (p *peer) handle(message *pb.InvokeResponse, link *link) {
	link.look()
	link.heardAt = time.Now()
	if message.Attached != nil {
		p.onAttached(message.Attached, link)
	}
	for _, event := range message.Events {
		p.note(event)
	}
	p.beginCalls(message.Calls, link)
	p.onProgress(message.Progress, link)
	p.onResults(message.Results, link)
	for _, cancel := range message.Cancels {
		p.cancelRun(cancel.CallId, cancel.Reason, link)
	}
	if heartbeat := message.Heartbeat; heartbeat.GetFromPeer() {
		p.beginCalls(link.standstill.echoed(heartbeat.Sequence), link)
	} else if heartbeat != nil {
		link.putMessage(fieldHeartbeat, heartbeat)
	}
	if message.Drain != nil {
		p.onDrain(message.Drain.Reason, link)
	}
	link.whenIdle()
}

// onAttached takes the answer to an attach; the first one opens the session.
func (p *peer) onAttached(attached *pb.Attached, link *link) {
	isWhole := len(attached.Refused) > 0 && attached.RefusedTotal == 0 // the attach itself: everything stays as it was
	if isWhole {
		p.warn("the bus refused the tools: %s", attached.Refused[0].Error)
	} else {
		clear(p.refused)
		clear(p.waitingTools)
		p.noteTools(attached.Refused, attached.Waiting)
	}
	if len(link.unanswered) > 0 {
		version := link.unanswered[0]
		link.unanswered = link.unanswered[1:]
		if len(link.unanswered) == 0 && len(link.pages) > 0 && !isWhole {
			go p.register(link, attached.SessionId, link.pages, version)
		} else {
			p.answered = version
		}
	}
	if link.attached == nil {
		link.open(attached)
		clear(p.shown)
		p.explained = true
		if left := seconds(attached.ExpiresSeconds); left > 0 && left < expiryWarning {
			p.warn("the key of %s expires in %.1f hours: renew it", attached.Identity, left.Hours())
		}
		if !link.leaving() {
			p.attached = attached
			p.sendWaiting(link)
		}
	}
	p.subscribe()
	p.toolsChanged()
	p.notifyChanged()
}

func (p *peer) onDrain(reason string, link *link) {
	link.drainReceived = true
	p.attached = nil // new calls wait for the next stream
	if reason == "replaced" || reason == "requested" {
		p.warn("the bus ends this peer's session: %s", reason)
		p.leaveLocked("the bus ended this peer's session: " + reason)
	}
}

// note takes an event. Events for the author are logged as warnings; unknown kinds are ignored.
func (p *peer) note(event *pb.Event) {
	switch kind := event.Kind.(type) {
	case *pb.Event_Catalog:
		p.onCatalog(changeFromWire(kind.Catalog))
	case *pb.Event_Notification:
		p.newest = max(p.newest, kind.Notification.Number)
		p.notes.put(p, notificationFromWire(kind.Notification), func(items []Notification) []Notification {
			items[1].Lost += items[0].Lost + 1
			return items[1:]
		})
	case *pb.Event_ToolOverwritten:
		p.warn("the tool %q is not offered any more: the source %q took its name", kind.ToolOverwritten.Name, kind.ToolOverwritten.BySource)
	case *pb.Event_ToolRemoved:
		p.warn("the tool %q is not offered any more: another client withdrew it", kind.ToolRemoved.Name)
	case *pb.Event_PermissionDenied:
		p.warn("the bus refused %q: the permission %q is missing", kind.PermissionDenied.Operation, kind.PermissionDenied.Permission)
	case *pb.Event_PermissionChanged:
		change := kind.PermissionChanged
		p.warn("the permission %q was %s", change.Permission, map[bool]string{true: "granted", false: "revoked"}[change.Granted])
		if change.Permission == "tools" && change.Granted {
			p.declareAgain() // the bus withdrew the tools
		}
	case *pb.Event_ToolsReviewed:
		review := kind.ToolsReviewed
		names := slices.Clone(review.Registered)
		for _, tool := range review.Refused {
			names = append(names, tool.Name)
		}
		for _, tool := range review.Waiting {
			names = append(names, tool.Name)
		}
		maps.DeleteFunc(p.refused, func(key toolKey, _ RefusedTool) bool { return slices.Contains(names, key.name) })
		maps.DeleteFunc(p.waitingTools, func(key toolKey, _ bool) bool { return slices.Contains(names, key.name) })
		p.noteTools(review.Refused, review.Waiting)
	}
}

func (p *peer) onCatalog(change CatalogChange) {
	if change.Full {
		p.catalog, p.order = map[ToolRef]ListedTool{}, nil
	}
	for _, ref := range change.Removed {
		delete(p.catalog, ref)
	}
	if len(change.Removed) > 0 {
		p.order = slices.DeleteFunc(p.order, func(ref ToolRef) bool {
			_, isThere := p.catalog[ref]
			return !isThere
		})
	}
	for _, tool := range slices.Concat(change.Added, change.Changed) {
		ref := ToolRef{tool.Name, tool.Source}
		if _, known := p.catalog[ref]; !known {
			p.order = append(p.order, ref)
		}
		p.catalog[ref] = tool
	}
	p.revision = change.Revision
	p.catalogs.put(p, change, func([]CatalogChange) []CatalogChange { return []CatalogChange{p.wholeCatalog()} })
}

// wholeCatalog returns everything that the watch has brought, as one change.
func (p *peer) wholeCatalog() CatalogChange {
	whole := CatalogChange{Revision: p.revision, Full: true}
	for _, ref := range p.order {
		whole.Added = append(whole.Added, p.catalog[ref])
	}
	return whole
}

// noteTools stores which tools the bus refused and which wait for a role. It logs each reason once, not again after every
// reconnect.
func (p *peer) noteTools(refused []*pb.RefusedTool, waiting []*pb.WaitingTool) {
	isNew := func(role, text string) bool {
		known := p.noted[role+" "+text]
		if p.noted[role+" "+text] = true; !known {
			p.warn("%s", text)
		}
		return !known
	}
	for _, each := range refused {
		tool := RefusedTool{Name: each.Name, Error: each.Error, Role: each.GetRole()}
		p.refused[toolKey{tool.Role, tool.Name}] = tool
		if isNew(tool.Role, fmt.Sprintf("the bus does not offer the tool %q: %s", tool.Name, tool.Error)) && p.role.onRefused != nil {
			go p.role.onRefused(tool)
		}
	}
	for _, each := range waiting {
		p.waitingTools[toolKey{each.Role, each.Name}] = true
		isNew(each.Role, fmt.Sprintf("the tool %q waits for role %q, which the bus does not have", each.Name, each.Role))
	}
}

// warn has a warning logged: what takes it may use this peer, and wait for it, so neither this goroutine nor the mutex waits.
func (p *peer) warn(format string, values ...any) {
	if len(p.warnings) >= maxUnread {
		return // what takes them hangs
	}
	p.warnings = append(p.warnings, "toolbus: "+fmt.Sprintf(format, values...))
	if len(p.warnings) == 1 {
		go p.logWarnings()
	}
}

// logWarnings logs the warnings that there are; each stays among them until it is logged.
func (p *peer) logWarnings() {
	for left := true; left; {
		p.mutex.Lock()
		text := p.warnings[0]
		p.mutex.Unlock()
		p.options.Log.Warn(text)
		p.mutex.Lock()
		p.warnings = p.warnings[1:]
		left = len(p.warnings) > 0
		p.mutex.Unlock()
	}
}

// -- subscriptions ----------------------------------------------------------------------------------------------------

// feed has, for each reader of a subscription, the items that it has not taken yet; the mutex of the peer guards it.
type feed[T any] struct {
	kind    pb.Subscription
	readers map[*[]T]bool // nil before the first
}

// put passes an item on; shorten makes less of the items of a reader that is far behind.
func (f *feed[T]) put(p *peer, item T, shorten func([]T) []T) {
	for each := range f.readers {
		if *each = append(*each, item); len(*each) > maxUnread {
			*each = shorten(*each)
		}
	}
	p.notifyChanged()
}

// subscribe declares again where a feed was added after the attach.
func (p *peer) subscribe() {
	if p.link != nil && p.link.subscribed != len(p.wanted) {
		p.declareAgain()
	}
}

// read yields what comes to a feed from now on, after first, until the context is done or this peer ends.
func read[T any](ctx context.Context, p *peer, feed *feed[T], first func() []T) iter.Seq2[T, error] {
	return func(yield func(T, error) bool) {
		p.mutex.Lock()
		own := first()
		if feed.readers == nil {
			feed.readers = map[*[]T]bool{}
			p.wanted = append(p.wanted, feed.kind)
		}
		feed.readers[&own] = true
		p.subscribe()
		p.mutex.Unlock()
		defer func() {
			p.mutex.Lock()
			defer p.mutex.Unlock()
			delete(feed.readers, &own)
		}()
		var none T
		if err := p.begin(); err != nil { // after that: the first attach subscribes
			yield(none, err)
			return
		}
		for {
			var items []T
			err := p.until(ctx, func() bool {
				items, own = own, nil
				return len(items) > 0
			})
			if ctx.Err() != nil {
				err = context.Cause(ctx)
			}
			if err != nil {
				if !errors.As(err, new(*PeerLost)) { // the end of this peer is that of the feed
					yield(none, err)
				}
				return
			}
			for _, item := range items {
				if !yield(item, nil) {
					return
				}
			}
		}
	}
}
