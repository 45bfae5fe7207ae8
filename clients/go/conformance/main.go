// Command conformance offers the tools of a client under test, for `toolbus dev conformance`, with this package.
//
//	go build -o build/conformance ./conformance && toolbus dev conformance -- clients/go/build/conformance
//
// It ends with 0 after SIGTERM or a final drain of the bus, with 1 when the bus refused it.
package main

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"os"
	"runtime"
	"slices"
	"strings"
	"sync"
	"time"

	"encoding/json"

	"toolbus"
)

const lateTime = 50 * time.Millisecond // after its result a call of late_progress reports

var (
	plugin = toolbus.NewPlugin("conformance", nil)
	object = json.RawMessage(`{"type":"object"}`)
	mutex  sync.Mutex // guards hosts and meeting
	hosts  = map[string]*toolbus.Host{}
	// The calls of meet that wait for the others: each closes its channel.
	meeting []chan struct{}
)

func offer[In, Out any](name, description string, handler func(context.Context, In) (Out, error)) {
	tool := toolbus.Tool{Name: name, Description: description, Parameters: object, Replace: true}
	if err := toolbus.AddTool(plugin, tool, handler); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

type none = map[string]any

func echo(_ context.Context, arguments json.RawMessage) (json.RawMessage, error) {
	return arguments, nil
}

func main() {
	offer("echo", "Returns its arguments.", echo)
	offer("fail", "Fails with `message`.", func(_ context.Context, in struct{ Message string }) (any, error) {
		return nil, errors.New(in.Message)
	})
	offer("slow", "Reports progress once, then works until it is cancelled.", func(ctx context.Context, _ none) (any, error) {
		toolbus.ScopeOf(ctx).Progress(0, 0, "")
		<-ctx.Done()
		fmt.Fprintln(os.Stderr, "slow stopped")
		return nil, ctx.Err()
	})
	offer("steps", "Reports `count` steps of progress, then returns the count.", steps)
	offer("meet", "Returns once `people` calls of it run at the same time.", meet)
	offer("relay", "Calls the tool `name` with `arguments` through the bus and returns its output.", relay)
	offer("context", "Returns the context of its call.", func(ctx context.Context, _ none) (any, error) {
		own := toolbus.ScopeOf(ctx).Context()
		return map[string]any{"user_id": own.UserID, "attributes": own.Attributes}, nil
	})
	offer("chunks", "Sends each of `texts` as a piece of the output, and returns them joined.",
		func(_ context.Context, in struct{ Texts []string }) (iter.Seq[string], error) {
			return slices.Values(in.Texts), nil
		})
	offer("picture", "Returns a text and an image.", func(context.Context, none) (toolbus.Reply, error) {
		image := toolbus.Image([]byte("\x89PNG\r\n\x1a\n"), "image/png")
		return toolbus.Reply{Output: "a picture", Content: []toolbus.Content{image}}, nil
	})
	offer("ask", "Asks two questions, one after the other, and returns both answers.", ask)
	offer("big", "Returns a text of `bytes` letters.", func(_ context.Context, in struct{ Bytes int }) (string, error) {
		return strings.Repeat("x", in.Bytes), nil
	})
	offer("late_progress", "Reports progress after it has returned.", func(ctx context.Context, _ none) (any, error) {
		time.AfterFunc(lateTime, func() { toolbus.ScopeOf(ctx).Progress(0, 0, "") })
		return nil, nil
	})
	offer("offer", "Offers another tool `name` that returns its arguments.", func(_ context.Context, in struct{ Name string }) (any, error) {
		offer(in.Name, "Returns its arguments.", echo)
		return nil, nil
	})
	offer("withdraw", "Withdraws the tool `name`.", func(_ context.Context, in struct{ Name string }) (any, error) {
		plugin.RemoveTool(in.Name)
		return nil, nil
	})
	offer("record", "Appends `text` as a line to `file`, works for `seconds`, and returns the text.", record)
	offer("about", "Returns name, version, language and roles of this client.", func(context.Context, none) (any, error) {
		roles := []string{"plugin", "host", "remote"}
		language := "go " + strings.TrimPrefix(runtime.Version(), "go")
		return map[string]any{"name": "clients/go", "version": toolbus.Version, "language": language, "roles": roles}, nil
	})
	offer("host", "Makes a call by a host of its own, lists, watches, or closes that host.", host)
	err := plugin.Run(context.Background())
	mutex.Lock()
	defer mutex.Unlock()
	for _, each := range hosts {
		each.Close()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func steps(ctx context.Context, in struct{ Count int }) (any, error) {
	for step := 1; step <= in.Count; step++ {
		toolbus.ScopeOf(ctx).Progress(float64(step), float64(in.Count), fmt.Sprintf("step %d", step))
	}
	return map[string]int{"count": in.Count}, nil
}

func record(ctx context.Context, in struct {
	File, Text string
	Seconds    float64
}) (string, error) {
	file, err := os.OpenFile(in.File, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	defer file.Close()
	if _, err = file.WriteString(in.Text + "\n"); err != nil {
		return "", err
	}
	time.Sleep(time.Duration(in.Seconds * float64(time.Second)))
	return in.Text, nil
}

func meet(ctx context.Context, in struct{ People int }) (any, error) {
	own := make(chan struct{})
	mutex.Lock()
	if meeting = append(meeting, own); len(meeting) >= in.People {
		for _, each := range meeting {
			close(each)
		}
		meeting = nil
	}
	mutex.Unlock()
	select {
	case <-own:
		return map[string]int{"met": in.People}, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

func relay(ctx context.Context, in struct {
	Name      string
	Arguments json.RawMessage
}) (json.RawMessage, error) {
	result, err := toolbus.ScopeOf(ctx).Call(ctx, in.Name, in.Arguments, nil)
	if err != nil {
		return nil, err
	}
	if result.Error != nil {
		return nil, errors.New(result.Error.Message)
	}
	return json.RawMessage(result.OutputJSON), nil
}

func ask(ctx context.Context, _ none) (any, error) {
	scope := toolbus.ScopeOf(ctx)
	form := map[string]any{"text": map[string]any{"type": "string"}}
	first, err := scope.ElicitKey("first", "first?", form)
	if err != nil {
		return nil, err
	}
	second, err := scope.ElicitKey("second", "second?", form)
	if err != nil {
		return nil, err
	}
	return map[string]any{"first": first, "second": second, "accepts": scope.Accepts()}, nil
}

// drive is what the tool host gets.
type drive struct {
	Address     string
	Name        string
	Arguments   json.RawMessage
	Timeout     float64
	CancelAfter *float64 `json:"cancel_after"`
	Form        map[string]any
	List        bool
	Watch       int
	Close       bool
}

func host(ctx context.Context, in drive) (any, error) {
	mutex.Lock()
	host := hosts[in.Address]
	if host == nil {
		options := toolbus.HostOptions{Source: "conformance-host"}
		options.Address = in.Address
		host = toolbus.NewHost(&options)
		hosts[in.Address] = host
	}
	if in.Close {
		delete(hosts, in.Address)
	}
	mutex.Unlock()
	switch {
	case in.Close:
		host.Close()
		return nil, nil
	case in.List:
		listing, err := host.List(ctx, nil)
		if err != nil {
			return nil, err
		}
		return map[string]any{"tools": names(listing.Tools), "revision": listing.Revision}, nil
	case in.Watch > 0:
		changes := []map[string]any{}
		for change, err := range host.Watch(ctx) {
			if err != nil {
				return nil, err
			}
			removed := []string{}
			for _, each := range change.Removed {
				removed = append(removed, each.Name)
			}
			changes = append(changes, map[string]any{
				"full": change.Full, "added": names(change.Added), "changed": names(change.Changed), "removed": removed,
			})
			if len(changes) == in.Watch {
				break
			}
		}
		return map[string]any{"changes": changes}, nil
	}
	return called(ctx, host, in)
}

func names(tools []toolbus.ListedTool) []string {
	names := []string{}
	for _, each := range tools {
		names = append(names, each.Name)
	}
	return names
}

// called makes a call, and returns the application's view.
func called(_ context.Context, host *toolbus.Host, in drive) (any, error) {
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	if in.CancelAfter != nil {
		time.AfterFunc(time.Duration(*in.CancelAfter*float64(time.Second)), cancel)
	}
	progress, chunks, content := [][]any{}, []string{}, []toolbus.Content{}
	started := time.Now()
	options := toolbus.CallOptions{
		Timeout: time.Duration(in.Timeout * float64(time.Second)),
		OnProgress: func(item toolbus.Progress) {
			content = append(content, item.Content...)
			if item.Chunk != "" {
				chunks = append(chunks, item.Chunk)
			} else {
				progress = append(progress, []any{item.Progress, item.Total, item.Message})
			}
		},
	}
	if in.Form != nil {
		options.OnInput = func(context.Context, toolbus.AskedQuestion) (any, error) { return in.Form, nil }
	}
	result, err := host.Call(ctx, in.Name, in.Arguments, &options)
	seen := map[string]any{"cancelled": false, "output": nil, "progress": progress, "chunks": chunks}
	failure := &toolbus.CallError{}
	if errors.Is(err, context.Canceled) {
		seen["cancelled"], seen["failed"] = true, false
	} else if err != nil {
		return nil, err
	} else {
		content = append(content, result.Content...)
		seen["failed"], seen["output"] = result.IsError, json.RawMessage(result.OutputJSON)
		if result.Error != nil {
			failure = result.Error
		}
	}
	types := []string{}
	for _, part := range content {
		if part.Type == "text" {
			part.MIMEType = "text/plain"
		}
		types = append(types, part.MIMEType)
	}
	seen["code"], seen["stage"], seen["message"] = failure.Code, failure.Stage, failure.Message
	seen["retry_safe"], seen["content"], seen["seconds"] = failure.RetrySafe, types, time.Since(started).Seconds()
	return seen, nil
}
