package toolbus

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"syscall"
	"testing"
)

// The snippets of the README and of the page of the documentation, by the file name in their first line, and what stands
// below each: what the snippet prints. The others are plugins.
var snippet = regexp.MustCompile("(?s)```go\n// (\\S+)\n(.*?)```(?:\n\n```text\n(.*?)```)?")

func TestTheSnippetsOfThePagesRunInAModuleOfTheirOwnAndPrintWhatStandsBelowThem(t *testing.T) {
	folder := t.TempDir()
	own := must[string](t)(os.Getwd())
	run := func(name string, arguments ...string) string {
		t.Helper()
		command := exec.Command(name, arguments...)
		command.Dir = folder
		output, err := command.CombinedOutput()
		if err != nil {
			t.Fatalf("%s %v: %v\n%s", name, arguments, err, output)
		}
		return string(output)
	}
	run("go", "mod", "init", "example")
	run("go", "work", "init", ".", own)
	outputs := map[string]string{} // by program
	for _, page := range []string{"README.md", "../../docs/start/go.md"} {
		text := string(must[[]byte](t)(os.ReadFile(page)))
		for _, found := range snippet.FindAllStringSubmatch(text, -1) {
			program := filepath.Dir(found[1])
			check(t, os.Mkdir(filepath.Join(folder, program), 0o755))
			check(t, os.WriteFile(filepath.Join(folder, found[1]), []byte(found[2]), 0o644))
			outputs[program] = found[3]
			_, body, _ := strings.Cut(found[2], "\n)\n")
			lines := len(regexp.MustCompile(`(?m)^.*\S`).FindAllString(body, -1))
			if limit := map[string]int{"weather": 15, "shouter": 15, "host": 10, "listener": 10}[program]; limit > 0 && lines > limit {
				t.Errorf("%s has %d lines below its imports, at most %d", program, lines, limit)
			}
		}
	}
	equal(t, len(outputs), 6)
	equal(t, run("gofmt", "-l", ".", own), "")
	run("go", "build", "-o", "bin/", "./...")
	address, _ := startBus(t)
	t.Setenv("TOOLBUS_ADDRESS", address)
	host := NewHost(nil)
	defer host.Close()
	var plugins []*exec.Cmd
	for program, output := range outputs {
		if output == "" {
			plugin := exec.Command(filepath.Join(folder, "bin", program))
			plugin.Stderr = os.Stderr
			check(t, plugin.Start())
			defer plugin.Process.Kill()
			plugins = append(plugins, plugin)
		}
	}
	for change, err := range host.Watch(t.Context()) {
		check(t, err)
		if listing := must[*Listing](t)(host.List(t.Context(), nil)); len(listing.Tools) == 5 {
			break
		}
		_ = change
	}
	for program, output := range outputs {
		if output != "" {
			equal(t, run(filepath.Join("bin", program)), output)
		}
	}
	for _, plugin := range plugins {
		check(t, plugin.Process.Signal(syscall.SIGTERM))
		check(t, plugin.Wait())
	}
}

func TestTheGeneratedStubsAreThoseOfTheProtoFiles(t *testing.T) {
	if os.Getenv("PYTHON") == "" {
		t.Skip("PYTHON does not name an interpreter with grpcio-tools")
	}
	folder := t.TempDir()
	if output, err := exec.Command("sh", "generate.sh", folder).CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, output)
	}
	version := regexp.MustCompile(`(?m)^//\s+protoc\s+v\S+`) // of the protoc, which does not change what it writes
	for _, name := range []string{"tool.pb.go", "tool_bus_service.pb.go"} {
		fresh := must[[]byte](t)(os.ReadFile(filepath.Join(folder, name)))
		present := must[[]byte](t)(os.ReadFile(filepath.Join("internal/pb", name)))
		if version.ReplaceAllString(string(fresh), "") != version.ReplaceAllString(string(present), "") {
			t.Errorf("internal/pb/%s is not what the proto files say: run generate.sh and commit the result", name)
		}
	}
}
