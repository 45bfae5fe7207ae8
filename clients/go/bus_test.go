package toolbus

import (
	"bufio"
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
	"log"
	"log/slog"
	"math/big"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"toolbus/internal/pb"
)

var quiet = slog.New(slog.NewTextHandler(io.Discard, nil))

// startBus starts a bus, the program TOOLBUS or `toolbus`, on free ports; it returns its address and what stops it.
func startBus(t testing.TB, options ...string) (string, func()) {
	t.Helper()
	address, _, stop := startProcess(t, options...)
	return address, stop
}

func startProcess(t testing.TB, options ...string) (string, *os.Process, func()) {
	t.Helper()
	program := os.Getenv("TOOLBUS")
	if program == "" {
		program = "toolbus"
	}
	arguments := append([]string{"serve", "--grpc", "127.0.0.1:0", "--http", "off", "--ephemeral"}, options...)
	command := exec.Command(program, arguments...)
	var warnings bytes.Buffer // of the bus, shown if the test fails
	command.Stderr = &warnings
	output, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		t.Fatalf("the bus does not start: %v", err)
	}
	stop := sync.OnceFunc(func() {
		_ = command.Process.Signal(syscall.SIGTERM)
		_ = command.Wait()
		if t.Failed() {
			t.Log(warnings.String())
		}
	})
	t.Cleanup(stop)
	ready := regexp.MustCompile(`^toolbus ready grpc=(\S+)`)
	lines := bufio.NewScanner(output)
	for lines.Scan() {
		if found := ready.FindStringSubmatch(lines.Text()); found != nil {
			go func() { _, _ = io.Copy(io.Discard, output) }()
			return found[1], command.Process, stop
		}
	}
	t.Fatal("the bus ended before it was ready")
	return "", nil, stop
}

