package toolbus

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"maps"
	"reflect"
	"regexp"
	"runtime/debug"
	"slices"
	"strings"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	"toolbus/internal/pb"
)

const (
	errorBytes  = 16_384 // of the text of an error
	idleWorkers = 64     // goroutines that wait for calls
)

var errCallEnded = errors.New("the call has ended")

var rawJSON = reflect.TypeFor[json.RawMessage]()

var toolName = regexp.MustCompile(`^[A-Za-z0-9_.-]{1,64}$`)

// Tool is what a tool declares; the page "Plugins" of the documentation explains each field.
type Tool struct {
	Name string
	// Description tells models what the tool does and when to use it.
	Description string
	// Parameters is the JSON Schema of the arguments, as a map, a struct, or JSON as text or bytes; by default it is made of
	// the type that the handler takes.
	Parameters any
	// Timeout is how long a call may take; 30 s by default, at most 300 s.
	Timeout time.Duration
	// IdleTimeout ends a call after so long without progress or result.
	IdleTimeout time.Duration
	Role        string
	MinLevel    int
	// ReadOnly, Idempotent, Destructive and OpenWorld are promises; nil promises nothing. [Yes] and [No] fill them.
	ReadOnly, Idempotent, Destructive, OpenWorld *bool
	// Validate is No for a tool whose arguments the bus does not check.
	Validate                         *bool
	NoRepair, NoDefaults             bool
	DisplayName                      string
	Metadata                         any // any JSON object for hosts
	NoBackground, AlwaysBackground   bool
	AllowRepeat, DirectReply         bool
	CouncilEligible, InlineAvailable bool
	OutputSchema                     any // JSON Schema of the output; true stands for that of the type that the handler returns
	ValidateOutput                   bool
	Needs                            []string // what its caller must be able to answer, such as "elicitation.form"
	// Replace takes the place of the plugin's tool of that name; otherwise a second one is an error.
	Replace bool
}

var yes, no = true, false

// Yes and No are values for the fields of [Tool] that may also be unset.
var Yes, No = &yes, &no

// Reply is an output with parts beside it, which a handler returns in place of the output alone.
type Reply struct {
	Output  any
	Content []Content
	IsError bool // a failure that the model should read; Output and Content say which
}

// InputNeeded ends a run of a handler with questions: return it. The handler runs again with the answers.
type InputNeeded struct {
	Questions map[string]Question
	state     string
}

func (e *InputNeeded) Error() string {
	keys := slices.Sorted(maps.Keys(e.Questions))
	return "the function asks " + strings.Join(keys, ", ") + " and runs again with the answers: return this error"
}

// refusal is an error that stands for a result.
type refusal struct{ result *pb.ToolResult }

func (e *refusal) Error() string { return e.result.Error.Message }

// offered is a tool of this peer.
type offered struct {
	declaration *pb.Tool
	handler     func(ctx context.Context, arguments string) (any, error)
}

// AddTool offers a tool, also while the plugin is connected. The arguments are decoded into In, a struct, a map or
// json.RawMessage, which also makes the schema; what the handler returns is written as JSON. An error that it returns, and a
// panic, fail the call with their text. An [iter.Seq] of texts sends each as a chunk; a [Reply] adds pictures and files. The
// context ends when the call is cancelled, when its time is over and when its connection breaks; [ScopeOf] has the rest.
//
// The error is a [*SetupError]; a plugin that is not connected yet also returns it from Run, Start and Ready.
func AddTool[In, Out any](plugin *Plugin, tool Tool, handler func(context.Context, In) (Out, error)) error {
	kind := reflect.TypeFor[In]()
	decode := decodeJSON
	if kind == rawJSON {
		decode = func(text string, into any) error {
			raw := json.RawMessage(text)
			*into.(*json.RawMessage) = raw
			if !json.Valid(raw) {
				return json.Unmarshal(raw, into) // says what is wrong
			}
			return nil
		}
	} else if isPlain(kind) {
		decode = func(text string, into any) error { return json.Unmarshal([]byte(text), into) }
	}
	return plugin.add(tool, kind, reflect.TypeFor[Out](), func(ctx context.Context, text string) (any, error) {
		var arguments In
		if err := decode(text, &arguments); err != nil {
			text := fmt.Sprintf("the arguments do not fit the tool: %v", err)
			return nil, &refusal{failed(CodeInvalidArguments, StageNotDispatched, text)}
		}
		return handler(ctx, arguments)
	})
}

