package toolbus

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"strings"
	"time"
)

// Code says what happened to a call that failed. docs/protocol.md, "Errors of calls", says what to do about each; a later
// bus may send codes that are not here.
type Code string

// The codes of failed calls.
const (
	CodeTool             Code = "TOOL" // the tool ran and reported a failure
	CodeNotFound         Code = "NOT_FOUND"
	CodeInvalidArguments Code = "INVALID_ARGUMENTS"
	CodePermissionDenied Code = "PERMISSION_DENIED"
	CodeCatalogStale     Code = "CATALOG_STALE" // the tool has changed since the listing whose SchemaHash the call states
	CodeOverloaded       Code = "OVERLOADED"
	CodeUnavailable      Code = "UNAVAILABLE"
	CodeDeadlineExceeded Code = "DEADLINE_EXCEEDED"
	CodeCancelled        Code = "CANCELLED"
	CodeResultTooLarge   Code = "RESULT_TOO_LARGE"
	CodeSecretBlocked    Code = "SECRET_BLOCKED"
	CodeRepeated         Code = "REPEATED"
	CodeInternal         Code = "INTERNAL"
)

// Stage says how far a call had got when it failed.
type Stage string

// The stages of failed calls.
const (
	StageNotDispatched Stage = "NOT_DISPATCHED" // no plugin has seen the call
	StageDispatched    Stage = "DISPATCHED"     // a plugin may have seen it
	StageAccepted      Stage = "ACCEPTED"       // a plugin worked on it
	StageUnknown       Stage = "UNKNOWN"        // the connection to the bus broke
)

// Limit is a limit that a call hit, in the unit that its name says.
type Limit struct {
	Name  string
	Value float64
}

// CallError says why a call failed.
type CallError struct {
	Code    Code
	Stage   Stage
	Message string
	// RetrySafe tells whether the same call can be sent again without running the tool twice.
	RetrySafe bool
	// Limit is the limit that was hit; nil if none was.
	Limit *Limit
	// RetryAfter is how long to wait before the call is sent again; 0 if the bus does not say.
	RetryAfter time.Duration
	// Reason is the tool's own name for the failure, or "needs_input" if the tool asks what the caller cannot answer.
	Reason string
}

func (e *CallError) Error() string {
	return string(e.Code) + ": " + e.Message
}

// SetupError is a mistake of the program: a value that breaks a rule. The text names the value, the rule and the fix.
type SetupError struct{ text string }

func (e *SetupError) Error() string { return e.text }

func setupErrorf(format string, values ...any) error {
	return &SetupError{fmt.Sprintf(format, values...)}
}

// RequestError means that the bus refuses this peer or this request, and another attempt would not change that.
type RequestError struct {
	Code    string // of gRPC, such as "PERMISSION_DENIED"
	Details string // the text of the bus
}

func (e *RequestError) Error() string { return e.Code + ": " + e.Details }

// PeerLost means that no bus answered, that the connection broke, or that this peer has left.
type PeerLost struct {
	Code    string // of gRPC, such as "UNAVAILABLE"
	Details string
}

func (e *PeerLost) Error() string { return e.Code + ": " + e.Details }

// ToolError is an error that a handler returns to name its failure for programs. Other errors have the name of their type.
type ToolError struct {
	Reason  string
	Message string // for the model
}

func (e *ToolError) Error() string { return e.Message }

// Content is a part of a result beside its output, made by Text, Image, Audio, Link, Resource and File.
type Content struct {
	Type        string // "text", "image", "audio", "link" or "resource"
	Text        string // of "text", and of a "resource" without Data
	Data        []byte // of "image", "audio" and "resource": the encoded bytes (not base64)
	MIMEType    string
	URI         string // of "link" and "resource"
	Name        string // of "link"
	Description string // of "link"
	// Annotations is JSON for hosts; nil without any.
	Annotations json.RawMessage
}

// Text returns a part that holds plain text.
func Text(text string) Content { return Content{Type: "text", Text: text} }

// Image returns a part that holds a picture, from its encoded bytes.
func Image(data []byte, mimeType string) Content {
	return Content{Type: "image", Data: data, MIMEType: mimeType}
}

// Audio returns a part that holds a sound, from its encoded bytes.
func Audio(data []byte, mimeType string) Content {
	return Content{Type: "audio", Data: data, MIMEType: mimeType}
}

// Link returns a part that is a link to a resource.
func Link(uri, name string) Content { return Content{Type: "link", URI: uri, Name: name} }

// Resource returns a part that holds a text with its address.
func Resource(uri, text, mimeType string) Content {
	return Content{Type: "resource", URI: uri, Text: text, MIMEType: mimeType}
}

// File returns a part that holds the bytes of a file, or of another resource, with its address.
func File(uri string, data []byte, mimeType string) Content {
	if data == nil {
		data = []byte{}
	}
	return Content{Type: "resource", URI: uri, Data: data, MIMEType: mimeType}
}

