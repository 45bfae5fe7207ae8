package toolbus

import (
	"context"
	"fmt"
	mathrand "math/rand/v2"
	"net"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"
)

const (
	maxBuses   = 64              // of one address
	lookUpTime = 5 * time.Second // between two look-ups of a name, and for the answer to one
)

var (
	busForm  = regexp.MustCompile(`^(?:m?tls:(?:[^\s:/?#@,\[\]]+@)?)?(?:\[[0-9A-Fa-f:.]+(?:%[\w.-]+)?\]|[^\s:/?#@,\[\]]+):(\d{1,5})$`)
	dnsForm  = regexp.MustCompile(`^dns:((?:m?tls:)?)([^\s:/?#@,\[\]]+):(\d{1,5})$`)
	busBegin = regexp.MustCompile(`^\s*(?:\[|[^:/]*:)`)
)

// addresses are the buses of an address: a list with commas, in which dns: before a name stands for all that DNS has for it.
type addresses struct {
	text     string // as it was written, each bus once
	entries  []entry
	hasNames bool
	turn     int       // where the answers for a name begin, so that hosts spread over the buses
	looked   time.Time // when names were looked up last; zero before
	known    []string
}

// entry is a bus, or a name and the buses that DNS had for it last.
type entry struct {
	prefix, host, port string // of a name
	buses              []string
}

// readAddresses reads an address; the error is a SetupError for one that no connection can use.
func readAddresses(text string) (*addresses, error) {
	var written []string
	for part := range strings.SplitSeq(text, ",") {
		if len(written) > 0 && !busBegin.MatchString(part) {
			written[len(written)-1] += "," + part // of the path of a socket
		} else {
			written = append(written, part)
		}
	}
	if len(written) > maxBuses {
		return nil, setupErrorf("the address has %d buses, it may have %d", len(written), maxBuses)
	}
	a := &addresses{turn: mathrand.IntN(maxBuses)}
	for i, each := range written {
		each = strings.TrimSpace(each)
		written[i] = each
		name, path, _ := strings.Cut(each, ":")
		if found := dnsForm.FindStringSubmatch(each); found != nil && isPort(found[3]) {
			a.entries, a.hasNames = append(a.entries, entry{prefix: found[1], host: found[2], port: found[3]}), true
		} else if found := busForm.FindStringSubmatch(each); found != nil && isPort(found[1]) || name == "unix" && path != "" {
			a.entries = append(a.entries, entry{buses: []string{each}})
		} else if name == "dns" {
			return nil, setupErrorf("the address is %q, it must be dns:NAME:PORT, dns:tls:NAME:PORT or dns:mtls:NAME:PORT", each)
		} else {
			return nil, setupErrorf("the address is %q, it must be HOST:PORT, unix:PATH, tls:HOST:PORT, mtls:HOST:PORT or dns:NAME:PORT", each)
		}
	}
	a.text = strings.Join(unique(written), ", ")
	a.collect()
	return a, nil
}

func isPort(text string) bool {
	port, err := strconv.ParseUint(text, 10, 16)
	return err == nil && port > 0
}

func (a *addresses) collect() {
	a.known = nil
	for _, each := range a.entries {
		a.known = append(a.known, each.buses...)
	}
	a.known = unique(a.known) // at one bus twice this peer would replace itself
	a.known = a.known[:min(len(a.known), maxBuses)]
}

func unique(texts []string) []string {
	var all []string
	for _, each := range texts {
		if !slices.Contains(all, each) {
			all = append(all, each)
		}
	}
	return all
}

// lookUp returns the buses of now. A name without an answer has those of before; the error says why there is none at all.
func (a *addresses) lookUp(ctx context.Context) ([]string, error) {
	if !a.hasNames || len(a.known) > 0 && time.Since(a.looked) < lookUpTime {
		return a.known, nil
	}
	ctx, cancel := context.WithTimeout(ctx, lookUpTime)
	defer cancel()
	var problem error
	for i := range a.entries {
		each := &a.entries[i]
		if each.host == "" {
			continue
		}
		found, err := net.DefaultResolver.LookupHost(ctx, each.host)
		if err != nil {
			problem = fmt.Errorf("DNS has no address for %s: %w", each.host, err)
			continue
		}
		each.buses = nil
		for j := range found {
			bus := net.JoinHostPort(found[(j+a.turn)%len(found)], each.port)
			if each.prefix != "" {
				bus = each.prefix + each.host + "@" + bus // the certificate is that of the name
			}
			each.buses = append(each.buses, bus)
		}
	}
	a.looked = time.Now()
	if a.collect(); len(a.known) == 0 {
		return nil, problem
	}
	return a.known, nil
}