// declared returns the declaration of a tool.
func declared(tool Tool, in, out reflect.Type) (*pb.Tool, error) {
	if !toolName.MatchString(tool.Name) {
		return nil, setupErrorf("tool name %q breaks the rule [A-Za-z0-9_.-]{1,64}: rename the tool", tool.Name)
	}
	for label, time := range map[string]time.Duration{"Timeout": tool.Timeout, "IdleTimeout": tool.IdleTimeout} {
		if time < 0 || time > longestTime {
			return nil, setupErrorf("tool %q: %s is %v, it must be above 0 and at most %v", tool.Name, label, time, longestTime)
		}
	}
	var faults []error
	schema := func(label string, kind reflect.Type) any {
		made, err := schemaOf(kind)
		if err != nil {
			faults = append(faults, setupErrorf("tool %q: %s of %v%v", tool.Name, label, kind, err))
		}
		return made
	}
	text := func(label string, value any) string {
		switch text := value.(type) {
		case nil:
			return ""
		case string: // JSON already
			value = json.RawMessage(text)
		case []byte:
			value = json.RawMessage(text)
		}
		json, err := toJSON(value)
		if err != nil {
			faults = append(faults, setupErrorf("tool %q: %s cannot be written as JSON (%v): use a map or a json.RawMessage", tool.Name, label, err))
		}
		return json
	}
	if tool.Parameters == nil && (in == rawJSON || in.Kind() == reflect.Map || in.Kind() == reflect.Interface) {
		tool.Parameters = `{"type":"object"}`
	} else if tool.Parameters == nil {
		tool.Parameters = schema("the schema", in)
	}
	if tool.OutputSchema == true {
		tool.OutputSchema = schema("the output schema", out)
	}
	declaration := &pb.Tool{
		Name: tool.Name, Description: tool.Description, DisplayName: tool.DisplayName, MinLevel: uint32(max(tool.MinLevel, 0)),
		Role: orUnset(tool.Role), Needs: tool.Needs, TimeoutSeconds: tool.Timeout.Seconds(), IdleTimeoutSeconds: tool.IdleTimeout.Seconds(),
		ParametersJson: text("Parameters", tool.Parameters), OutputSchemaJson: text("OutputSchema", tool.OutputSchema),
		MetadataJson: text("Metadata", tool.Metadata),
		Validate:     tool.Validate, NoRepair: tool.NoRepair, NoDefaults: tool.NoDefaults, ValidateOutput: tool.ValidateOutput,
		NoBackground: tool.NoBackground, AlwaysBackground: tool.AlwaysBackground, AllowRepeat: tool.AllowRepeat,
		DirectReply: tool.DirectReply, CouncilEligible: tool.CouncilEligible, InlineAvailable: tool.InlineAvailable,
		Annotations: &pb.ToolAnnotations{
			ReadOnly: tool.ReadOnly, Idempotent: tool.Idempotent, Destructive: tool.Destructive, OpenWorld: tool.OpenWorld,
		},
	}
	if proto.Size(declaration.Annotations) == 0 {
		declaration.Annotations = nil
	}
	if _, err := proto.Marshal(declaration); err != nil {
		faults = append(faults, setupErrorf("tool %q: its texts hold bytes that are not UTF-8: write text", tool.Name))
	}
	return declaration, errors.Join(faults...)
}

// -- calls of the bus -------------------------------------------------------------------------------------------------

// run is a call that is being answered.
type run struct {
	call  *pb.ToolCall
	link  *link
	tools []*offered // as they were when the call came
	ctx   *callContext
	left  *int // how many calls of its message have no result yet; the mutex of the peer guards it, and ended
	ended bool // whether its result was made
}

