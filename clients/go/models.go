package toolbus

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"sync"
)

const nameLength = 64 // of a tool, that providers accept

var notInNames = regexp.MustCompile(`[^A-Za-z0-9_-]`)

// OfferOptions say which tools a model gets, and what its calls state.
type OfferOptions struct {
	Names []string    // these only
	Role  string      // tools of this role only
	Call  CallOptions // of every call
}

// ModelTools are the tools of a request to a model, and what answers the calls of the model.
type ModelTools struct {
	// JSON is the value of `tools` in the request.
	JSON json.RawMessage

	host    *Host
	options OfferOptions
	known   map[string]ListedTool // by the names that the model sees
	names   []string
}

// OpenAITools returns the tools of a bus as chat completions take them: those of OpenAI, and of the many servers that speak
// its API. [ModelTools.AnswerOpenAI] answers the calls.
func OpenAITools(ctx context.Context, host *Host, options *OfferOptions) (*ModelTools, error) {
	return modelTools(ctx, host, options, func(name string, tool ListedTool) any {
		function := map[string]any{"name": name, "description": tool.Description, "parameters": tool.Parameters}
		return map[string]any{"type": "function", "function": function}
	})
}

// AnthropicTools returns the tools of a bus as Anthropic's messages take them. [ModelTools.AnswerAnthropic] answers the
// calls.
func AnthropicTools(ctx context.Context, host *Host, options *OfferOptions) (*ModelTools, error) {
	return modelTools(ctx, host, options, func(name string, tool ListedTool) any {
		schema := map[string]json.RawMessage{}
		_ = json.Unmarshal(tool.Parameters, &schema) // the bus lists objects only
		schema["type"] = json.RawMessage(`"object"`)
		return map[string]any{"name": name, "description": tool.Description, "input_schema": schema}
	})
}

func modelTools(ctx context.Context, host *Host, options *OfferOptions, shape func(string, ListedTool) any) (*ModelTools, error) {
	made := &ModelTools{host: host, options: or(options), known: map[string]ListedTool{}}
	listing, err := host.List(ctx, &ListOptions{Names: made.options.Names, Role: made.options.Role})
	if err != nil {
		return nil, err
	}
	shapes := []any{}
	for _, tool := range listing.Tools {
		plain := notInNames.ReplaceAllString(tool.Name, "_")
		name := plain[:min(len(plain), nameLength)]
		for count := 2; made.known[name].Name != ""; count++ {
			name = fmt.Sprintf("%s_%d", plain[:min(len(plain), nameLength-4)], count)
		}
		made.known[name] = tool
		made.names = append(made.names, name)
		shapes = append(shapes, shape(name, tool))
	}
	text, err := toJSON(shapes)
	made.JSON = json.RawMessage(text)
	return made, err
}

// AnswerOpenAI makes the calls of `message.tool_calls`, at once; it returns the messages that answer them, as JSON.
func (m *ModelTools) AnswerOpenAI(ctx context.Context, toolCalls json.RawMessage) (json.RawMessage, error) {
	var calls []struct {
		ID       string
		Type     string
		Function struct{ Name, Arguments string }
	}
	if err := decodeJSON(cmp.Or(string(toolCalls), "null"), &calls); err != nil {
		return nil, fmt.Errorf("the tool calls must be the list `tool_calls` of a message: %w", err)
	}
	return answerAll(calls, func(i int) (any, error) {
		result, err := m.call(ctx, calls[i].Function.Name, cmp.Or(calls[i].Function.Arguments, "{}"))
		if err != nil {
			return nil, err
		}
		return map[string]any{"role": "tool", "tool_call_id": calls[i].ID, "content": result.Text()}, nil
	})
}

// AnswerAnthropic makes the calls in the `content` of a message, at once; it returns the content of the user's message that
// answers them, as JSON.
func (m *ModelTools) AnswerAnthropic(ctx context.Context, content json.RawMessage) (json.RawMessage, error) {
	type toolUse struct {
		Type, ID, Name string
		Input          json.RawMessage
	}
	var calls []toolUse
	if err := decodeJSON(cmp.Or(string(content), "null"), &calls); err != nil {
		return nil, fmt.Errorf("the calls must be the list `content` of a message: %w", err)
	}
	calls = slices.DeleteFunc(calls, func(part toolUse) bool { return part.Type != "tool_use" })
	return answerAll(calls, func(i int) (any, error) {
		result, err := m.call(ctx, calls[i].Name, cmp.Or(string(calls[i].Input), "{}"))
		if err != nil {
			return nil, err
		}
		shown := []any{map[string]any{"type": "text", "text": result.Text()}}
		for _, part := range result.Content {
			if part.Type == "image" {
				source := map[string]any{"type": "base64", "media_type": part.MIMEType, "data": part.Data} // JSON has it as base64
				shown = append(shown, map[string]any{"type": "image", "source": source})
			}
		}
		answer := map[string]any{"type": "tool_result", "tool_use_id": calls[i].ID, "content": shown}
		if result.IsError || result.Asks() {
			answer["is_error"] = true
		}
		return answer, nil
	})
}

// answerAll answers calls at once; it returns the answers as JSON, or the first error.
func answerAll[Call any](calls []Call, answer func(int) (any, error)) (json.RawMessage, error) {
	answers, errs := make([]any, len(calls)), make([]error, len(calls))
	var all sync.WaitGroup
	for i := range calls {
		all.Go(func() { answers[i], errs[i] = answer(i) })
	}
	all.Wait()
	if err := cmp.Or(errs...); err != nil {
		return nil, err
	}
	text, err := toJSON(answers)
	return json.RawMessage(text), err
}

// call makes a call of a model; that of an unknown tool is a failure which the model can read.
func (m *ModelTools) call(ctx context.Context, name, arguments string) (*Result, error) {
	tool, is := m.known[name]
	if !is {
		text := fmt.Sprintf("there is no tool %q; there are: %s", name, strings.Join(m.names, ", "))
		return failure(CodeNotFound, StageNotDispatched, text, ""), nil
	}
	options := m.options.Call
	options.Role = cmp.Or(options.Role, m.options.Role)
	options.SchemaHash = cmp.Or(options.SchemaHash, tool.SchemaHash)
	return m.host.Call(ctx, tool.Name, arguments, &options)
}
