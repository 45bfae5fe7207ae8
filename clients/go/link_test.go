package toolbus

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"reflect"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"

	"toolbus/internal/pb"
)

func testLink() *link {
	return newLink(new(sync.Mutex), nil, func(error) {}, 0)
}

func take(t *testing.T, link *link) *pb.InvokeRequest {
	t.Helper()
	request := new(pb.InvokeRequest)
	check(t, proto.Unmarshal(link.take(), request))
	return request
}

func TestAMessageHasAtMost128ItemsInTheirOrder(t *testing.T) {
	link := testLink()
	for range 129 {
		link.putMessage(fieldProgress, &pb.ToolProgress{CallId: "7"})
	}
	link.putMessage(fieldResults, &pb.ToolResult{CallId: "7"})
	first, second := take(t, link), take(t, link)
	equal(t, []int{len(first.Progress), len(first.Results), len(second.Progress), len(second.Results)}, []int{128, 0, 1, 1})
	equal(t, link.take() == nil, true)
}

func TestAMessageHasAtMostOneMiBOrOneItem(t *testing.T) {
	link := testLink()
	for _, size := range []int{10, 2 * messageBytes, messageBytes / 2, messageBytes / 2} {
		link.putMessage(fieldResults, &pb.ToolResult{OutputJson: strings.Repeat("x", size)})
	}
	for range 4 {
		equal(t, len(take(t, link).Results), 1)
	}
}

func TestASecondAttachAndASecondHeartbeatBeginAnotherMessage(t *testing.T) {
	link := testLink()
	for sequence := range uint64(2) {
		link.putMessage(fieldHeartbeat, &pb.Heartbeat{Sequence: sequence + 1})
	}
	link.putMessage(fieldAttach, &pb.Attach{})
	equal(t, take(t, link).Heartbeat.Sequence, 1)
	second := take(t, link)
	equal(t, second.Heartbeat.Sequence, 2)
	equal(t, second.Attach != nil, true)
}

func TestResultsThatWaitForOthersGoWithTheNextItemOrAfterTheirTime(t *testing.T) {
	link := testLink()
	add := func(wait bool) {
		link.mutex.Lock()
		defer link.mutex.Unlock()
		link.put(fieldResults, nil, "", wait)
	}
	add(true)
	add(true)
	link.mutex.Lock()
	early := link.holding && link.take() == nil
	link.mutex.Unlock()
	<-link.ready // after their time
	link.mutex.Lock()
	equal(t, len(take(t, link).Results), 2)
	link.mutex.Unlock()
	if !early {
		t.Skip("this machine was too slow to look before their time")
	}
	add(true)
	add(false)
	<-link.ready
	link.mutex.Lock()
	defer link.mutex.Unlock()
	equal(t, len(take(t, link).Results), 2)
}

func TestTheMomentThatResultsWaitBeginsWithTheFirstOfTheirMessage(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		link := testLink()
		put := func(wait bool) {
			link.mutex.Lock()
			defer link.mutex.Unlock()
			link.put(fieldResults, nil, "", wait)
		}
		results := func() (count int) {
			link.mutex.Lock()
			defer link.mutex.Unlock()
			if message := link.take(); message != nil {
				request := new(pb.InvokeRequest)
				check(t, proto.Unmarshal(message, request))
				count = len(request.Results)
			}
			return count
		}
		put(true)
		time.Sleep(hold / 2)
		put(false)
		equal(t, results(), 2)
		put(true)
		time.Sleep(hold * 3 / 4) // the moment of the first ones is over
		synctest.Wait()
		equal(t, results(), 0)
		time.Sleep(hold / 2)
		synctest.Wait()
		equal(t, results(), 1)
	})
}

func TestAClosedOutboxDropsFurtherItemsAndStillGivesOutTheEarlierOnes(t *testing.T) {
	link := testLink()
	link.put(fieldCalls, nil, "c1", false)
	equal(t, link.unwrittenCalls(), map[string]bool{"c1": true})
	link.close()
	link.put(fieldCalls, nil, "c2", false)
	equal(t, len(take(t, link).Calls), 1)
	equal(t, len(link.unwrittenCalls()), 0)
}

