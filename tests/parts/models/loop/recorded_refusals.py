"""Holds refusals of tools as endpoints have worded them, found in public reports of programs that met them.

Each is for a request of 30 tools, `tool_0` to `tool_29`; the names in the texts are replaced by these.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Recorded:
    """A refusal: who worded it, in which dialect, with which status, and which tools it names; empty names none."""

    who: str
    dialect: str
    status: int | None
    body: Any
    names: tuple[int, ...] = ()


OPENAI = "invalid_request_error"

NAMING = [
    Recorded(
        "OpenAI chat",
        "openai",
        400,
        {
            "message": "Invalid schema for function 'tool_3': In context=('properties', 'flights'), array schema "
            "missing items.",
            "type": OPENAI,
            "param": "tools[3].function.parameters",
            "code": "invalid_function_parameters",
        },
        (3,),
    ),
    Recorded(
        "OpenAI Responses",
        "openai-responses",
        400,
        {
            "message": "Invalid schema for function 'tool_5': 'object' is not of type 'object', 'boolean'",
            "type": OPENAI,
            "param": "tools[5].parameters",
            "code": "invalid_function_parameters",
        },
        (5,),
    ),
    Recorded(
        "OpenAI, of a description",
        "openai",
        400,
        {
            "message": "Invalid 'tools[7].function.description': string too long. Expected a string with maximum "
            "length 1024, but got a string with length 1204 instead.",
            "type": OPENAI,
            "param": "tools[7].function.description",
            "code": "string_above_max_length",
        },
        (7,),
    ),
    Recorded(
        "OpenAI, of a strict schema",
        "openai",
        400,
        {
            "message": "Invalid schema for function 'tool_2': In context=('properties', 'fields'), "
            "'additionalProperties' is required to be supplied and to be false.",
            "type": OPENAI,
            "param": "tools[2].parameters",
            "code": "invalid_function_parameters",
        },
        (2,),
    ),
    Recorded(
        "DeepSeek",
        "openai",
        400,
        {
            "message": "Invalid schema for function 'tool_9': schema must be a JSON Schema of 'type: \"object\"', got "
            "'type: \"None\"'.",
            "type": OPENAI,
            "param": None,
            "code": OPENAI,
        },
        (9,),
    ),
    Recorded(
        "Groq",
        "openai",
        400,
        {
            "message": "invalid JSON schema for tool tool_24, tools[24].function.parameters: 'required' present but "
            "'properties' is missing",
            "type": OPENAI,
            "param": "tool tool_24, tools[24].function.parameters",
        },
        (24,),
    ),
    Recorded(
        "OpenRouter, in the middle of a stream",
        "openai",
        None,
        {"message": "Invalid schema for function 'tool_1': In context=(), object schema missing properties."},
        (1,),
    ),
    Recorded(
        "LM Studio",
        "openai",
        400,
        '[\n  {\n    "code": "invalid_union_discriminator",\n    "path": [\n      13,\n      "function",\n      '
        '"parameters",\n      "type"\n    ]\n  },\n  {\n    "path": [\n      24,\n      "function",\n      '
        '"parameters",\n      "type"\n    ],\n    "message": "Invalid discriminator value."\n  }\n]',
        (13, 24),
    ),
    Recorded(
        "vLLM",
        "openai",
        400,
        "[{'type': 'dict_type', 'loc': ('body', 'tools', 2, 'function', 'parameters'), 'msg': 'Input should be a valid "
        "dictionary'}]",
        (2,),
    ),
    Recorded(
        "Mistral",
        "openai",
        422,
        {"detail": [{"type": "dict_type", "loc": ["body", "tools", 4, "function", "parameters"], "msg": "…"}]},
        (4,),
    ),
    Recorded(
        "Anthropic",
        "anthropic",
        400,
        {
            "type": "error",
            "error": {
                "type": OPENAI,
                "message": "tools.12.custom.input_schema: JSON schema is invalid. It must match JSON Schema draft "
                "2020-12 (https://json-schema.org/draft/2020-12). Learn more about tool use at "
                "https://docs.claude.com/en/docs/tool-use.",
            },
        },
        (12,),
    ),
    Recorded(
        "Anthropic, of a property",
        "anthropic",
        400,
        "tools.21.custom.input_schema.properties: Property keys should match pattern '^[a-zA-Z0-9_.-]{1,64}$'",
        (21,),
    ),
    Recorded(
        "Anthropic, of a root",
        "anthropic",
        400,
        "tools.27.custom.input_schema: input_schema does not support oneOf, allOf, or anyOf at the top level",
        (27,),
    ),
    Recorded(
        "Gemini, of values",
        "gemini",
        400,
        "Invalid value at 'request.tools[0].function_declarations[5].parameters.properties[6].value' "
        '(type.googleapis.com/google.cloud.aiplatform.master.Schema), "object"\nInvalid value at '
        "'request.tools[0].function_declarations[14].parameters.properties[11].value' (…), \"object\"",
        (5, 14),
    ),
    Recorded(
        "Gemini",
        "gemini",
        400,
        {
            "error": {
                "code": 400,
                "message": "* GenerateContentRequest.tools[0].function_declarations[6].parameters.properties[action]"
                ".properties: should be non-empty for OBJECT type\n* GenerateContentRequest.tools[0]"
                ".function_declarations[8].parameters.properties[x].items: missing field.\n",
                "status": "INVALID_ARGUMENT",
            }
        },
        (6, 8),
    ),
    Recorded(
        "Gemini, of a name",
        "gemini",
        400,
        "The GenerateContentRequest proto is invalid:\n  * tools[0].function_declarations[12].name: [FIELD_INVALID] "
        "Invalid function name. Must start with a letter or an underscore.",
        (12,),
    ),
    Recorded(
        "Gemini by REST",
        "gemini",
        400,
        'Invalid JSON payload received. Unknown name "exclusiveMinimum" at '
        "'tools[0].function_declarations[3].parameters.properties[0].value': Cannot find field.",
        (3,),
    ),
]

UNNAMED = [
    Recorded("llama.cpp", "openai", 400, "Failed to initialize samplers: failed to parse grammar"),
    Recorded(
        "llama.cpp",
        "openai",
        400,
        "Unable to generate parser for this template. Automatic parser generation failed: JSON schema conversion "
        "failed:\nPattern must start with '^' and end with '$'",
    ),
    Recorded("llama.cpp", "openai", 500, 'JSON schema conversion failed:\nUnrecognized schema: {"type":"date"}'),
    Recorded("LM Studio, in a stream", "openai", None, "Failed to initialize samplers: failed to parse grammar"),
    Recorded(
        "Ollama",
        "ollama",
        400,
        "json: cannot unmarshal array into Go struct field .tools.function.parameters.properties.type of type string",
    ),
    Recorded(
        "Moonshot",
        "openai",
        400,
        "Invalid request: tools.function.parameters is not a valid moonshot flavored json schema, details: <At path "
        "'properties.skill': when using anyOf, type should be defined in anyOf items instead of the parent schema>",
    ),
    Recorded("Moonshot", "openai", 400, 'tools.function.parameters.type is required and must be "object"'),
    Recorded(
        "Mistral",
        "openai",
        400,
        {
            "object": "error",
            "message": "Invalid tool schema: {'type': 'object', 'properties': {'pages': {'type': 'integer', "
            "'exclusiveMinimum': True}}} is not valid under any of the given schemas",
            "type": OPENAI,
        },
    ),
    Recorded("xAI", "openai", 400, "Invalid request content: Invalid function schema."),
    Recorded("vLLM", "openai", 400, "Grammar error: Unknown format: uri"),
    Recorded("vLLM", "openai", 400, "The provided JSON schema contains features not supported by xgrammar."),
    Recorded("xgrammar", "openai", 400, "Failed to transform json schema to a grammar: json_schema_converter.cc:1: No"),
    Recorded("llguidance", "openai", 400, 'Unimplemented keys: ["dependentSchemas"]'),
    Recorded("llguidance", "openai", 400, "Unknown format: regex"),
    Recorded("llguidance", "openai", 400, "Unsatisfiable schema: required property 'a' is unsatisfiable"),
    Recorded("llguidance", "openai", 400, "regex parse error:\n    ^(?=a)b$\n     ^^^\nerror: look-around, including"),
    Recorded("outlines", "openai", 400, 'Unsupported JSON Schema structure {"not":{"type":"string"}} \nMake sure it'),
    Recorded("outlines", "openai", 400, "Format duration is not supported by Outlines"),
    Recorded(
        "Gemini", "gemini", 400, "A FunctionDeclaration in the request exceeds the maximum allowed nesting depth."
    ),
]

STRICT_KEY = [
    Recorded("OpenAI", "openai", 400, "Unknown parameter: 'tools[0].function.strict'."),
    Recorded("Bedrock", "openai", 400, "tools.0.custom.strict: Extra inputs are not permitted"),
    Recorded(
        "Cohere",
        "openai",
        422,
        "unknown field: parameter 'strict' is not a valid field. For proper usage, please refer to …",
    ),
    Recorded(
        "pydantic",
        "openai",
        422,
        "[{'loc': ('body', 'tools', 0, 'function', 'strict'), 'msg': 'Extra inputs are not permitted'}]",
    ),
]

STRICT_TOOLS = [
    Recorded(
        "Anthropic",
        "openai",
        400,
        "The compiled grammar is too large, which would cause performance issues. Simplify your tool schemas or reduce "
        "the number of strict tools.",
    ),
]

# With the number that each endpoint takes.
TOO_MANY = [
    (
        Recorded(
            "OpenAI",
            "openai",
            400,
            "Invalid 'tools': array too long. Expected an array with maximum length 16, but got an array with length "
            "30 instead.",
        ),
        16,
    ),
    (Recorded("Groq", "openai", 400, "'tools' : maximum number of items is 16"), 16),
    (
        Recorded(
            "xAI", "openai", 400, "Maximum tools limit reached. 30 tools have been provided but the maximum is 20."
        ),
        20,
    ),
    (
        Recorded(
            "Gemini",
            "gemini",
            400,
            "The GenerateContentRequest proto is invalid:\n  * tools[0].function_declarations: [FIELD_INVALID] At most "
            "16 function declarations can be specified.",
        ),
        16,
    ),
    (Recorded("Copilot", "openai", 400, "You may not include more than 16 tools in your request."), 16),
]

# Errors that blame no declaration.
OTHERS = [
    Recorded("OpenAI", "openai", 400, "Invalid 'messages[3].tool_calls': array too long. Expected an array with …"),
    Recorded("OpenAI", "openai", 400, "Invalid value: 'fonction'. Supported values are: 'function'. tools[0].type"),
    Recorded("OpenAI", "openai", 400, "messages with role 'tool' must be a response to a preceding message"),
    Recorded("OpenAI", "openai", 429, "Rate limit reached; tools[3].function.parameters"),
    Recorded("OpenAI", "openai", 503, "failed to parse grammar"),
    Recorded("OpenAI", "openai", 400, "Invalid schema for function 'tool_99': it is not in the request"),
    Recorded("OpenAI", "openai", 400, "tools[99].function.parameters: it is not in the request"),
    Recorded("OpenAI", "openai", 400, "Invalid schema for response_format 'answer': …"),
    Recorded("Anthropic", "anthropic", 400, "messages.5.content.0.tool_use.input: Input should be a valid dictionary"),
    Recorded("Anthropic", "anthropic", 400, "`tool_use` ids were found without `tool_result` blocks immediately after"),
    Recorded("Gemini", "gemini", 400, "Request contains an invalid argument."),
    Recorded(
        "Gemini", "gemini", 400, "GenerateContentRequest.contents[33].parts[0].data: required oneof field 'data' must …"
    ),
    Recorded(
        "llama.cpp",
        "openai",
        400,
        "Unable to generate parser for this template. Automatic parser generation failed: \n------------\nWhile "
        "executing CallExpression at line 85, column 32 in source:\n…\nError: Jinja Exception: System message must be "
        "at the beginning.",
    ),
    Recorded("llama.cpp", "openai", 500, "Failed to parse tool call arguments as JSON"),
]