// callContext is the context of a handler. It is made when somebody looks at it: that costs a fifth of a quick call.
type callContext struct {
	scope    *ToolScope
	deadline time.Time // zero without one
	mutex    sync.Mutex
	cause    error // why it has ended; nil before that
	made     context.Context
	cancel   context.CancelCauseFunc
}

func (c *callContext) look() context.Context {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.made == nil {
		c.made, c.cancel = context.WithCancelCause(context.Background())
		if !c.deadline.IsZero() {
			timed, stop := context.WithDeadline(c.made, c.deadline)
			context.AfterFunc(c.made, stop)
			c.made = timed
		}
		if c.cause != nil {
			c.cancel(c.cause)
		}
	}
	return c.made
}

// end ends the context, with a cause; the first one stays.
func (c *callContext) end(cause error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.cause != nil {
		return
	}
	if c.cause = cause; c.made != nil {
		c.cancel(cause)
	}
}

// Deadline, Done, Err and Value are those of [context.Context].
func (c *callContext) Deadline() (time.Time, bool) { return c.deadline, !c.deadline.IsZero() }

func (c *callContext) Done() <-chan struct{} { return c.look().Done() }

func (c *callContext) Err() error { return c.look().Err() }

func (c *callContext) Value(key any) any {
	if _, own := key.(scopeKey); own {
		return c.scope
	}
	return c.look().Value(key)
}

// beginCalls has the handlers of calls that came in one message started, by startRuns.
func (p *peer) beginCalls(calls []*pb.ToolCall, link *link) {
	left, now := len(calls), time.Now()
	for _, call := range calls {
		if link.standstill.holding {
			link.standstill.held = append(link.standstill.held, call)
			continue
		}
		run := &run{call: call, link: link, tools: p.tools, left: &left}
		run.ctx = &callContext{scope: &ToolScope{peer: p, run: run}}
		if call.TimeoutSeconds > 0 {
			run.ctx.deadline = now.Add(seconds(call.TimeoutSeconds))
		}
		link.running[call.CallId] = run
		p.beginning = append(p.beginning, run)
	}
}

// startRuns starts handlers, and does not wait for them.
func (p *peer) startRuns(runs []*run) {
	for _, run := range runs {
		select {
		case p.work <- run:
		default:
			go p.workOn(run)
		}
	}
}

// workOn answers a call, then others that come: a goroutine that has grown its stack is cheaper than a new one.
func (p *peer) workOn(run *run) {
	for {
		p.serveCall(run)
		if p.idle.Add(1) > idleWorkers {
			p.idle.Add(-1)
			return
		}
		next, open := <-p.work
		if !open {
			return
		}
		run = next
		p.idle.Add(-1)
	}
}

// cancelRun tells a handler to stop, and answers its call: a handler cannot be ended from outside. An unknown id is
// ignored.
func (p *peer) cancelRun(id, reason string, link *link) {
	if run := link.running[id]; run != nil {
		run.ctx.end(errors.New("the call was cancelled: " + reason))
		p.finish(run, checked(failed(CodeCancelled, StageAccepted, "the call was cancelled"), run))
	} else if i := slices.IndexFunc(link.standstill.held, func(call *pb.ToolCall) bool { return call.CallId == id }); i >= 0 {
		link.standstill.held = slices.Delete(link.standstill.held, i, i+1)
		result := failed(CodeCancelled, StageNotDispatched, "the call was cancelled before it began")
		result.CallId = id
		link.putMessage(fieldResults, result)
	}
}

// lostTools tells the handlers of a stream that is over to stop: nobody waits for their results.
func (p *peer) lostTools(link *link) {
	link.standstill.held = nil
	for _, run := range link.running {
		run.ended = true
		run.ctx.end(errors.New("the connection to the bus broke"))
	}
	clear(link.running)
}

func (p *peer) serveCall(run *run) {
	defer run.ctx.end(errCallEnded)
	bytes := checked(p.resultOf(run.ctx, run.ctx.scope), run)
	p.mutex.Lock()
	defer p.mutex.Unlock()
	p.finish(run, bytes)
}

