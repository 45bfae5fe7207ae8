package toolbus

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"sync"
	"time"

	"toolbus/internal/pb"
)

const (
	listTime  = 10 * time.Second
	closeTime = 5 * time.Second
	retryTime = 50 * time.Millisecond // between two attempts at a listing
	rounds    = 10                    // of questions of one call
)

// HostOptions are what a host can state.
type HostOptions struct {
	Options
	// Source names this host in records of calls; "host" by default.
	Source string
}

// CallOptions are what a call can state beside the tool and its arguments.
type CallOptions struct {
	// Timeout is that of the call; by default the deadline of the context, then the tool's own. More than 300 s count as 300.
	Timeout time.Duration
	// Role considers only the tools of this role.
	Role string
	// Context says who the call is for; a model cannot set it.
	Context *CallContext
	// SchemaHash is that of the declaration that the caller knows; the call is refused once the tool has changed.
	SchemaHash string
	// BackgroundAfter is the time after which the call becomes a task; the result then has its task_id. The deadline of the
	// context then does not limit the work, and cancels the call if it comes first.
	BackgroundAfter time.Duration
	// OnProgress takes progress, chunks and content, in the goroutine of the call, before its result is returned.
	OnProgress func(Progress)
	// OnInput answers the questions of a tool; the call is made again with the answers, 10 times at most.
	OnInput OnInput
	// Inputs are the kinds of questions that this call accepts, and its answers; by default forms if there is OnInput.
	Inputs *Inputs
}

// Inputs are the kinds of questions that a call accepts, and the answers to those of the call before.
type Inputs struct {
	Accepts []string // of "elicitation.form" (the default), "elicitation.url", "sampling" and "roots"
	Answers map[string]any
	State   string
}

// AskedQuestion is a question of a tool, with what a form needs.
type AskedQuestion struct {
	Question
	Key     string
	Message string
	Schema  map[string]any // JSON Schema of the form
	URL     string
}

// OnInput returns an [Answer], the fields of a form (accepted), or nil (no choice was made); for other methods than
// "elicitation/create" what that method returns. An error ends the call.
type OnInput func(ctx context.Context, question AskedQuestion) (any, error)

// ListOptions are what a listing can state.
type ListOptions struct {
	Role   string
	Names  []string
	Source string
	// IncludeOffline adds tools that no call can reach: their plugin is offline, or their role does not exist.
	IncludeOffline bool
	// IncludeRefused adds the declarations that the bus refused, as Refused.
	IncludeRefused bool
	// IfRevision is the revision that the caller knows; the listing is empty and Unchanged if it is still the newest.
	IfRevision uint64
	Context    *CallContext
}

// Listing has tools in the order in which their names were first registered.
type Listing struct {
	Tools     []ListedTool
	Revision  uint64
	Unchanged bool
	Refused   []RefusedTool
	Notices   []Notice
}

// Notice is a text of a source for operators.
type Notice struct{ Source, Text string }

// Host lists tools and calls them. It connects when it is first used. Use one host for a whole program: its calls share one
// connection. All methods may be used by several goroutines.
type Host struct {
	peer   *peer
	mutex  sync.Mutex
	lender *Plugin // offers the model of this host; nil unless it lends one
}

// NewHost returns a host; nil options have the defaults. An invalid source and a credential that cannot be used are errors
// of all its methods.
func NewHost(options *HostOptions) *Host {
	given := or(options)
	source := cmp.Or(given.Source, "host")
	own, buses, err := complete(source, given.Options)
	host := &Host{peer: newPeer(source, own, buses, role{})}
	host.peer.fault = err
	return host
}

// or returns options; nil ones have the defaults.
func or[T any](options *T) T {
	if options == nil {
		return *new(T)
	}
	return *options
}

// Ready waits until a bus has accepted this host. The error is a [*RequestError], a [*PeerLost] at the deadline of the
// context, or a [*SetupError].
func (h *Host) Ready(ctx context.Context) error {
	if err := h.peer.begin(); err != nil {
		return err
	}
	return h.peer.until(ctx, func() bool { return h.peer.attached != nil })
}

// Identity returns whom the bus takes this host for; empty on its own machine, and while it is not connected.
func (h *Host) Identity() string {
	h.peer.mutex.Lock()
	defer h.peer.mutex.Unlock()
	return h.peer.attached.GetIdentity()
}