func TestAfterAGracefulEndOfTheStreamItsCallsGoFirstAndOneWhoseTimeIsOverIsRefused(t *testing.T) {
	p := newPeer("x", Options{Log: quiet}, nil, role{})
	p.link, p.attached = testLink(), &pb.Attached{}
	lost := p.link
	lost.callsInFlight = 9
	now := time.Now()
	var asks []*ask
	for i := range 12 {
		asks = append(asks, &ask{
			fields: &pb.ToolCall{}, signal: make(chan struct{}, 1), started: now.Add(time.Duration(i)), deadline: now.Add(time.Minute),
		})
		p.submit(asks[i])
	}
	asks[0].deadline = now
	p.link, p.attached = nil, nil
	p.lostCalls(lost, true)
	equal(t, asks[0].result.GetError().GetMessage(), "no bus took the call in time")
	equal(t, slices.Equal(p.waiting, asks[1:]), true)
}

// waiting is a log that does something with each text.
type waiting struct {
	slog.Handler
	take func(text string)
}

func (waiting) Enabled(context.Context, slog.Level) bool { return true }

func (w waiting) Handle(_ context.Context, record slog.Record) error {
	w.take(record.Message)
	return nil
}

func TestWhatTakesTheLogsMayWaitForThePeer(t *testing.T) {
	var p *peer
	done, texts := make(chan struct{}), make(chan string)
	log := slog.New(waiting{take: func(text string) {
		<-done
		p.mutex.Lock()
		defer p.mutex.Unlock()
		texts <- text
	}})
	p = newPeer("x", Options{Log: log}, nil, role{})
	p.link = newLink(&p.mutex, nil, func(error) {}, 0)
	for _, name := range []string{"a", "b"} {
		refused := []*pb.RefusedTool{{Name: name, Error: "a fault"}}
		p.receive(&pb.InvokeResponse{Attached: &pb.Attached{Refused: refused, RefusedTotal: 1}}, p.link)
	}
	close(done)
	for _, name := range []string{"a", "b"} {
		equal(t, <-texts, fmt.Sprintf("toolbus: the bus does not offer the tool %q: a fault", name))
	}
}

func TestAfterAStandstillOnlyTheEchoOfTheNewestHeartbeatLetsHeldCallsBegin(t *testing.T) {
	link := testLink()
	link.open(&pb.Attached{Echoes: true})
	equal(t, link.look(), false)
	link.standstill.due = time.Now().Add(-time.Second)
	equal(t, link.look(), true)
	equal(t, take(t, link).Heartbeat.FromPeer, true)
	peer := newPeer("x", Options{Log: quiet}, nil, role{})
	peer.beginCalls([]*pb.ToolCall{{CallId: "1"}, {CallId: "2"}}, link)
	peer.cancelRun("1", "", link)
	equal(t, take(t, link).Results[0].Error.Stage, pb.CallStage_CALL_STAGE_NOT_DISPATCHED)
	equal(t, len(link.standstill.echoed(0)), 0)
	calls := link.standstill.echoed(1)
	equal(t, []string{calls[0].CallId}, []string{"2"})
	equal(t, link.standstill.holding || len(calls) > 1, false)
}

func TestAReaderThatIsFarBehindGetsTheNewestNotificationsAndTheWholeCatalog(t *testing.T) {
	peer := newPeer("x", Options{Log: quiet}, nil, role{})
	notes, changes := []Notification{}, []CatalogChange{}
	peer.notes.readers, peer.catalogs.readers = map[*[]Notification]bool{&notes: true}, map[*[]CatalogChange]bool{&changes: true}
	tool := &pb.ListedTool{Tool: &pb.Tool{Name: "comes_and_goes"}, Source: "x"}
	for number := range uint64(maxUnread + 2) {
		peer.note(&pb.Event{Kind: &pb.Event_Notification{Notification: &pb.Notification{Number: number}}})
		change := &pb.CatalogChange{Revision: number, Added: []*pb.ListedTool{tool}}
		if number%2 == 0 {
			change = &pb.CatalogChange{Revision: number, Removed: []*pb.ToolRef{{Name: "comes_and_goes", Source: "x"}}}
		}
		peer.note(&pb.Event{Kind: &pb.Event_Catalog{Catalog: change}})
	}
	equal(t, []uint64{uint64(len(notes)), notes[0].Number, notes[0].Lost, notes[1].Lost}, []uint64{maxUnread, 2, 2, 0})
	equal(t, []int{len(changes), len(changes[0].Added), len(changes[1].Added), len(peer.order)}, []int{2, 0, 1, 1})
	equal(t, changes[0].Full, true)
}