// must fails a test at an error, and returns the value that came without one.
func must[T any](t testing.TB) func(T, error) T {
	return func(value T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return value
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func equal[T any](t testing.TB, got, expected T) {
	t.Helper()
	one, other := must[string](t)(toJSON(got)), must[string](t)(toJSON(expected))
	if one != other {
		t.Fatalf("got %s, expected %s", one, other)
	}
}

type place struct {
	City string `json:"city" description:"in English"`
	Days int    `json:"days" default:"1" minimum:"1"`
}

type weather struct {
	City string   `json:"city"`
	Days []string `json:"days"`
}

func getWeather(_ context.Context, in place) (weather, error) {
	return weather{in.City, slices.Repeat([]string{"sunny"}, in.Days)}, nil
}

type nothing = map[string]any

// tester is a bus with a plugin and a host.
type tester struct {
	address string
	plugin  *Plugin
	host    *Host
	stopped atomic.Int32 // handlers of slow that have seen their end
}

func (s *tester) options() Options { return Options{Address: s.address, Log: quiet} }

func newTester(t *testing.T) *tester {
	address, _ := startBus(t)
	s := &tester{address: address}
	s.plugin = NewPlugin("weather", &PluginOptions{Options: s.options()})
	p := s.plugin
	check(t, AddTool(p, Tool{Name: "get_weather", Description: "Tells the weather.", ReadOnly: Yes, OutputSchema: true}, getWeather))
	type numbers struct {
		A *big.Int `json:"a"`
		B int64    `json:"b" default:"1"`
	}
	check(t, AddTool(p, Tool{Name: "add"}, func(_ context.Context, in numbers) (*big.Int, error) {
		return new(big.Int).Add(in.A, big.NewInt(in.B)), nil
	}))
	check(t, AddTool(p, Tool{Name: "count"}, func(context.Context, nothing) (iter.Seq[string], error) {
		return slices.Values([]string{"one ", "two"}), nil
	}))
	check(t, AddTool(p, Tool{Name: "steps"}, func(ctx context.Context, _ nothing) (Reply, error) {
		image := Image([]byte{1, 2}, "image/webp")
		ScopeOf(ctx).Report(Progress{Progress: 1, Total: 2, Message: "half", Content: []Content{image}})
		parts := []Content{Link("https://a.example", "more"), File("file:///a", []byte{0xff}, "a/b"), Resource("b:", "text", "text/plain"), Text("t")}
		return Reply{Output: "done", Content: parts}, nil
	}))
	check(t, AddTool(p, Tool{Name: "slow"}, func(ctx context.Context, _ nothing) (any, error) {
		ScopeOf(ctx).Progress(0, 0, "")
		<-ctx.Done()
		s.stopped.Add(1)
		return nil, ctx.Err()
	}))
	check(t, AddTool(p, Tool{Name: "fail"}, func(_ context.Context, in struct{ How string }) (any, error) {
		switch in.How {
		case "panic":
			panic("at the disco")
		case "reason":
			return nil, &ToolError{Reason: "no_city", Message: "no such city"}
		case "json":
			return func() {}, nil
		}
		return nil, errors.New("no such city")
	}))
	check(t, AddTool(p, Tool{Name: "ask_weather"}, func(ctx context.Context, in json.RawMessage) (answer weather, err error) {
		result, err := ScopeOf(ctx).Call(ctx, "get_weather", in, nil)
		if err != nil {
			return answer, err
		}
		return answer, result.Unwrap(&answer)
	}))
	check(t, AddTool(p, Tool{Name: "who"}, func(ctx context.Context, _ nothing) (any, error) {
		own := ScopeOf(ctx).Context()
		deadline, has := ctx.Deadline()
		return []any{own.UserID, own.Attributes, has && time.Until(deadline) <= 30*time.Second}, nil
	}))
	check(t, AddTool(p, Tool{Name: "book"}, func(ctx context.Context, _ nothing) (any, error) {
		day, err := ScopeOf(ctx).Elicit("Which day?", map[string]any{"day": map[string]any{"type": "string"}})
		if err != nil {
			return nil, err
		}
		sure, err := ScopeOf(ctx).Elicit("Sure?", nil)
		if err != nil || !day.Accepted() || !sure.Accepted() {
			return "not booked", err
		}
		return day.Content["day"], nil
	}))
	check(t, p.Ready(t.Context()))
	t.Cleanup(func() { _ = p.Close(context.Background()) })
	s.host = NewHost(&HostOptions{Options: s.options()})
	t.Cleanup(s.host.Close)
	return s
}

func TestAPluginAndAHost(t *testing.T) {
	s := newTester(t)
	call := func(t *testing.T, name string, arguments any, options *CallOptions) *Result {
		t.Helper()
		return must[*Result](t)(s.host.Call(t.Context(), name, arguments, options))
	}
	t.Run("a host lists tools with the schema of their type, and calls them", func(t *testing.T) {
		listing := must[*Listing](t)(s.host.List(t.Context(), &ListOptions{Names: []string{"get_weather"}}))
		equal(t, len(listing.Tools), 1)
		tool := listing.Tools[0]
		equal(t, []string{tool.Source, tool.State}, []string{"weather", "live"})
		equal(t, tool.ReadOnly, true)
		var schema any
		check(t, decodeJSON(string(tool.Parameters), &schema))
		equal(t, schema, decoded(t, `{"type":"object","properties":{"city":{"type":"string","description":"in English"},
			"days":{"type":"integer","default":1,"minimum":1}},"required":["city"]}`))
		equal(t, decoded(t, string(tool.OutputSchema)), decoded(t, `{"type":"object","properties":{"city":{"type":"string"},
			"days":{"type":"array","items":{"type":"string"}}},"required":["city","days"]}`))
		equal(t, call(t, "get_weather", place{"Paris", 2}, nil).OutputJSON, `{"city":"Paris","days":["sunny","sunny"]}`)
		var answer weather
		check(t, call(t, "get_weather", `{"city":"Rome"}`, nil).Unwrap(&answer))
		equal(t, answer, weather{"Rome", []string{"sunny"}})
		again := must[*Listing](t)(s.host.List(t.Context(), &ListOptions{IfRevision: listing.Revision}))
		equal(t, again.Unchanged, true)
	})
	t.Run("integers of any size pass through", func(t *testing.T) {
		result := call(t, "add", `{"a": 123456789012345678901234567890}`, nil)
		equal(t, result.OutputJSON, "123456789012345678901234567891")
		equal(t, result.Output(), any(json.Number("123456789012345678901234567891")))
	})
	t.Run("failures are values with code, stage and retry", func(t *testing.T) {
		for how, expected := range map[string][2]string{
			"": {"errorString", "no such city"}, "panic": {"panic", "at the disco"}, "reason": {"no_city", "no such city"},
		} {
			failure := call(t, "fail", nothing{"How": how}, nil).Error
			equal(t, failure, &CallError{Code: CodeTool, Stage: StageAccepted, Message: expected[1], Reason: expected[0]})
		}
		if failure := call(t, "fail", nothing{"How": "json"}, nil).Error; !strings.Contains(failure.Message, "cannot be written as JSON") {
			t.Fatal(failure)
		}
		failure := call(t, "get_weather", nothing{"days": "many"}, nil).Error
		equal(t, []any{failure.Code, failure.Stage, failure.RetrySafe}, []any{CodeInvalidArguments, StageNotDispatched, false})
		err := call(t, "no_such_tool", nil, nil).Unwrap(nil)
		if unknown := new(CallError); !errors.As(err, &unknown) || unknown.Code != CodeNotFound {
			t.Fatal(err)
		}
		if _, err := s.host.Call(t.Context(), "add", func() {}, nil); err == nil {
			t.Fatal("a function is no JSON")
		}
	})
	t.Run("progress, chunks and content reach the host", func(t *testing.T) {
		var items []Progress
		options := &CallOptions{OnProgress: func(item Progress) { items = append(items, item) }}
		result := call(t, "steps", nil, options)
		equal(t, items, []Progress{{1, 2, "half", "", []Content{Image([]byte{1, 2}, "image/webp")}}})
		equal(t, result.Content[1].Data, []byte{0xff})
		equal(t, result.Text(), "done\n[more: https://a.example]\n[resource: file:///a, 1 bytes]\ntext\nt")
		items = nil
		equal(t, call(t, "count", nil, options).OutputJSON, `"one two"`)
		equal(t, []string{items[0].Chunk, items[1].Chunk}, []string{"one ", "two"})
	})
	t.Run("a cancelled context ends the call down to its handler", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		_, err := s.host.Call(ctx, "slow", nil, &CallOptions{OnProgress: func(Progress) { cancel() }})
		equal(t, errors.Is(err, context.Canceled), true)
		for s.stopped.Load() == 0 {
			time.Sleep(time.Millisecond)
		}
	})
	t.Run("the deadline of a context is that of the call", func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), 200*time.Millisecond)
		defer cancel()
		failure := must[*Result](t)(s.host.Call(ctx, "slow", nil, nil)).Error
		equal(t, []any{failure.Code, failure.Limit.Name}, []any{CodeDeadlineExceeded, "timeout_seconds"})
	})
	t.Run("nested calls, and the context of the host", func(t *testing.T) {
		equal(t, call(t, "ask_weather", nothing{"city": "Oslo"}, nil).OutputJSON, `{"city":"Oslo","days":["sunny"]}`)
		who := &CallContext{UserID: "u-17", Attributes: map[string]string{"locale": "en"}}
		equal(t, call(t, "who", nil, &CallOptions{Context: who}).OutputJSON, `["u-17",{"locale":"en"},true]`)
	})
	t.Run("questions are answered, one after the other; without answers the call says what it needs", func(t *testing.T) {
		var messages []string
		result := call(t, "book", nil, &CallOptions{OnInput: func(_ context.Context, question AskedQuestion) (any, error) {
			messages = append(messages, question.Message)
			return map[string]any{"day": "friday"}, nil
		}})
		equal(t, result.OutputJSON, `"friday"`)
		equal(t, messages, []string{"Which day?", "Sure?"})
		declined := &CallOptions{OnInput: func(context.Context, AskedQuestion) (any, error) { return nil, nil }}
		equal(t, call(t, "book", nil, declined).OutputJSON, `"not booked"`)
		equal(t, call(t, "book", nil, nil).Error.Reason, "needs_input")
	})
	t.Run("a watch shows tools that come and go", func(t *testing.T) {
		var seen []string
		for change, err := range s.host.Watch(t.Context()) {
			check(t, err)
			switch {
			case change.Full:
				equal(t, len(change.Added), len(s.plugin.tools))
				check(t, AddTool(s.plugin, Tool{Name: "late"}, getWeather))
			case len(change.Added) > 0:
				seen = append(seen, "+"+change.Added[0].Name)
				equal(t, s.plugin.RemoveTool("late"), true)
			case len(change.Removed) > 0:
				seen = append(seen, "-"+change.Removed[0].Name)
			}
			if len(seen) == 2 {
				break
			}
		}
		equal(t, seen, []string{"+late", "-late"})
		for change, err := range s.host.Watch(t.Context()) { // a second reader gets the whole catalog, too
			check(t, err)
			equal(t, change.Full && len(change.Added) > 0, true)
			break
		}
	})
	t.Run("notifications reach a host", func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		go func() {
			for ctx.Err() == nil {
				if hosts, err := s.plugin.Notify(ctx, "u-17", "the timer ended", nothing{"n": 1}); err != nil || hosts > 0 {
					return
				}
			}
		}()
		for each, err := range s.host.Notifications(ctx) {
			check(t, err)
			equal(t, []string{each.Source, each.User, each.Text, string(each.Data)}, []string{"weather", "u-17", "the timer ended", `{"n":1}`})
			break
		}
	})
	t.Run("a host lends its model to a plugin with the permission", func(t *testing.T) {
		check(t, s.host.Lend(func(_ context.Context, request GenerationRequest) (*Generation, error) {
			return &Generation{Text: request.Mode + " " + request.Messages[0].Content, Model: "m"}, nil
		}, nil))
		equal(t, errors.As(s.host.Lend(nil, nil), new(*SetupError)), true)
		grant := nothing{"source": "weather", "permission": "generation"}
		check(t, call(t, "toolbus:grant", grant, nil).Unwrap(nil))
		check(t, s.host.lender.Ready(t.Context()))
		answer := must[*Generation](t)(s.plugin.Generate(t.Context(), GenerationRequest{Messages: []Message{{"user", "hello"}}}))
		equal(t, answer.Text, "quiet hello")
	})
	t.Run("OpenAI's and Anthropic's formats", func(t *testing.T) {
		which := &OfferOptions{Names: []string{"get_weather", "steps"}}
		open := must[*ModelTools](t)(OpenAITools(t.Context(), s.host, which))
		equal(t, strings.Contains(string(open.JSON), `{"function":{"description":"Tells the weather.","name":"get_weather","parameters":{`), true)
		calls := `[{"id":"1","type":"function","function":{"name":"get_weather","arguments":"{\"city\":\"Oslo\"}"}},
			{"id":"2","type":"function","function":{"name":"no","arguments":""}}]`
		answers := must[json.RawMessage](t)(open.AnswerOpenAI(t.Context(), json.RawMessage(calls)))
		equal(t, string(answers), `[{"content":"{\"city\":\"Oslo\",\"days\":[\"sunny\"]}","role":"tool","tool_call_id":"1"},`+
			`{"content":"there is no tool \"no\"; there are: get_weather, steps","role":"tool","tool_call_id":"2"}]`)
		anthropic := must[*ModelTools](t)(AnthropicTools(t.Context(), s.host, which))
		equal(t, strings.Contains(string(anthropic.JSON), `"input_schema":{"properties":`), true)
		content := `[{"type":"text","text":"…"},{"type":"tool_use","id":"7","name":"get_weather","input":{"city":1}}]`
		answers = must[json.RawMessage](t)(anthropic.AnswerAnthropic(t.Context(), json.RawMessage(content)))
		equal(t, strings.Contains(string(answers), `"is_error":true,"tool_use_id":"7","type":"tool_result"`), true)
	})
	t.Run("a refused tool is data, and the others are offered", func(t *testing.T) {
		refused := make(chan RefusedTool, 1)
		own := NewPlugin("refused", &PluginOptions{Options: s.options(), OnRefused: func(tool RefusedTool) { refused <- tool }})
		check(t, AddTool(own, Tool{Name: "good"}, getWeather))
		check(t, AddTool(own, Tool{Name: "bad", Parameters: json.RawMessage(`{"type":"strin"}`)}, getWeather))
		check(t, own.Ready(t.Context()))
		defer own.Close(t.Context())
		equal(t, (<-refused).Name, "bad")
		equal(t, own.Refused()[0].Name, "bad")
		equal(t, call(t, "good", place{"Paris", 1}, nil).IsError, false)
	})
	t.Run("two plugins of one source share the calls of a tool, and one that leaves loses none", func(t *testing.T) {
		var plugins []*Plugin
		arrived, met := make(chan string, 2), make(chan struct{})
		for _, name := range []string{"a", "b"} {
			own := NewPlugin("replicas", &PluginOptions{Options: s.options()})
			check(t, AddTool(own, Tool{Name: "which"}, func(ctx context.Context, in struct {
				Meet bool `json:",omitempty"`
			}) (string, error) {
				if in.Meet {
					arrived <- name
					<-met
				}
				return name, nil
			}))
			check(t, own.Ready(t.Context()))
			plugins = append(plugins, own)
		}
		defer plugins[1].Close(t.Context())
		var all sync.WaitGroup
		var failures atomic.Int32
		which := func(meet bool) {
			result, err := s.host.Call(t.Context(), "which", nothing{"Meet": meet}, nil)
			if err != nil || result.IsError {
				failures.Add(1)
			}
		}
		all.Go(func() { which(true) })
		all.Go(func() { which(true) })
		equal(t, <-arrived != <-arrived, true) // each has one of the two calls
		all.Go(func() { _ = plugins[0].Close(t.Context()) })
		for range 200 {
			all.Go(func() { which(false) })
		}
		close(met)
		all.Wait()
		equal(t, failures.Load(), 0)
	})
}