// finish sends an encoded result, once; it may wait a moment for the other results of its message.
func (p *peer) finish(run *run, result []byte) {
	if run.ended {
		return
	}
	run.ended = true
	*run.left--
	delete(run.link.running, run.call.CallId)
	run.link.put(fieldResults, result, "", *run.left > 0)
	run.link.whenIdle()
}

// resultOf runs the handler of a call.
func (p *peer) resultOf(ctx context.Context, scope *ToolScope) (result *pb.ToolResult) {
	call, tools := scope.run.call, scope.run.tools
	place := slices.IndexFunc(tools, func(each *offered) bool { return each.declaration.Name == call.Name })
	if place < 0 {
		var names []string
		for _, each := range tools {
			names = append(names, each.declaration.Name)
		}
		text := fmt.Sprintf("this plugin has no tool %q; it has: %s", call.Name, strings.Join(names, ", "))
		return failed(CodeNotFound, StageNotDispatched, text)
	}
	defer func() {
		if problem := recover(); problem != nil {
			p.options.Log.Error(fmt.Sprintf("toolbus: tool %s panicked: %v\n%s", call.Name, problem, debug.Stack()))
			result = failureOf(ctx, fmt.Errorf("%v", problem), call)
			result.Error.Reason = "panic"
		}
	}()
	arguments := cmp.Or(strings.TrimSpace(call.ArgumentsJson), "{}")
	if arguments[0] != '{' {
		return failed(CodeInvalidArguments, StageNotDispatched, fmt.Sprintf("the arguments must be the JSON text of an object, they are %.80s", arguments))
	}
	output, err := tools[place].handler(ctx, arguments)
	if err != nil {
		return failureOf(ctx, err, call)
	}
	if own, is := output.(*Reply); is {
		output = *own
	}
	result = &pb.ToolResult{}
	switch value := output.(type) {
	case Reply:
		output, result.Content, result.IsError = value.Output, contentsToWire(value.Content), value.IsError
	case iter.Seq[string]:
		var whole strings.Builder
		for chunk := range value {
			scope.Chunk(chunk)
			whole.WriteString(chunk)
		}
		output = whole.String()
	}
	if result.OutputJson, err = toJSON(output); err != nil {
		return failureOf(ctx, fmt.Errorf("the output cannot be written as JSON: %w", err), call)
	}
	return result
}

// checked encodes the result of a call, or a failure in place of one that breaks a limit and so would end the stream.
func checked(result *pb.ToolResult, run *run) []byte {
	result.CallId = run.call.CallId
	bytes, err := proto.Marshal(result)
	payload := len(result.OutputJson) + len(result.InputRequestsJson) + len(result.RequestState)
	if len(result.Content) > 0 {
		payload += proto.Size(&pb.ToolResult{Content: result.Content})
	}
	switch limit := run.link.resultBytes; { // these are as they are once calls come
	case err != nil:
		result = failed(CodeTool, StageAccepted, "the result holds bytes that are not UTF-8: return text, or a File")
	case payload > min(limit, run.link.largestItem):
		text := fmt.Sprintf("the result has %d bytes, more than the limit result_bytes = %d: ask for less", payload, limit)
		result = failedAt(CodeResultTooLarge, StageAccepted, text, "result_bytes", float64(limit))
	default:
		return bytes
	}
	return checked(result, run)
}

// failureOf returns the result for an error of a handler.
func failureOf(ctx context.Context, err error, call *pb.ToolCall) *pb.ToolResult {
	var asks *InputNeeded
	var own *ToolError
	var ready *refusal
	switch {
	case errors.As(err, &ready):
		return ready.result
	case errors.As(err, &asks):
		questions, fault := toJSON(asks.Questions)
		if fault == nil {
			return &pb.ToolResult{InputRequestsJson: questions, RequestState: asks.state}
		}
		err = fmt.Errorf("the questions cannot be written as JSON: %w", fault)
	case errors.Is(err, context.DeadlineExceeded) && errors.Is(ctx.Err(), context.DeadlineExceeded):
		text := fmt.Sprintf("the call did not end within %g s", call.TimeoutSeconds)
		return failedAt(CodeDeadlineExceeded, StageAccepted, text, "timeout_seconds", call.TimeoutSeconds)
	}
	kind := reflect.TypeOf(err)
	for kind.Kind() == reflect.Pointer {
		kind = kind.Elem()
	}
	text := err.Error()
	if text == "" {
		text = kind.String()
	}
	result := failed(CodeTool, StageAccepted, text[:min(len(text), errorBytes)])
	if result.Error.Reason = kind.Name(); errors.As(err, &own) {
		result.Error.Reason = own.Reason
	}
	result.Error.Reason = strings.ToValidUTF8(result.Error.Reason, "�")
	return result
}

