// Package toolbus offers tools to a toolbus and calls them: a [Plugin] offers, a [Host] lists and calls. Both connect by
// themselves, and reconnect until they are closed. docs/start/go.md of the project shows them at work.
package toolbus

import (
	"context"
	"encoding/json"
	"errors"
	"maps"
	"os/signal"
	"reflect"
	"slices"
	"sync"
	"syscall"
	"time"
)

// Version is that of this package and of the bus that it was made for.
const Version = "0.1.0"

const graceTime = 30 * time.Second // for calls in flight, when a plugin leaves

// PluginOptions are what a plugin can state.
type PluginOptions struct {
	Options
	// Qualified lists the tools as source:name, so that they never collide with another plugin's.
	Qualified bool
	// Notices are texts for operators, which `toolbus list` shows.
	Notices []string
	// AllOrNone offers none of the tools if the bus refuses one of them.
	AllOrNone bool
	// OnRefused is called once for each reason why the bus refuses a tool, in a goroutine of its own.
	OnRefused func(RefusedTool)
}

// Plugin offers tools under a source, at every bus of its address.
type Plugin struct {
	source    string
	options   Options
	role      role
	leaving   chan struct{} // closed when this plugin is to leave
	mutex     sync.Mutex    // guards all that follows
	addresses *addresses    // nil where the options have a mistake
	peers     []*peer       // one for each bus
	changed   chan struct{} // closed, and replaced, when there are other peers
	tools     []*offered    // in the order in which they were added
	version   int           // of the tools; rises with every change
	unknown   string        // why no bus of a name is known
	faults    []error       // of the options, and of the tools that could not be added before the start
	begun     bool
	left      bool
}

// NewPlugin returns a plugin without tools; nil options have the defaults. An invalid source and a credential that cannot
// be used are errors of Run, Start and Ready.
func NewPlugin(source string, options *PluginOptions) *Plugin {
	given := or(options)
	plugin := &Plugin{
		source: source, leaving: make(chan struct{}), changed: make(chan struct{}), unknown: "DNS has not answered yet",
		role: role{given.Qualified, given.AllOrNone, given.Notices, given.OnRefused},
	}
	own, addresses, err := complete(source, given.Options)
	if err != nil {
		plugin.faults = []error{err}
		return plugin
	}
	plugin.options, plugin.addresses = own, addresses
	plugin.attach(addresses.known)
	return plugin
}

// attach has a peer for each bus, and lets those for others leave.
func (p *Plugin) attach(buses []string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.left {
		return
	}
	gone, peers := slices.Clone(p.peers), []*peer{}
	for _, bus := range buses {
		if i := slices.IndexFunc(gone, func(each *peer) bool { return each.buses.text == bus }); i >= 0 {
			peers, gone = append(peers, gone[i]), slices.Delete(gone, i, i+1)
			continue
		}
		added := newPeer(p.source, p.options, &addresses{text: bus, known: []string{bus}}, p.role)
		added.tools, added.version = p.tools, p.version
		if peers = append(peers, added); p.begun {
			_ = added.begin()
		}
	}
	if len(gone) == 0 && len(peers) == len(p.peers) {
		return
	}
	p.peers = peers
	close(p.changed)
	p.changed = make(chan struct{})
	for _, each := range gone {
		each.leave("DNS does not name this bus any more")
	}
}

// follow attaches to the buses that DNS has for names, as long as the plugin lives.
func (p *Plugin) follow() {
	for shown := ""; ; {
		buses, err := p.addresses.lookUp(context.Background())
		if err == nil {
			p.attach(buses)
		} else if text := err.Error(); text != shown {
			shown = text
			p.mutex.Lock()
			p.unknown = text
			p.mutex.Unlock()
			go p.options.Log.Warn("toolbus: " + text) // what takes it may wait for this plugin
		}
		select {
		case <-time.After(lookUpTime):
		case <-p.leaving:
			return
		}
	}
}

// now returns the peers of now, what is closed when there are others, and why there are none.
func (p *Plugin) now() ([]*peer, <-chan struct{}, string) {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	return p.peers, p.changed, p.unknown
}