func decoded(t testing.TB, text string) (value any) {
	t.Helper()
	check(t, decodeJSON(text, &value))
	return value
}

func TestMistakesOfTheProgramNameTheValueTheRuleAndTheFix(t *testing.T) {
	plugin := NewPlugin("mistakes", nil)
	add := func(tool Tool) error { return AddTool(plugin, tool, getWeather) }
	check(t, add(Tool{Name: "good"}))
	at := func(address string) error {
		return NewPlugin("x", &PluginOptions{Options: Options{Address: address}}).Start()
	}
	several := must[*addresses](t)(readAddresses("mtls:[fe80::1%eth0]:48931, unix:/run/x,y/bus ,[::1]:2, unix:/run/x,y/bus")).known
	equal(t, several, []string{"mtls:[fe80::1%eth0]:48931", "unix:/run/x,y/bus", "[::1]:2"})
	for _, parameters := range []any{`{"type": "object"}`, []byte(`{"type": "object"}`), json.RawMessage(`{"type": "object"}`)} {
		tool := Tool{Name: "text", Parameters: parameters}
		equal(t, must[*pb.Tool](t)(declared(tool, nil, nil)).ParametersJson, `{"type": "object"}`)
	}
	if err := add(Tool{Name: "text", Parameters: `{"type":`}); err == nil {
		t.Fatal("a schema that is not JSON is refused before the bus sees it")
	}
	type broken struct{ Notify chan int }
	type limited struct {
		Count int `json:"count" minimum:"one"`
	}
	for _, each := range []struct {
		err  error
		text string
	}{
		{add(Tool{Name: "a b"}), `tool name "a b" breaks the rule [A-Za-z0-9_.-]{1,64}: rename the tool`},
		{add(Tool{Name: "good"}), `there already is a tool "good": set Replace, or rename one`},
		{add(Tool{Name: "late", Timeout: time.Hour}), `tool "late": Timeout is 1h0m0s, it must be above 0 and at most 5m0s`},
		{AddTool(plugin, Tool{Name: "chan"}, func(context.Context, broken) (any, error) { return nil, nil }),
			`tool "chan": the schema of toolbus.broken.Notify: JSON cannot hold a chan int: leave the field out with ` + "`json:\"-\"`, or use another type"},
		{AddTool(plugin, Tool{Name: "tag"}, func(context.Context, limited) (any, error) { return nil, nil }),
			`tool "tag": the schema of toolbus.limited.Count: the tag minimum is "one", which is not JSON: write a value such as minimum:"1"`},
		{NewPlugin("a b", nil).Start(), `the source is "a b", it must be 1 to 128 of [A-Za-z0-9_.:-]`},
		{at("h:70000"), `the address is "h:70000", it must be HOST:PORT, unix:PATH, tls:HOST:PORT, mtls:HOST:PORT or dns:NAME:PORT`},
		{at("a:1,,b:1"), `the address is "a:1,", it must be HOST:PORT, unix:PATH, tls:HOST:PORT, mtls:HOST:PORT or dns:NAME:PORT`},
		{at("a:1,dns:tcp:a:1"), `the address is "dns:tcp:a:1", it must be dns:NAME:PORT, dns:tls:NAME:PORT or dns:mtls:NAME:PORT`},
		{at(strings.Repeat("a:1,", 64) + "a:1"), `the address has 65 buses, it may have 64`},
	} {
		setup := new(SetupError)
		equal(t, errors.As(each.err, &setup), true)
		equal(t, each.err.Error(), each.text)
	}
	if err := plugin.Run(t.Context()); err == nil || !strings.Contains(err.Error(), "rename the tool") {
		t.Fatalf("a plugin whose tools could not be added does not run: %v", err)
	}
	credential := filepath.Join(t.TempDir(), "open.toolbus")
	check(t, os.WriteFile(credential, []byte("token = 'x'"), 0o644))
	err := NewPlugin("keys", &PluginOptions{Options: Options{Credential: credential}}).Start()
	if err == nil || !strings.Contains(err.Error(), "chmod 600") {
		t.Fatal(err)
	}
	_, _, _, err = renewed("192.0.2.1:1", writtenCredential(t, `token = "x"`), nil)
	if err == nil || !strings.Contains(err.Error(), "plain text: write tls:192.0.2.1:1") {
		t.Fatal(err)
	}
}