type tree struct {
	Name     string          `json:"name" enum:"oak,ash" title:"the kind"`
	Children []tree          `json:"children,omitempty" maxItems:"3"`
	Parent   *tree           `json:"parent"`
	Sizes    map[string]int8 `json:"sizes,omitzero"`
	When     time.Time       `json:"when" description:"planted"`
	Extra    any             `json:"extra,omitempty"`
	Level    uint            `json:"level" enum:"1,2"`
	Picture  []byte          `json:"picture,omitempty"`
	Raw      json.RawMessage `json:"raw,omitempty"`
	Note     string          `json:"note" default:"none"`
	Skipped  chan int        `json:"-"`
	private  int
	embedded
}

type embedded struct {
	Own colour `json:"own"`
}

type colour string

func (colour) JSONSchema() map[string]any { return map[string]any{"enum": []string{"red"}} }

func TestTheSchemaOfATypeIsThatOfItsJSON(t *testing.T) {
	schema := must[map[string]any](t)(schemaOf(reflect.TypeFor[tree]()))
	got := decoded(t, must[string](t)(toJSON(schema))).(map[string]any)
	defs := got["$defs"].(map[string]any)["tree"].(map[string]any)
	delete(got, "$defs")
	equal(t, defs, got)
	equal(t, any(got), decoded(t, `{"type":"object","required":["name","when","level","own"],"properties":{
		"name":{"type":"string","enum":["oak","ash"],"title":"the kind"},
		"children":{"type":"array","items":{"$ref":"#/$defs/tree"},"maxItems":3},
		"parent":{"$ref":"#/$defs/tree"},
		"sizes":{"type":"object","additionalProperties":{"type":"integer"}},
		"when":{"type":"string","format":"date-time","description":"planted"},
		"extra":{},
		"level":{"type":"integer","minimum":0,"enum":[1,2]},
		"picture":{"type":"string","contentEncoding":"base64"},
		"raw":{},
		"note":{"type":"string","default":"none"},
		"own":{"enum":["red"]}}}`))
	_ = tree{}.private
}

func TestAResultShowsAModelTheErrorTheOutputAndTheContentEachOnce(t *testing.T) {
	for expected, result := range map[string]*Result{
		"null":                  {OutputJSON: "null"},
		"text\nmore":            {OutputJSON: `"text"`, Content: []Content{Text("text"), Text("more")}},
		`{"a":1}`:               {OutputJSON: `{"a":1}`},
		"broke\n1":              {OutputJSON: "1", Error: &CallError{Code: CodeTool, Message: "broke"}},
		"TOOL":                  {OutputJSON: "null", Error: &CallError{Code: CodeTool}},
		"the tool asks first: ": {InputRequestsJSON: " "},
	} {
		equal(t, strings.TrimSpace(result.Text()), strings.TrimSpace(expected))
	}
}

func TestOutsideOfAHandlerAScopeDropsProgressAndRefusesCalls(t *testing.T) {
	scope := ScopeOf(context.Background())
	scope.Progress(1, 2, "nobody hears this")
	_, err := scope.Call(context.Background(), "x", nil, nil)
	equal(t, err != nil, true)
	_, err = scope.Elicit("Sure?", nil)
	if asks, is := err.(*InputNeeded); !is || len(asks.Questions) != 1 {
		t.Fatal(err)
	}
}
