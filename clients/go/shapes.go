package toolbus

import (
	"cmp"
	"encoding/json"
	"math"
	"strings"
	"time"

	"toolbus/internal/pb"
)

// This file converts the messages of the protocol to the values of programs, and back.

// ListedTool is a tool as the bus lists it.
type ListedTool struct {
	Name        string
	Description string
	// Parameters is the JSON Schema of the arguments.
	Parameters json.RawMessage
	// OutputSchema is the JSON Schema of the output; nil where the tool declares none.
	OutputSchema json.RawMessage
	Source       string
	// State is "live", "suspect", "draining", "offline", "waiting" or "unconfirmed".
	State string
	Roles []string
	// SchemaHash identifies the declaration; see CallOptions.
	SchemaHash  string
	LastError   string
	Sessions    int
	InFlight    int
	Stuck       int // calls that have ended for their caller, but not for the plugin
	Warnings    []string
	DisplayName string
	// Metadata is JSON of the author for hosts; nil without any.
	Metadata                 json.RawMessage
	ReadOnly                 bool // of its declaration, as the following ones
	MinLevel                 int
	Needs                    []string
	AllowRepeat, DirectReply bool
}

// ToolRef names a tool of a source.
type ToolRef struct{ Name, Source string }

// CatalogChange is one step of the catalog: with Full, Added is everything.
type CatalogChange struct {
	Revision       uint64
	Full           bool
	Added, Changed []ListedTool
	Removed        []ToolRef
}

// Notification is what a plugin tells a user outside a call.
type Notification struct {
	Number uint64
	Source string
	User   string // empty for all users
	Text   string
	Data   json.RawMessage // nil without any
	Time   time.Time
	Lost   uint64 // how many before it this host will not get
}

// failed returns a result that is a failure.
func failed(code Code, stage Stage, message string) *pb.ToolResult {
	return &pb.ToolResult{IsError: true, Error: &pb.CallError{
		Code:    pb.ErrorCode(pb.ErrorCode_value["ERROR_CODE_"+string(code)]),
		Stage:   pb.CallStage(pb.CallStage_value["CALL_STAGE_"+string(stage)]),
		Message: strings.ToValidUTF8(message, "�"),
	}}
}

// failedAt returns a failure that names the limit which was hit.
func failedAt(code Code, stage Stage, message, limit string, value float64) *pb.ToolResult {
	result := failed(code, stage, message)
	result.Error.Limit = &pb.Limit{Name: limit, Value: value}
	return result
}

// failure returns the result of a call that this library refuses.
func failure(code Code, stage Stage, message, reason string) *Result {
	return &Result{OutputJSON: "null", IsError: true, Error: &CallError{Code: code, Stage: stage, Message: message, Reason: reason}}
}

func resultFromWire(message *pb.ToolResult) *Result {
	result := &Result{CallID: message.CallId, OutputJSON: cmp.Or(message.OutputJson, "null"), Content: contentsFromWire(message.Content)}
	if message.IsError || message.Error != nil {
		result.IsError, result.Error = true, errorFromWire(message.Error)
	} else {
		result.InputRequestsJSON, result.RequestState = message.InputRequestsJson, message.RequestState
	}
	return result
}

func errorFromWire(message *pb.CallError) *CallError {
	if message == nil {
		return &CallError{Code: CodeTool, Stage: StageAccepted}
	}
	failure := &CallError{
		Code:    Code(strings.TrimPrefix(message.Code.String(), "ERROR_CODE_")), // the number, if a later bus sends it
		Stage:   Stage(strings.TrimPrefix(message.Stage.String(), "CALL_STAGE_")),
		Message: message.Message, RetrySafe: message.RetrySafe, RetryAfter: seconds(message.RetryAfterSeconds), Reason: message.Reason,
	}
	if message.Limit != nil {
		failure.Limit = &Limit{message.Limit.Name, message.Limit.Value}
	}
	return failure
}

func progressFromWire(item *pb.ToolProgress) Progress {
	return Progress{item.Progress, item.Total, item.Message, item.OutputChunk, contentsFromWire(item.Content)}
}

func contentsToWire(parts []Content) []*pb.ContentBlock {
	var blocks []*pb.ContentBlock
	for _, part := range parts {
		block := &pb.ContentBlock{AnnotationsJson: string(part.Annotations)}
		switch part.Type {
		case "image":
			block.Kind = &pb.ContentBlock_Image{Image: &pb.ImageContent{Data: part.Data, MimeType: part.MIMEType}}
		case "audio":
			block.Kind = &pb.ContentBlock_Audio{Audio: &pb.AudioContent{Data: part.Data, MimeType: part.MIMEType}}
		case "link":
			link := &pb.ResourceLink{Uri: part.URI, Name: part.Name, Description: part.Description, MimeType: part.MIMEType}
			block.Kind = &pb.ContentBlock_ResourceLink{ResourceLink: link}
		case "resource":
			resource := &pb.EmbeddedResource{Uri: part.URI, MimeType: part.MIMEType}
			if resource.Body = &(pb.EmbeddedResource_Text{Text: part.Text}); part.Data != nil {
				resource.Body = &pb.EmbeddedResource_Data{Data: part.Data}
			}
			block.Kind = &pb.ContentBlock_Resource{Resource: resource}
		default:
			block.Kind = &pb.ContentBlock_Text{Text: &pb.TextContent{Text: part.Text}}
		}
		blocks = append(blocks, block)
	}
	return blocks
}