func writtenCredential(t *testing.T, text string) string {
	path := filepath.Join(t.TempDir(), "own.toolbus")
	check(t, os.WriteFile(path, []byte(text), 0o600))
	return path
}

func TestACredentialIsReadAsTheBusWritesIt(t *testing.T) {
	text := "# for people\naddress = \"tls:h:1\"\nexpires = 2026-01-01\n'x' = 1\ntoken = 't\"'\nname = \"a\\\"b\"\nca = \"\"\"\n-----BEGIN\nEND\n\"\"\"\n"
	values := must[map[string]string](t)(readCredential(writtenCredential(t, text)))
	equal(t, values, map[string]string{"address": "tls:h:1", "token": `t"`, "name": `a"b`, "ca": "-----BEGIN\nEND\n"})
}

func TestACredentialThatIsAboutToBeCopiedIsUsedAsItWasBefore(t *testing.T) {
	path := writtenCredential(t, `name = "chat"`)
	first, stopFirst := startBus(t)
	second, _ := startBus(t)
	host := NewHost(&HostOptions{Options: Options{Address: first + "," + second, Credential: path, Log: quiet}})
	defer host.Close()
	must[*Listing](t)(host.List(t.Context(), nil))
	check(t, os.Remove(path))
	stopFirst()
	check(t, host.peer.until(t.Context(), func() bool { return host.peer.attached != nil && host.peer.unusable != "" }))

	check(t, os.WriteFile(path, []byte(`token = "x"`), 0o600))
	_, before, _, err := renewed("127.0.0.1:1", path, nil)
	check(t, err)
	for content, expected := range map[string]string{"": "x", `token = "y`: "x", `token = "y"`: "y"} {
		check(t, os.WriteFile(path, []byte(content), 0o600))
		made, _, why, err := renewed("127.0.0.1:1", path, before)
		check(t, err)
		equal(t, []any{made.token, why == ""}, []any{expected, expected == "y"})
	}
}

