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

	"toolbus/internal/pb"
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
	peers  []*peer    // one for each bus; none where the options have a mistake
	faults []error    // of the options, and of the tools that could not be added before the first start
	adding sync.Mutex // while a tool is added to all peers, or removed
}

// NewPlugin returns a plugin without tools; nil options have the defaults. An invalid source and a credential that cannot
// be used are errors of Run, Start and Ready.
func NewPlugin(source string, options *PluginOptions) *Plugin {
	if options == nil {
		options = &PluginOptions{}
	}
	role := role{options.Qualified, options.AllOrNone, options.Notices, options.OnRefused}
	own, buses, err := complete(source, options.Options)
	if err != nil {
		return &Plugin{faults: []error{err}}
	}
	plugin := &Plugin{}
	for _, bus := range buses {
		plugin.peers = append(plugin.peers, newPeer(source, own, []string{bus}, role))
	}
	return plugin
}

func (p *Plugin) add(tool Tool, in, out reflect.Type, handler func(context.Context, string) (any, error)) error {
	declaration, err := declared(tool, in, out)
	if len(p.peers) == 0 {
		return errors.Join(p.faults...)
	}
	p.adding.Lock()
	defer p.adding.Unlock()
	for _, each := range p.peers {
		each.mutex.Lock()
		place, begun := each.place(tool.Name), each.begun
		if err == nil && place >= 0 && !tool.Replace {
			err = setupErrorf("there already is a tool %q: set Replace, or rename one", tool.Name)
		}
		if err == nil {
			each.tools = slices.Clone(each.tools) // calls that are looked up have the list before
			if added := (&offered{declaration, handler}); place >= 0 {
				each.tools[place] = added
			} else {
				each.tools = append(each.tools, added)
			}
			each.version++
			each.toolsChanged()
		}
		each.mutex.Unlock()
		if err != nil {
			if !begun {
				p.faults = append(p.faults, err)
			}
			return err
		}
	}
	return nil
}

func (p *peer) place(name string) int {
	return slices.IndexFunc(p.tools, func(each *offered) bool { return each.declaration.Name == name })
}

// RemoveTool withdraws a tool; its calls in flight are finished. It returns whether there was one.
func (p *Plugin) RemoveTool(name string) bool {
	p.adding.Lock()
	defer p.adding.Unlock()
	removed := false
	for _, each := range p.peers {
		each.mutex.Lock()
		if place := each.place(name); place >= 0 {
			each.tools = slices.Delete(slices.Clone(each.tools), place, place+1)
			each.version++
			each.toolsChanged()
			removed = true
		}
		each.mutex.Unlock()
	}
	return removed
}

// Refused returns the tools that the bus refused, each with its reason.
func (p *Plugin) Refused() []RefusedTool {
	var tools []RefusedTool
	for _, each := range p.peers {
		each.mutex.Lock()
		tools = slices.AppendSeq(tools, maps.Values(each.refused))
		each.mutex.Unlock()
	}
	return tools
}

// Waiting returns the tools that wait for a role.
func (p *Plugin) Waiting() []WaitingTool {
	var tools []WaitingTool
	for _, each := range p.peers {
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
	for _, each := range p.peers {
		select {
		case <-ctx.Done():
			stop() // a second signal ends the program
			return p.leave(context.Background(), "stopped")
		case <-each.ended:
		}
	}
	return p.refusal()
}

// refusal returns why a bus refused this plugin; nil if none did.
func (p *Plugin) refusal() error {
	for _, each := range p.peers {
		if each.refusal != nil {
			return each.refusal
		}
	}
	return nil
}

// Start connects in the background. The error is a [*SetupError].
func (p *Plugin) Start() error {
	if err := errors.Join(p.faults...); err != nil {
		return err
	}
	for _, each := range p.peers {
		each.begin()
	}
	return nil
}

// Ready connects, and waits until a bus has answered for all tools. The error is a [*RequestError] if each refuses this
// plugin, a [*PeerLost] if no bus answers before the deadline of the context, or a [*SetupError].
func (p *Plugin) Ready(ctx context.Context) error {
	if err := p.Start(); err != nil {
		return err
	}
	waiting, stop := context.WithCancel(ctx)
	defer stop()
	answers := make(chan error, len(p.peers))
	for _, each := range p.peers {
		go func() {
			answers <- each.until(waiting, func() bool { return each.attached != nil && each.answered == each.version })
		}()
	}
	var err error
	for range p.peers {
		if err = <-answers; err == nil {
			return nil
		}
	}
	return err
}

// Close leaves gracefully: it withdraws the tools, finishes the calls in flight and disconnects. When the context is done,
// and after 30 s, it gives these calls up. The error is the bus's, if it refused this plugin.
func (p *Plugin) Close(ctx context.Context) error { return p.leave(ctx, "closed") }

func (p *Plugin) leave(ctx context.Context, reason string) error {
	ctx, cancel := context.WithTimeout(ctx, graceTime)
	defer cancel()
	for _, each := range p.peers {
		each.leave(reason)
	}
	for _, each := range p.peers {
		each.wait(ctx)
	}
	return p.refusal()
}

// Call calls any tool of the first bus that is connected, outside of a call; in a handler use [ToolScope.Call]. It is as [Host.Call].
func (p *Plugin) Call(ctx context.Context, name string, arguments any, options *CallOptions) (*Result, error) {
	if err := p.Start(); err != nil {
		return nil, err
	}
	for _, each := range p.peers {
		each.mutex.Lock()
		connected := each.attached != nil
		each.mutex.Unlock()
		if connected {
			return each.callTool(ctx, name, arguments, options)
		}
	}
	return p.peers[0].callTool(ctx, name, arguments, options)
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
	var result *Result
	var err error
	if scope := ScopeOf(ctx); scope.peer != nil && slices.Contains(p.peers, scope.peer) {
		result, err = scope.Call(ctx, "host:generate", request, nil)
	} else {
		result, err = p.Call(ctx, "host:generate", request, nil)
	}
	if err != nil {
		return nil, err
	}
	answer := new(Generation)
	return answer, result.Unwrap(answer)
}

// callTool makes a call that is not part of another one.
func (p *peer) callTool(ctx context.Context, name string, arguments any, options *CallOptions) (*Result, error) {
	fields, err := callFields(name, arguments, options)
	if err != nil {
		return nil, err
	}
	var result *pb.ToolResult
	if result, err = p.call(ctx, fields, nil, options.onProgress()); err != nil {
		return nil, err
	}
	return resultFromWire(result), nil
}