// ofAll waits for what is asked of all peers, again whenever there are others; without any it waits for those, until this
// plugin leaves.
func (p *Plugin) ofAll(ctx context.Context, ask func(context.Context, []*peer) error) error {
	for {
		peers, changed, unknown := p.now()
		asking, stop := context.WithCancel(ctx)
		answer := make(chan error, 1)
		if len(peers) > 0 {
			go func() { answer <- ask(asking, peers) }()
		} else {
			go func() {
				select {
				case <-p.leaving:
					answer <- &PeerLost{"UNAVAILABLE", "this peer has left the bus"}
				case <-asking.Done():
					answer <- &PeerLost{"DEADLINE_EXCEEDED", "no bus answered in time: " + unknown}
				}
			}()
		}
		select {
		case err := <-answer:
			stop()
			if errors.Is(ctx.Err(), context.Canceled) {
				err = context.Cause(ctx)
			}
			return err
		case <-changed:
			stop()
		}
	}
}

func (p *Plugin) add(tool Tool, in, out reflect.Type, handler func(context.Context, string) (any, error)) error {
	declaration, err := declared(tool, in, out)
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if p.addresses == nil {
		return errors.Join(p.faults...)
	}
	place := p.place(tool.Name)
	if err == nil && place >= 0 && !tool.Replace {
		err = setupErrorf("there already is a tool %q: set Replace, or rename one", tool.Name)
	}
	if err != nil {
		if !p.begun {
			p.faults = append(p.faults, err)
		}
		return err
	}
	tools := slices.Clone(p.tools) // calls that are looked up have the list before
	if added := (&offered{declaration, handler}); place >= 0 {
		tools[place] = added
	} else {
		tools = append(tools, added)
	}
	p.offer(tools)
	return nil
}

func (p *Plugin) place(name string) int {
	return slices.IndexFunc(p.tools, func(each *offered) bool { return each.declaration.Name == name })
}

// offer has every peer offer these tools from now on.
func (p *Plugin) offer(tools []*offered) {
	p.version++
	p.tools = tools
	for _, each := range p.peers {
		each.mutex.Lock()
		each.tools, each.version = p.tools, p.version
		each.toolsChanged()
		each.mutex.Unlock()
	}
}

// RemoveTool withdraws a tool; its calls in flight are finished. It returns whether there was one.
func (p *Plugin) RemoveTool(name string) bool {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	place := p.place(name)
	if place >= 0 {
		p.offer(slices.Delete(slices.Clone(p.tools), place, place+1))
	}
	return place >= 0
}

// Refused returns the tools that the bus refused, each with its reason.
func (p *Plugin) Refused() []RefusedTool {
	var tools []RefusedTool
	peers, _, _ := p.now()
	for _, each := range peers {
		each.mutex.Lock()
		tools = slices.AppendSeq(tools, maps.Values(each.refused))
		each.mutex.Unlock()
	}
	return tools
}

// Waiting returns the tools that wait for a role.
func (p *Plugin) Waiting() []WaitingTool {
	var tools []WaitingTool
	peers, _, _ := p.now()
	for _, each := range peers {
		each.mutex.Lock()
		for key := range each.waitingTools {
			tools = append(tools, WaitingTool{key.name, key.role})
		}
		each.mutex.Unlock()
	}
	return tools
}

// Run connects and serves until the context is done, or SIGINT or SIGTERM comes, or each bus has sent this plugin away; then
// it finishes its calls, within 30 s. It returns nil after that, a [*RequestError] with the bus's text if a bus refuses this
// plugin, and a [*SetupError].
func (p *Plugin) Run(ctx context.Context) error {
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if err := p.Start(); err != nil {
		return err
	}
	err := p.ofAll(ctx, func(ctx context.Context, peers []*peer) error {
		for _, each := range peers {
			select {
			case <-each.ended:
			case <-ctx.Done():
				return nil
			}
		}
		return refusalOf(peers)
	})
	if ctx.Err() != nil {
		stop() // a second signal ends the program
		return p.leave(context.Background(), "stopped")
	}
	if errors.As(err, new(*PeerLost)) {
		return nil // it has left before DNS has answered
	}
	return err
}

// refusalOf returns why a bus refused a plugin; nil if none did.
func refusalOf(peers []*peer) error {
	for _, each := range peers {
		if each.refusal != nil {
			return each.refusal
		}
	}
	return nil
}

// Start connects in the background. The error is a [*SetupError].
func (p *Plugin) Start() error {
	p.mutex.Lock()
	defer p.mutex.Unlock()
	if err := errors.Join(p.faults...); err != nil {
		return err
	}
	if !p.begun && p.addresses.hasNames {
		go p.follow()
	}
	p.begun = true
	for _, each := range p.peers {
		_ = each.begin()
	}
	return nil
}