func TestAPluginThatTheBusRefusesSaysWhyAndRunReturnsIt(t *testing.T) {
	address, _ := startBus(t)
	plugin := NewPlugin("toolbus", &PluginOptions{Options: Options{Address: address, Log: quiet}})
	for _, err := range []error{plugin.Run(t.Context()), plugin.Ready(t.Context())} {
		if refused := new(RequestError); !errors.As(err, &refused) || refused.Code != "PERMISSION_DENIED" {
			t.Fatal(err)
		}
	}
}

func TestWithoutABusACallIsRefusedAtItsDeadlineAndAListingSaysWhereItLooked(t *testing.T) {
	host := NewHost(&HostOptions{Options: Options{Address: "127.0.0.1:1, 127.0.0.1:1", Log: quiet}})
	defer host.Close()
	failure := must[*Result](t)(host.Call(t.Context(), "x", nil, &CallOptions{Timeout: 50 * time.Millisecond})).Error
	equal(t, []any{failure.Code, failure.Stage, failure.RetrySafe}, []any{CodeUnavailable, StageNotDispatched, true})
	ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
	defer cancel()
	_, err := host.List(ctx, nil)
	if lost := new(PeerLost); !errors.As(err, &lost) || !strings.Contains(err.Error(), "answered at 127.0.0.1:1 in time") {
		t.Fatal(err)
	}
	host.Close()
	equal(t, must[*Result](t)(host.Call(t.Context(), "x", nil, nil)).Error.Message, "this peer has left the bus")
}