func contentsFromWire(blocks []*pb.ContentBlock) []Content {
	var parts []Content
	for _, block := range blocks {
		var part Content
		switch kind := block.Kind.(type) {
		case *pb.ContentBlock_Image:
			part = Image(kind.Image.GetData(), kind.Image.GetMimeType())
		case *pb.ContentBlock_Audio:
			part = Audio(kind.Audio.GetData(), kind.Audio.GetMimeType())
		case *pb.ContentBlock_ResourceLink:
			part = Link(kind.ResourceLink.GetUri(), kind.ResourceLink.GetName())
			part.Description, part.MIMEType = kind.ResourceLink.GetDescription(), kind.ResourceLink.GetMimeType()
		case *pb.ContentBlock_Resource:
			part = Resource(kind.Resource.GetUri(), kind.Resource.GetText(), kind.Resource.GetMimeType())
			if body, isData := kind.Resource.GetBody().(*pb.EmbeddedResource_Data); isData {
				part = File(part.URI, body.Data, part.MIMEType)
			}
		default:
			part = Text(block.GetText().GetText())
		}
		part.Annotations = rawOrNil(block.AnnotationsJson)
		parts = append(parts, part)
	}
	return parts
}

func contextToWire(context *CallContext) *pb.CallContext {
	if context == nil {
		return nil
	}
	message := &pb.CallContext{
		UserId: context.UserID, Attributes: context.Attributes, MemberJson: string(context.Member),
		Traceparent: context.Traceparent, Unplanned: context.Unplanned,
	}
	for _, each := range context.Messages {
		message.Messages = append(message.Messages, &pb.ContextMessage{Role: each.Role, Content: each.Content, Name: each.Name})
	}
	return message
}

func contextFromWire(message *pb.CallContext) CallContext {
	context := CallContext{
		UserID: message.GetUserId(), Attributes: message.GetAttributes(), Member: rawOrNil(message.GetMemberJson()),
		Traceparent: message.GetTraceparent(), Unplanned: message.GetUnplanned(),
	}
	if context.Attributes == nil {
		context.Attributes = map[string]string{}
	}
	for _, each := range message.GetMessages() {
		context.Messages = append(context.Messages, ContextMessage{each.Role, each.Content, each.Name})
	}
	return context
}

func listedFromWire(messages []*pb.ListedTool) []ListedTool {
	var tools []ListedTool
	for _, listed := range messages {
		tool := cmp.Or(listed.Tool, &pb.Tool{})
		tools = append(tools, ListedTool{
			Name: tool.Name, Description: tool.Description,
			Parameters: json.RawMessage(cmp.Or(tool.ParametersJson, "{}")), OutputSchema: rawOrNil(tool.OutputSchemaJson),
			Source: listed.Source, Roles: listed.Roles, SchemaHash: listed.SchemaHash, LastError: listed.LastError,
			State:    strings.ToLower(strings.TrimPrefix(listed.SessionState.String(), "SESSION_STATE_")),
			Sessions: int(listed.Sessions), InFlight: int(listed.InFlight), Stuck: int(listed.Stuck), Warnings: listed.Warnings,
			DisplayName: tool.DisplayName, Metadata: rawOrNil(tool.MetadataJson), ReadOnly: tool.Annotations.GetReadOnly(),
			MinLevel: int(tool.MinLevel), Needs: tool.Needs, AllowRepeat: tool.AllowRepeat, DirectReply: tool.DirectReply,
		})
	}
	return tools
}

func changeFromWire(message *pb.CatalogChange) CatalogChange {
	added, changed := listedFromWire(message.Added), listedFromWire(message.Changed)
	change := CatalogChange{Revision: message.Revision, Full: message.Full, Added: added, Changed: changed}
	for _, each := range message.Removed {
		change.Removed = append(change.Removed, ToolRef{each.Name, each.Source})
	}
	return change
}

func notificationFromWire(message *pb.Notification) Notification {
	whole, part := math.Modf(message.TimeSeconds)
	return Notification{
		Number: message.Number, Source: message.Source, User: message.UserId, Text: message.Text,
		Data: rawOrNil(message.DataJson), Time: time.Unix(int64(whole), int64(part*1e9)), Lost: message.Lost,
	}
}

func rawOrNil(text string) json.RawMessage {
	if text == "" {
		return nil
	}
	return json.RawMessage(text)
}

// seconds returns a length of time of the protocol.
func seconds(value float64) time.Duration { return time.Duration(value * float64(time.Second)) }
