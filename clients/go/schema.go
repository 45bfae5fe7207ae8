package toolbus

import (
	"encoding"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"math/big"
	"reflect"
	"strings"
	"time"
)

// SchemaWriter is a type that writes its own JSON Schema; its zero value is asked.
type SchemaWriter interface {
	JSONSchema() map[string]any
}

// Tags of fields that are keywords of JSON Schema. Those of the first list are texts, those of the second JSON.
var (
	textKeywords = []string{"description", "title", "format", "pattern"}
	jsonKeywords = []string{
		"default", "examples", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf",
		"minLength", "maxLength", "minItems", "maxItems", "uniqueItems",
	}
	schemaWriter  = reflect.TypeFor[SchemaWriter]()
	textMarshaler = reflect.TypeFor[encoding.TextMarshaler]()
	jsonMarshaler = reflect.TypeFor[json.Marshaler]()
	known         = map[reflect.Type]map[string]any{
		reflect.TypeFor[time.Time]():       {"type": "string", "format": "date-time"},
		reflect.TypeFor[json.RawMessage](): {},
		reflect.TypeFor[json.Number]():     {"type": "number"},
		reflect.TypeFor[big.Int]():         {"type": "integer"},
		reflect.TypeFor[[]byte]():          {"type": "string", "contentEncoding": "base64"},
	}
)

// schemaOf returns the JSON Schema of a type as encoding/json writes it. The tags of a field may be keywords: description,
// enum:"a,b", default:"1", minimum:"1" … A field is required unless it is a pointer, may be left out, or has a default.
func schemaOf(kind reflect.Type) (map[string]any, error) {
	schema, _, err := walked(kind)
	return schema, err
}

// isPlain tells whether values of a type have no interfaces, whose numbers would lose digits.
func isPlain(kind reflect.Type) bool {
	_, maker, err := walked(kind)
	return err == nil && !maker.isOpen
}

func walked(kind reflect.Type) (map[string]any, *schemaMaker, error) {
	maker := &schemaMaker{names: map[reflect.Type]string{}, used: map[string]bool{}, defs: map[string]any{}}
	schema, err := maker.of(kind)
	if err == nil && len(maker.defs) > 0 {
		schema["$defs"] = maker.defs
	}
	return schema, maker, err
}

type schemaMaker struct {
	names  map[reflect.Type]string // structs that are being written; those that refer to themselves get a place in defs
	used   map[string]bool
	defs   map[string]any
	isOpen bool // whether there may be interfaces
}

func (m *schemaMaker) of(kind reflect.Type) (map[string]any, error) {
	for kind.Kind() == reflect.Pointer {
		kind = kind.Elem()
	}
	pointer := reflect.PointerTo(kind)
	if pointer.Implements(schemaWriter) {
		m.isOpen = true
		return reflect.New(kind).Interface().(SchemaWriter).JSONSchema(), nil
	}
	if schema, is := known[kind]; is {
		return maps.Clone(schema), nil
	}
	switch {
	case kind.Kind() == reflect.Interface || pointer.Implements(jsonMarshaler):
		m.isOpen = true
		return map[string]any{}, nil
	case pointer.Implements(textMarshaler):
		return map[string]any{"type": "string"}, nil
	}
	switch kind.Kind() {
	case reflect.Bool:
		return map[string]any{"type": "boolean"}, nil
	case reflect.Int, reflect.Int8, reflect.Int16, reflect.Int32, reflect.Int64:
		return map[string]any{"type": "integer"}, nil
	case reflect.Uint, reflect.Uint8, reflect.Uint16, reflect.Uint32, reflect.Uint64:
		return map[string]any{"type": "integer", "minimum": 0}, nil
	case reflect.Float32, reflect.Float64:
		return map[string]any{"type": "number"}, nil
	case reflect.String:
		return map[string]any{"type": "string"}, nil
	case reflect.Slice, reflect.Array:
		items, err := m.of(kind.Elem())
		return map[string]any{"type": "array", "items": items}, at(err, "[]")
	case reflect.Map:
		values, err := m.of(kind.Elem())
		return map[string]any{"type": "object", "additionalProperties": values}, at(err, "[]")
	case reflect.Struct:
		return m.object(kind)
	}
	return nil, fmt.Errorf(": JSON cannot hold a %s: leave the field out with `json:\"-\"`, or use another type", kind)
}

func (m *schemaMaker) object(kind reflect.Type) (map[string]any, error) {
	if name := m.names[kind]; name != "" {
		m.defs[name] = map[string]any{} // filled in below, when the type is complete
		return map[string]any{"$ref": "#/$defs/" + name}, nil
	}
	name := kind.Name()
	for count := 2; name != "" && m.used[name]; count++ {
		name = fmt.Sprintf("%s%d", kind.Name(), count)
	}
	m.names[kind], m.used[name] = name, true
	properties, required := map[string]any{}, []string{}
	if err := m.fields(kind, properties, &required); err != nil {
		return nil, err
	}
	schema := map[string]any{"type": "object", "properties": properties}
	if len(required) > 0 {
		schema["required"] = required
	}
	if m.defs[name] != nil {
		m.defs[name] = maps.Clone(schema)
		return schema, nil // keeps its name: later fields of this type refer to it
	}
	delete(m.names, kind)
	delete(m.used, name)
	return schema, nil
}

func (m *schemaMaker) fields(kind reflect.Type, properties map[string]any, required *[]string) error {
	for i := range kind.NumField() {
		field := kind.Field(i)
		name, options, _ := strings.Cut(field.Tag.Get("json"), ",")
		inner := field.Type
		if inner.Kind() == reflect.Pointer {
			inner = inner.Elem()
		}
		if field.Anonymous && name == "" && inner.Kind() == reflect.Struct {
			if err := m.fields(inner, properties, required); err != nil {
				return at(err, "."+field.Name)
			}
			continue
		}
		if !field.IsExported() || name == "-" && options == "" {
			continue
		}
		if name == "" {
			name = field.Name
		}
		schema, err := m.of(field.Type)
		if err == nil {
			err = keywords(field.Tag, schema)
		}
		if err != nil {
			return at(err, "."+field.Name)
		}
		properties[name] = schema
		_, hasDefault := schema["default"]
		if !strings.Contains(options, "omit") && field.Type.Kind() != reflect.Pointer && !hasDefault {
			*required = append(*required, name)
		}
	}
	return nil
}

// keywords adds the tags of a field to its schema.
func keywords(tag reflect.StructTag, schema map[string]any) error {
	for _, keyword := range textKeywords {
		if text, has := tag.Lookup(keyword); has {
			schema[keyword] = text
		}
	}
	for _, keyword := range jsonKeywords {
		text, has := tag.Lookup(keyword)
		if !has {
			continue
		}
		if schema["type"] == "string" && keyword == "default" && !strings.HasPrefix(text, `"`) {
			schema[keyword] = text
		} else if !json.Valid([]byte(text)) {
			return fmt.Errorf(": the tag %s is %q, which is not JSON: write a value such as %s:\"1\"", keyword, text, keyword)
		} else {
			schema[keyword] = json.RawMessage(text)
		}
	}
	if texts, has := tag.Lookup("enum"); has {
		var values []any
		for _, text := range strings.Split(texts, ",") {
			if schema["type"] != "string" && json.Valid([]byte(text)) {
				values = append(values, json.RawMessage(text))
			} else {
				values = append(values, text)
			}
		}
		schema["enum"] = values
	}
	return nil
}

// at puts a place in front of an error; none stays none.
func at(err error, place string) error {
	if err == nil {
		return nil
	}
	return errors.New(place + err.Error())
}