func TestABusThatHangsEndsWhatWaitsForIt(t *testing.T) {
	address, process, _ := startProcess(t)
	host := NewHost(&HostOptions{Options: Options{Address: address, Log: quiet}})
	check(t, host.Ready(t.Context()))
	host.peer.mutex.Lock()
	host.peer.link.connection.close()
	host.peer.mutex.Unlock()
	must[*Listing](t)(host.List(t.Context(), nil)) // on the next connection
	check(t, process.Signal(syscall.SIGSTOP))
	defer process.Signal(syscall.SIGCONT)
	var calls sync.WaitGroup
	for range 16 { // more than the sockets hold
		calls.Go(func() {
			result := must[*Result](t)(host.Call(t.Context(), "x", fmt.Sprintf("{%1000000s}", ""), &CallOptions{Timeout: 100 * time.Millisecond}))
			equal(t, []any{result.Error.Code, result.Error.Stage, result.Error.RetrySafe}, []any{CodeDeadlineExceeded, StageUnknown, false})
		})
	}
	calls.Wait()
	ctx, cancel := context.WithTimeout(t.Context(), 100*time.Millisecond)
	defer cancel()
	_, err := host.List(ctx, nil)
	if lost := new(PeerLost); !errors.As(err, &lost) || lost.Code != "DEADLINE_EXCEEDED" {
		t.Fatal(err)
	}
	began := time.Now()
	host.Close()
	equal(t, time.Since(began) < 4*closeTime, true) // on a busy machine
}