// Ready connects, and waits until a bus has answered for all tools. The error is a [*RequestError] if each refuses this
// plugin, a [*PeerLost] if no bus answers before the deadline of the context, or a [*SetupError].
func (p *Plugin) Ready(ctx context.Context) error {
	if err := p.Start(); err != nil {
		return err
	}
	return p.ofAll(ctx, func(ctx context.Context, peers []*peer) (err error) {
		answers := make(chan error, len(peers))
		for _, each := range peers {
			go func() {
				answers <- each.until(ctx, func() bool { return each.attached != nil && each.answered == each.version })
			}()
		}
		for range peers {
			if err = <-answers; err == nil {
				return nil
			}
		}
		return err
	})
}

// Close leaves gracefully: it withdraws the tools, finishes the calls in flight and disconnects. When the context is done,
// and after 30 s, it gives these calls up. The error is the bus's, if it refused this plugin.
func (p *Plugin) Close(ctx context.Context) error { return p.leave(ctx, "closed") }

func (p *Plugin) leave(ctx context.Context, reason string) error {
	ctx, cancel := context.WithTimeout(ctx, graceTime)
	defer cancel()
	p.mutex.Lock()
	if !p.left {
		p.left = true
		close(p.leaving)
	}
	p.mutex.Unlock()
	peers, _, _ := p.now()
	for _, each := range peers {
		each.leave(reason)
	}
	for _, each := range peers {
		each.wait(ctx)
	}
	return refusalOf(peers)
}

// Call calls any tool of the first bus that is connected, outside of a call; in a handler use [ToolScope.Call]. It is as [Host.Call].
func (p *Plugin) Call(ctx context.Context, name string, arguments any, options *CallOptions) (*Result, error) {
	if err := p.Start(); err != nil {
		return nil, err
	}
	peers, _, unknown := p.now()
	if len(peers) == 0 {
		return nil, &PeerLost{"UNAVAILABLE", unknown + ": wait for Ready"}
	}
	first := slices.IndexFunc(peers, func(each *peer) bool {
		each.mutex.Lock()
		defer each.mutex.Unlock()
		return each.attached != nil
	})
	return peers[max(first, 0)].callTool(ctx, name, arguments, or(options), nil)
}

// Notify tells a user ("" means all) something outside a call: a text, and any JSON for programs. It returns how many hosts
// got it.
func (p *Plugin) Notify(ctx context.Context, user, text string, data any) (int, error) {
	result, err := p.Call(ctx, "toolbus:notify", map[string]any{"user": user, "text": text, "data": data}, nil)
	if err != nil {
		return 0, err
	}
	var output struct{ Hosts int }
	err = result.Unwrap(&output)
	return output.Hosts, err
}

// Message is a message of a conversation with a model.
type Message struct {
	Role    string `json:"role"` // "system", "user" or "assistant"
	Content string `json:"content"`
}

// GenerationRequest is what a plugin asks of the model that a host lends; what is left out is the host's own.
type GenerationRequest struct {
	Messages    []Message `json:"messages"`
	Mode        string    `json:"mode,omitempty"` // "quiet", with the host's own instructions, or "raw": these messages alone
	MaxTokens   int       `json:"max_tokens,omitempty"`
	Temperature *float64  `json:"temperature,omitempty"`
	Stop        []string  `json:"stop,omitempty"`
	Model       string    `json:"model,omitempty"`
}

// Generation is the answer of a lent model.
type Generation struct {
	Text       string                 `json:"text"`
	Model      string                 `json:"model"`
	StopReason string                 `json:"stop_reason"`
	Usage      map[string]json.Number `json:"usage"`
}

// Generate asks the model that a host lends; the source needs the permission "generation". In a handler, with its context,
// the request is part of the call.
func (p *Plugin) Generate(ctx context.Context, request GenerationRequest) (*Generation, error) {
	call, scope := p.Call, ScopeOf(ctx)
	if peers, _, _ := p.now(); slices.Contains(peers, scope.peer) {
		call = scope.Call
	}
	result, err := call(ctx, "host:generate", request, nil)
	if err != nil {
		return nil, err
	}
	answer := new(Generation)
	return answer, result.Unwrap(answer)
}