// -- what a handler sees ----------------------------------------------------------------------------------------------

type scopeKey struct{}

// ToolScope is a call, as its handler sees it.
type ToolScope struct {
	peer    *peer
	run     *run
	unnamed int // how many questions without a key this run has asked
}

// ScopeOf returns the call that a context belongs to. Outside of a handler, as in its tests, progress is dropped and calls
// of other tools end in an error.
func ScopeOf(ctx context.Context) *ToolScope {
	if scope, is := ctx.Value(scopeKey{}).(*ToolScope); is {
		return scope
	}
	return &ToolScope{run: &run{call: &pb.ToolCall{}}}
}

// Tool returns the name of the tool.
func (s *ToolScope) Tool() string { return s.run.call.Name }

// CallID returns the id by which the bus knows the call.
func (s *ToolScope) CallID() string { return s.run.call.CallId }

// Role returns the role that the tool is for or that the caller named; empty without either.
func (s *ToolScope) Role() string { return s.run.call.GetRole() }

// ArgumentsJSON returns the arguments as they came.
func (s *ToolScope) ArgumentsJSON() json.RawMessage {
	if s.run.call.ArgumentsJson == "" {
		return json.RawMessage("{}")
	}
	return json.RawMessage(s.run.call.ArgumentsJson)
}

// Context returns the user and the conversation, as the host states them.
func (s *ToolScope) Context() CallContext { return contextFromWire(s.run.call.Context) }

// Traceparent returns the span that this call belongs to, as W3C trace context writes it.
func (s *ToolScope) Traceparent() string { return s.run.call.Traceparent }

// Progress reports progress to the caller, and resets the idle timeout; a total of 0 means unknown.
func (s *ToolScope) Progress(done, total float64, message string) {
	s.Report(Progress{Progress: done, Total: total, Message: message})
}

// Chunk sends the next piece of the output. The result must still have the whole output.
func (s *ToolScope) Chunk(text string) { s.Report(Progress{Chunk: text}) }

// Report is [ToolScope.Progress] with all fields. Progress that the bus cannot carry is left out, and logged.
func (s *ToolScope) Report(progress Progress) {
	if s.peer == nil {
		return
	}
	bytes, err := proto.Marshal(&pb.ToolProgress{
		CallId: s.run.call.CallId, Progress: progress.Progress, Total: progress.Total, Message: progress.Message,
		OutputChunk: progress.Chunk, Content: contentsToWire(progress.Content),
	})
	s.peer.mutex.Lock()
	defer s.peer.mutex.Unlock()
	switch limit := min(s.run.link.resultBytes, s.run.link.largestItem); {
	case s.run.ended:
	case err != nil:
		s.peer.warn("progress of tool %s is left out: it holds bytes that are not UTF-8", s.Tool())
	case len(bytes) > limit:
		s.peer.warn("progress of tool %s is left out: it has %d bytes, at most %d", s.Tool(), len(bytes), limit)
	default:
		s.run.link.put(fieldProgress, bytes, "", false)
	}
}