func TestAfterARestartOfTheBusTheToolsAreBackAndACallThatWaitedIsAnswered(t *testing.T) {
	folder := must[string](t)(os.MkdirTemp("", "bus")) // private, and with a path that is short enough for a socket
	defer os.RemoveAll(folder)
	socket := filepath.Join(folder, "bus.sock")
	_, stop := startBus(t, "--grpc", "unix:"+socket)
	own := Options{Address: "unix:" + socket, Log: quiet}
	plugin := NewPlugin("weather", &PluginOptions{Options: own})
	check(t, AddTool(plugin, Tool{Name: "get_weather"}, getWeather))
	check(t, plugin.Ready(t.Context()))
	defer plugin.Close(t.Context())
	host := NewHost(&HostOptions{Options: own})
	defer host.Close()
	equal(t, must[*Result](t)(host.Call(t.Context(), "get_weather", place{"Paris", 1}, nil)).IsError, false)
	stop()
	answered := make(chan *Result)
	go func() {
		result, _ := host.Call(t.Context(), "get_weather", place{"Paris", 1}, &CallOptions{Timeout: 5 * time.Minute})
		answered <- result
	}()
	startBus(t, "--grpc", "unix:"+socket)
	equal(t, (<-answered).OutputJSON, `{"city":"Paris","days":["sunny"]}`)
}

// counted counts the lines of a log.
type counted struct{ lines atomic.Int32 }

func (c *counted) Write(line []byte) (int, error) {
	c.lines.Add(1)
	return len(line), nil
}

func TestWithSeveralAddressesAPluginIsAtEachBusAndAHostGoesOnAtTheNext(t *testing.T) {
	first, stopFirst := startBus(t)
	second, stopSecond := startBus(t)
	address, log := first+", "+second, &counted{}
	plugin := NewPlugin("several", &PluginOptions{Options: Options{Address: address, Log: quiet}})
	defer plugin.Close(t.Context())
	where := func(ctx context.Context, in map[string]any) (any, error) {
		result, err := ScopeOf(ctx).Call(ctx, "echo", in, nil)
		return json.RawMessage(result.OutputJSON), err
	}
	echo := func(_ context.Context, in map[string]any) (any, error) { return in, nil }
	check(t, AddTool(plugin, Tool{Name: "where"}, where))
	check(t, AddTool(plugin, Tool{Name: "echo"}, echo))
	check(t, plugin.Ready(t.Context()))
	answer := func(host *Host, tool string) string {
		for { // until the tool is there
			if result := must[*Result](t)(host.Call(t.Context(), tool, `{"a":1}`, nil)); !result.IsError {
				return result.OutputJSON
			}
		}
	}
	for _, each := range []string{first, second} {
		only := NewHost(&HostOptions{Options: Options{Address: each, Log: quiet}})
		equal(t, answer(only, "where"), `{"a":1}`)
		only.Close()
	}
	host := NewHost(&HostOptions{Options: Options{Address: address, Log: slog.New(slog.NewTextHandler(log, nil))}})
	defer host.Close()
	check(t, host.Ready(t.Context()))
	stopFirst()
	equal(t, len(must[*Listing](t)(host.List(t.Context(), &ListOptions{Names: []string{"echo"}})).Tools), 1)
	equal(t, answer(host, "where"), `{"a":1}`)
	equal(t, must[*Result](t)(plugin.Call(t.Context(), "where", `{"a":1}`, nil)).IsError, false)
	check(t, AddTool(plugin, Tool{Name: "late"}, echo))
	equal(t, answer(host, "late"), `{"a":1}`)
	equal(t, plugin.RemoveTool("late"), true)
	stopSecond()
	result := must[*Result](t)(host.Call(t.Context(), "where", `{"a":1}`, &CallOptions{Timeout: 2 * time.Second}))
	equal(t, result.Error.Stage, StageNotDispatched)
	if lines := log.lines.Load(); lines < 2 || lines > 7 {
		t.Fatalf("each failure is logged once, and not again with each attempt: %d lines", lines)
	}
}