// Call calls a tool. A failed call is a result with an Error. Without a connection the call waits for one, and it is sent
// again where that is safe, both within its time: Timeout, or else the deadline of the context, or else the tool's own. The
// bus measures it, and the result says that it is over.
//
// Arguments are a value that JSON can hold; text, bytes and json.RawMessage are JSON already and are passed on unchanged.
// The error is that of the context when it is cancelled, which reaches the handler of the tool, or a mistake: arguments that
// JSON cannot hold, a [*SetupError].
func (h *Host) Call(ctx context.Context, name string, arguments any, options *CallOptions) (*Result, error) {
	once := or(options)
	if once.OnInput == nil {
		return h.peer.callTool(ctx, name, arguments, once, nil)
	}
	inputs := or(once.Inputs)
	for range rounds {
		once.Inputs = &inputs
		result, err := h.peer.callTool(ctx, name, arguments, once, nil)
		if err != nil || !result.Asks() {
			return result, err
		}
		answers, err := answersOf(ctx, result.InputRequestsJSON, once.OnInput)
		if err != nil {
			return nil, err
		}
		inputs = Inputs{Accepts: inputs.Accepts, Answers: answers, State: result.RequestState}
	}
	text := fmt.Sprintf("the tool has asked %d times, which is the limit of this client", rounds)
	return failure(CodeTool, StageAccepted, text, "needs_input"), nil
}

func answersOf(ctx context.Context, questions string, onInput OnInput) (map[string]any, error) {
	var asked map[string]Question
	if err := decodeJSON(questions, &asked); err != nil {
		return nil, fmt.Errorf("the questions of the tool are not JSON: %w", err)
	}
	answers := map[string]any{}
	for key, question := range asked {
		full := AskedQuestion{Question: question, Key: key}
		full.Message, _ = question.Params["message"].(string)
		full.Schema, _ = question.Params["requestedSchema"].(map[string]any)
		full.URL, _ = question.Params["url"].(string)
		given, err := onInput(ctx, full)
		if err != nil {
			return nil, err
		}
		switch given.(type) {
		case nil:
			given = Answer{Action: "cancel"}
		case Answer, *Answer:
		default:
			if question.Method == "elicitation/create" {
				given = map[string]any{"action": "accept", "content": given}
			}
		}
		answers[key] = given
	}
	return answers, nil
}

// callFields returns a call as the protocol has it.
func callFields(name string, arguments any, options CallOptions) (*pb.ToolCall, error) {
	text, err := argumentsJSON(arguments)
	if err != nil {
		return nil, fmt.Errorf("the arguments of %s cannot be written as JSON: %w", name, err)
	}
	if time := min(options.Timeout, options.BackgroundAfter); time < 0 {
		return nil, setupErrorf("a call's time is %v, it must be above 0: leave it out for the tool's own", time)
	}
	fields := &pb.ToolCall{
		Name: name, ArgumentsJson: text, SchemaHash: options.SchemaHash, Role: orUnset(options.Role), Context: contextToWire(options.Context),
		TimeoutSeconds: options.Timeout.Seconds(), BackgroundAfterSeconds: options.BackgroundAfter.Seconds(),
	}
	if inputs := options.Inputs; inputs != nil {
		fields.Context = cmp.Or(fields.Context, &pb.CallContext{})
		if fields.Accepts = inputs.Accepts; inputs.Accepts == nil {
			fields.Accepts = []string{"elicitation.form"}
		}
		fields.RequestState = inputs.State
		if inputs.Answers != nil {
			if fields.InputResponsesJson, err = toJSON(inputs.Answers); err != nil {
				return nil, fmt.Errorf("the answers to %s cannot be written as JSON: %w", name, err)
			}
		}
	}
	return fields, nil
}

