// Command load keeps calls in flight by a host of this package, for `make bench ARGS=clients`.
//
//	go build -o build/load ./load && build/load ADDRESS TOOL ARGUMENTS IN_FLIGHT WARM_UP SECONDS
//
// It prints `begun` after the warm-up, and then a line of JSON: calls a second, and the quantiles of their times.
package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"toolbus"
)

func main() {
	number := func(place int) float64 {
		value, err := strconv.ParseFloat(os.Args[place], 64)
		check(err)
		return value
	}
	address, tool, arguments, inFlight := os.Args[1], os.Args[2], json.RawMessage(os.Args[3]), int(number(4))
	length := func(place int) time.Duration { return time.Duration(number(place) * float64(time.Second)) }
	host := toolbus.NewHost(&toolbus.HostOptions{Options: toolbus.Options{Address: address, MaxInFlight: 4096}})
	check(host.Ready(context.Background()))
	begin := time.Now().Add(length(5))
	end := begin.Add(length(6))
	took := make([][]float64, inFlight) // of each caller, in microseconds
	var calling sync.WaitGroup
	for caller := range took {
		calling.Go(func() {
			for began := time.Now(); began.Before(end); {
				result, err := host.Call(context.Background(), tool, arguments, nil)
				check(err)
				check(result.Unwrap(nil))
				ended := time.Now()
				if began.After(begin) {
					took[caller] = append(took[caller], float64(ended.Sub(began))/1e3)
				}
				began = ended
			}
		})
	}
	time.Sleep(time.Until(begin))
	fmt.Println("begun")
	calling.Wait()
	seconds := time.Since(begin).Seconds()
	all := slices.Concat(took...)
	slices.Sort(all)
	at := func(share float64) float64 { return all[int(float64(len(all)-1)*share)] }
	check(json.NewEncoder(os.Stdout).Encode(map[string]float64{
		"calls_per_second": float64(len(all)) / seconds, "p50_us": at(0.5), "p99_us": at(0.99), "calls": float64(len(all)),
	}))
	_, _ = os.Stdin.Read(make([]byte, 1)) // whoever started this reads the clock of the processor first
}

func check(err error) {
	if err != nil {
		fmt.Fprintln(os.Stderr, strings.TrimSpace(err.Error()))
		os.Exit(1)
	}
}