func TestANameOfDNSStandsForAllItsBuses(t *testing.T) {
	first, stopFirst := startBus(t)
	second, _ := startBus(t)
	named := func(address string) string { return "dns:localhost:" + address[strings.LastIndex(address, ":")+1:] }
	plugin := NewPlugin("named", &PluginOptions{Options: Options{Address: named(first), Log: quiet}})
	defer plugin.Close(t.Context())
	check(t, AddTool(plugin, Tool{Name: "echo"}, func(_ context.Context, in map[string]any) (any, error) { return in, nil }))
	check(t, plugin.Ready(t.Context()))
	host := NewHost(&HostOptions{Options: Options{Address: named(first) + "," + named(second), Log: quiet}})
	defer host.Close()
	answer := func() string {
		for { // until the tool is there
			if result := must[*Result](t)(host.Call(t.Context(), "echo", `{"a":1}`, nil)); !result.IsError {
				return result.OutputJSON
			}
		}
	}
	equal(t, answer(), `{"a":1}`)
	plugin.attach([]string{second}) // as if DNS had another answer
	stopFirst()
	equal(t, answer(), `{"a":1}`)
	buses := must[*addresses](t)(readAddresses("unix:/a,b, dns:mtls:localhost:7"))
	found := must[[]string](t)(buses.lookUp(t.Context()))
	equal(t, []any{found[0], slices.Contains(found, "mtls:localhost@127.0.0.1:7")}, []any{"unix:/a,b", true})
}

func TestAPluginThatIsClosedBeforeDNSHasAnsweredEnds(t *testing.T) {
	plugin := NewPlugin("early", &PluginOptions{Options: Options{Address: "dns:nothing.invalid:1", Log: quiet}})
	ended := make(chan error, 2)
	go func() { ended <- plugin.Run(t.Context()) }()
	go func() {
		if lost := new(PeerLost); errors.As(plugin.Ready(context.Background()), &lost) && lost.Code == "UNAVAILABLE" {
			ended <- nil
		} else {
			ended <- errors.New("ready without a bus")
		}
	}()
	canceled, cancel := context.WithCancel(t.Context())
	cancel()
	equal(t, plugin.Ready(canceled), context.Canceled)
	check(t, plugin.Close(t.Context()))
	check(t, <-ended)
	check(t, <-ended)
}

func TestABusThatDoesNotAnswerForTheSakeOfTLSIsExplained(t *testing.T) {
	server := httptest.NewUnstartedServer(nil)
	server.EnableHTTP2 = true
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	server.StartTLS()
	defer server.Close()
	address := server.Listener.Addr().String()
	for own, expected := range map[string]string{address: "write tls:" + address, "tls:" + address: "not signed by an authority"} {
		host := NewHost(&HostOptions{Options: Options{Address: own, Log: quiet}})
		defer host.Close()
		host.peer.begin()
		check(t, host.peer.until(t.Context(), func() bool { return strings.Contains(host.peer.shown[own].why, expected) }))
	}
	if _, reached := whyUnanswered("127.0.0.1:1", "", nil); reached {
		t.Fatal("nothing listens there")
	}
}

func TestToolsThatDoNotFitIntoOneMessageAreOfferedByFurtherOnes(t *testing.T) {
	address, _ := startBus(t)
	plugin := NewPlugin("many", &PluginOptions{Options: Options{Address: address, Log: quiet}})
	const count = 70
	for i := range count {
		tool := Tool{Name: fmt.Sprintf("tool_%d", i), Metadata: map[string]string{"text": strings.Repeat("x", 250_000)}}
		if i == count-1 {
			tool.Parameters = json.RawMessage(`{"type":"strin"}`)
		}
		check(t, AddTool(plugin, tool, getWeather))
	}
	check(t, plugin.Ready(t.Context()))
	defer plugin.Close(t.Context())
	equal(t, plugin.Refused()[0].Name, "tool_69")
	host := NewHost(&HostOptions{Options: Options{Address: address, Log: quiet}})
	defer host.Close()
	equal(t, len(must[*Listing](t)(host.List(t.Context(), nil)).Tools), count-1)
	equal(t, must[*Result](t)(host.Call(t.Context(), "tool_68", place{"Oslo", 1}, nil)).IsError, false)
}