func (c Content) shown() string {
	switch {
	case c.Type == "text" || c.Type == "resource" && c.Data == nil:
		return c.Text
	case c.Type == "link":
		return fmt.Sprintf("[%s: %s]", c.Name, c.URI)
	case c.Type == "resource":
		return fmt.Sprintf("[resource: %s, %d bytes]", c.URI, len(c.Data))
	default:
		return fmt.Sprintf("[%s: %s, %d bytes]", c.Type, c.MIMEType, len(c.Data))
	}
}

// Progress says how much of a call is done.
type Progress struct {
	Progress float64
	Total    float64 // the whole amount, in the same unit; 0 means unknown
	Message  string
	Chunk    string // the next piece of an output that comes bit by bit
	Content  []Content
}

// Question is a question of a tool, as the Model Context Protocol has it: "elicitation/create", "sampling/createMessage" …
type Question struct {
	Method string         `json:"method"`
	Params map[string]any `json:"params,omitempty"`
}

// Answer is the answer of a person to "elicitation/create".
type Answer struct {
	Action  string         `json:"action"`            // "accept", "decline" or "cancel"
	Content map[string]any `json:"content,omitempty"` // the fields of the form that was filled in
}

// Accepted tells whether the person agreed.
func (a Answer) Accepted() bool { return a.Action == "accept" }

// ContextMessage is a message of the conversation that a call belongs to.
type ContextMessage struct {
	Role    string // "system", "user", "assistant" or "tool"
	Content string
	Name    string
}

// CallContext says who a call is for: a host states it, a model cannot.
type CallContext struct {
	UserID      string
	Attributes  map[string]string
	Member      json.RawMessage // of a council; nil outside one
	Messages    []ContextMessage
	Traceparent string
	Unplanned   bool
}

// Result says how a call ended. A failure is a value: check Error, or call Unwrap.
type Result struct {
	CallID string
	// OutputJSON is what the tool returned, as JSON text.
	OutputJSON string
	// IsError tells whether a model should read this as a failure; then Error is set.
	IsError bool
	Error   *CallError
	Content []Content
	// InputRequestsJSON has the questions of a tool that cannot go on without answers; empty where it is done.
	InputRequestsJSON string
	// RequestState goes back to the tool with the answers.
	RequestState string
}

// Asks tells whether the tool has questions before it can go on: then the result is neither a success nor a failure.
func (r *Result) Asks() bool { return r.InputRequestsJSON != "" }

// Output returns what the tool returned, numbers as [json.Number], so that no digit is lost; nil where it is no JSON.
func (r *Result) Output() any {
	var output any
	if decodeJSON(r.OutputJSON, &output) != nil {
		return nil
	}
	return output
}

// Unwrap decodes the output into a pointer, or returns the error of a failed call, a [*CallError]. With nil it only
// returns the error. A tool that asks something first is an error with the reason "needs_input".
func (r *Result) Unwrap(into any) error {
	switch {
	case r.Error != nil:
		return r.Error
	case r.Asks():
		return &CallError{Code: CodeTool, Stage: StageAccepted, Message: r.Text(), Reason: "needs_input"}
	case into == nil:
		return nil
	}
	return decodeJSON(r.OutputJSON, into)
}

// Text returns the text for a model: the error, then the output (a text without quotes), then the content, line by line.
func (r *Result) Text() string {
	if r.Asks() {
		return "the tool asks first: " + r.InputRequestsJSON
	}
	var parts []string
	if r.Error != nil {
		parts = append(parts, cmp.Or(r.Error.Message, string(r.Error.Code)))
	}
	if text, isText := r.Output().(string); isText {
		parts = append(parts, text)
	} else if r.OutputJSON != "null" {
		parts = append(parts, r.OutputJSON)
	}
	for _, part := range r.Content {
		parts = append(parts, part.shown())
	}
	if len(parts) == 0 {
		return "null"
	}
	return strings.Join(unique(parts), "\n")
}

// toJSON writes JSON as encoding/json does, without the escapes for HTML; JSON that is written already stays as it is.
func toJSON(value any) (string, error) {
	if raw, isRaw := value.(json.RawMessage); isRaw && len(raw) > 0 {
		if !json.Valid(raw) {
			return "", fmt.Errorf("the json.RawMessage %.80q is not JSON", raw)
		}
		return string(raw), nil
	}
	var buffer bytes.Buffer
	encoder := json.NewEncoder(&buffer)
	encoder.SetEscapeHTML(false)
	err := encoder.Encode(value)
	return strings.TrimSuffix(buffer.String(), "\n"), err
}

// argumentsJSON returns arguments as JSON text; text is passed on as it is, so large numbers of a model survive.
func argumentsJSON(value any) (string, error) {
	switch value := value.(type) {
	case nil:
		return "{}", nil
	case string:
		return value, nil
	case []byte:
		return string(value), nil
	case json.RawMessage:
		return string(value), nil
	}
	return toJSON(value)
}

// decodeJSON reads JSON text; numbers in interfaces become json.Number.
func decodeJSON(text string, into any) error {
	decoder := json.NewDecoder(strings.NewReader(text))
	decoder.UseNumber()
	if err := decoder.Decode(into); err != nil {
		return err
	}
	if decoder.More() {
		return fmt.Errorf("there is more than one JSON value in %.80q", text)
	}
	return nil
}