// Call calls another tool as part of this call: same context, no longer than this call, cancelled with it. Arguments and
// result are those of [Host.Call]; of the options Timeout, Role, SchemaHash and OnProgress count.
func (s *ToolScope) Call(ctx context.Context, name string, arguments any, options *CallOptions) (*Result, error) {
	if s.peer == nil {
		return nil, setupErrorf("this is not the context of a call: use the one that the handler of a tool gets")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer context.AfterFunc(s.run.ctx, func() { cancel(context.Cause(s.run.ctx)) })()
	return s.peer.callTool(ctx, name, arguments, or(options), s.run)
}

// Accepts returns the kinds of questions that the caller can answer, such as "elicitation.form".
func (s *ToolScope) Accepts() []string { return s.run.call.Accepts }

// RequestState returns the state that this tool returned with its questions, as the caller sent it back: do not trust it.
func (s *ToolScope) RequestState() string { return s.run.call.RequestState }

// Elicit asks the person behind the caller by a form: form is JSON Schema, of which the properties alone are enough; nil
// asks whether to go on. The error ends this run, return it; the handler then runs again from its beginning with the answer,
// so ask before you change anything. Check whether the answer is accepted: a person may decline.
func (s *ToolScope) Elicit(message string, form map[string]any) (Answer, error) {
	return s.ElicitKey("", message, form)
}

// ElicitKey is [ToolScope.Elicit] with a key that names the question, for a text that differs from run to run.
func (s *ToolScope) ElicitKey(key, message string, form map[string]any) (Answer, error) {
	schema := map[string]any{"type": "object", "properties": map[string]any{}}
	if _, whole := form["properties"].(map[string]any); whole {
		maps.Copy(schema, form)
	} else if form != nil {
		schema["properties"] = form
	}
	return s.elicit(key, map[string]any{"mode": "form", "message": message, "requestedSchema": schema})
}

// ElicitURL asks the person behind the caller to open a page; otherwise it is as [ToolScope.Elicit].
func (s *ToolScope) ElicitURL(message, url string) (Answer, error) {
	return s.elicit("", map[string]any{"mode": "url", "message": message, "url": url})
}

func (s *ToolScope) elicit(key string, params map[string]any) (Answer, error) {
	if key == "" {
		text, err := toJSON(params)
		if err != nil {
			return Answer{}, err
		}
		s.unnamed++
		key = fmt.Sprintf("%d-%.8x", s.unnamed, sha256.Sum256([]byte(text)))[:10]
	}
	if params["mode"] == "url" {
		params["elicitationId"] = key
	}
	answers, err := s.Ask(map[string]Question{key: {Method: "elicitation/create", Params: params}})
	var answer Answer
	if err == nil {
		err = decodeJSON(string(answers[key]), &answer)
	}
	return answer, err
}

// Ask asks several questions of any kind at once, and returns the answers by key; otherwise it is as [ToolScope.Elicit].
func (s *ToolScope) Ask(questions map[string]Question) (map[string]json.RawMessage, error) {
	var state struct {
		Answers map[string]json.RawMessage `json:"answers"`
	}
	_ = decodeJSON(s.run.call.RequestState, &state) // callers can send anything: what is no JSON has no answers
	answers := map[string]json.RawMessage{}
	maps.Copy(answers, state.Answers)
	_ = decodeJSON(s.run.call.InputResponsesJson, &answers)
	missing := map[string]Question{}
	for key, question := range questions {
		if !answered(question, answers[key]) {
			missing[key] = question
			delete(answers, key)
		}
	}
	if len(missing) == 0 {
		return answers, nil
	}
	needed := &InputNeeded{Questions: missing}
	if len(answers) > 0 {
		var err error
		if needed.state, err = toJSON(map[string]any{"answers": answers}); err != nil {
			return nil, err
		}
	}
	return nil, needed
}

// answered tells whether an answer fits its question: callers can send anything.
func answered(question Question, text json.RawMessage) bool {
	var answer map[string]any
	if json.Unmarshal(text, &answer) != nil || answer == nil {
		return false
	}
	if question.Method != "elicitation/create" {
		return true
	}
	if answer["action"] != "accept" {
		return answer["action"] == "decline" || answer["action"] == "cancel"
	}
	var form struct {
		RequestedSchema struct {
			Required []string `json:"required"`
		} `json:"requestedSchema"`
	}
	if params, err := toJSON(question.Params); err == nil {
		_ = json.Unmarshal([]byte(params), &form)
	}
	content, _ := answer["content"].(map[string]any)
	return !slices.ContainsFunc(form.RequestedSchema.Required, func(name string) bool {
		_, has := content[name]
		return !has
	})
}