func orUnset(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// List lists the tools that this host can call; nil options list all. Without a deadline of the context it waits 10 s for a
// bus. The error is a [*RequestError], for a role that does not exist, or a [*PeerLost].
func (h *Host) List(ctx context.Context, options *ListOptions) (*Listing, error) {
	if _, has := ctx.Deadline(); !has {
		timed, cancel := context.WithTimeout(ctx, listTime)
		defer cancel()
		ctx = timed
	}
	for {
		if err := h.Ready(ctx); err != nil {
			return nil, err
		}
		h.peer.mutex.Lock()
		link := h.peer.link
		h.peer.mutex.Unlock()
		if link == nil {
			continue
		}
		listing, err := listed(ctx, link.connection, or(options))
		isClosed := func(lost *PeerLost) bool { return lost.Code == "CANCELLED" && ctx.Err() == nil } // the connection, since
		if lost := new(PeerLost); !errors.As(err, &lost) || lost.Code != "UNAVAILABLE" && !isClosed(lost) {
			return listing, err
		}
		select { // perhaps the end of the stream comes next
		case <-time.After(retryTime):
		case <-ctx.Done():
			return nil, err
		}
	}
}

func listed(ctx context.Context, connection *connection, options ListOptions) (*Listing, error) {
	request := &pb.ListRequest{
		Names: options.Names, Source: options.Source, Context: contextToWire(options.Context), IfRevision: options.IfRevision,
		IncludeOffline: options.IncludeOffline, IncludeRefused: options.IncludeRefused, Role: orUnset(options.Role),
	}
	listing := &Listing{}
	for {
		page := new(pb.ListResponse)
		if err := connection.unary(ctx, "List", request, page); err != nil {
			return nil, err
		}
		listing.Tools = append(listing.Tools, listedFromWire(page.Tools)...)
		listing.Revision = page.Revision
		if request.PageToken == "" {
			for _, each := range page.Refused {
				listing.Refused = append(listing.Refused, RefusedTool{each.Name, each.Error, each.GetRole(), each.Source})
			}
			for _, each := range page.Notices {
				listing.Notices = append(listing.Notices, Notice{each.Source, each.Text})
			}
		}
		if request.PageToken = page.NextPageToken; request.PageToken == "" {
			listing.Unchanged = options.IfRevision > 0 && options.IfRevision == listing.Revision
			return listing, nil
		}
	}
}

// Watch yields the whole catalog, then its changes; after a reconnect the whole catalog again. It ends with the error of the
// context, or a [*RequestError] if the bus refuses this host.
func (h *Host) Watch(ctx context.Context) iter.Seq2[CatalogChange, error] {
	return read(ctx, h.peer, &h.peer.catalogs, func() []CatalogChange {
		if h.peer.revision == 0 {
			return nil
		}
		return []CatalogChange{h.peer.wholeCatalog()}
	})
}

// Notifications yields the notifications of plugins to users; after a reconnect also those that it missed. It ends as
// [Host.Watch].
func (h *Host) Notifications(ctx context.Context) iter.Seq2[Notification, error] {
	return read(ctx, h.peer, &h.peer.notes, func() []Notification { return nil })
}

// LendOptions limit what plugins get of a lent model.
type LendOptions struct {
	MaxTokens   int           // of one answer; 1024 by default
	Timeout     time.Duration // of one request; 60 s by default
	MaxInFlight int           // requests at once; 4 by default
}

// Lend lends the model of this host to plugins with the permission "generation", until the host is closed. An error of the
// function is that of the request. The error of Lend is a [*SetupError].
func (h *Host) Lend(generate func(context.Context, GenerationRequest) (*Generation, error), options *LendOptions) error {
	if h.peer.fault != nil {
		return h.peer.fault
	}
	given := or(options)
	maxTokens := cmp.Or(given.MaxTokens, 1024)
	h.mutex.Lock()
	defer h.mutex.Unlock()
	if h.lender != nil {
		return setupErrorf("this host lends its model already: make a host for each model")
	}
	own := h.peer.options
	own.MaxInFlight, own.Instance = cmp.Or(given.MaxInFlight, 4), ""
	h.lender = NewPlugin("host", &PluginOptions{Options: own, Qualified: true})
	tool := Tool{
		Name: "generate", Description: "Asks the language model of this host.", Timeout: cmp.Or(given.Timeout, time.Minute),
		Parameters: json.RawMessage(fmt.Sprintf(generationSchema, maxTokens)),
	}
	err := AddTool(h.lender, tool, func(ctx context.Context, request GenerationRequest) (*Generation, error) {
		request.Mode, request.MaxTokens = cmp.Or(request.Mode, "quiet"), cmp.Or(request.MaxTokens, maxTokens)
		answer, err := generate(ctx, request)
		if err == nil && answer.Usage == nil {
			answer.Usage = map[string]json.Number{}
		}
		return answer, err
	})
	return cmp.Or(err, h.lender.Start())
}

const generationSchema = `{"type":"object","properties":{"messages":{"type":"array","items":{"type":"object","properties":{"role":` +
	`{"enum":["system","user","assistant"]},"content":{"type":"string"}},"required":["role","content"]},"minItems":1,"maxItems":256},` +
	`"mode":{"enum":["quiet","raw"]},"max_tokens":{"type":"integer","minimum":1,"maximum":%d},"temperature":{"type":"number",` +
	`"minimum":0,"maximum":2},"stop":{"type":"array","items":{"type":"string"},"maxItems":16},"model":{"type":"string"}},` +
	`"required":["messages"],"additionalProperties":false}`

// Drain waits for the calls in flight, until the context is done or 5 s have passed, then closes the host.
func (h *Host) Drain(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, closeTime)
	defer cancel()
	for busy := true; busy && ctx.Err() == nil; time.Sleep(10 * time.Millisecond) {
		h.peer.mutex.Lock()
		busy = len(h.peer.unfinished) > 0
		h.peer.mutex.Unlock()
	}
	h.Close()
}

// Close disconnects, within 5 s; calls in flight end in CANCELLED.
func (h *Host) Close() {
	h.mutex.Lock()
	lender := h.lender
	h.mutex.Unlock()
	if lender != nil {
		ended, cancel := context.WithCancel(context.Background())
		cancel()
		_ = lender.Close(ended)
	}
	h.peer.cancelAll("this host has left the bus")
	h.peer.leave("closed")
	ctx, cancel := context.WithTimeout(context.Background(), closeTime)
	defer cancel()
	h.peer.wait(ctx)
}
