"""The four ways in which a drop-in file declares its tools, and which declarations are refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parts.dropin.loaded_files import REGISTERED, call, load, load_one, names, skipped
from toolbus.dropin import llm_tool_register, register_tool
from toolbus.errors import InvalidTool
from toolbus.functions.tool_spec import HandlerKind
from toolbus.sdk import CallContext, ToolScope

INCOMPLETE = "llm_tool_register: spec needs {name, execute, def}"
PLAIN = {"description": "Does it.", "parameters": {"type": "object", "properties": {}}}
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}

STARGAZER = f"""
TOOL_NAME = "weather"
TOOL_DESCRIPTION = "Tells the weather."
TOOL_PARAMETERS = {SCHEMA!r}

async def run(**kwargs):
    return f"sunny in {{kwargs['city']}}"
"""
LISTED = f"""
async def weather(city):
    return f"sunny in {{city}}"

def tide(city: str):
    return f"high in {{city}}"

TOOLS = [
    {{"name": "weather", "description": "Tells the weather.", "parameters": {SCHEMA!r}, "handler": weather}},
    {{"name": "tide", "description": "Tells the tide.", "parameters": {SCHEMA!r}, "handler": tide}},
]
"""
DECORATED = '''
from toolbus import llm_tool

@llm_tool(read_only=True, metadata={"theme": "sky", "file": "elsewhere.py"})
def weather(city: str) -> str:
    """Tells the weather."""
    return f"sunny in {city}"
'''


async def test_a_registered_tool_is_offered_with_its_definition(tmp_path: Path) -> None:
    loaded = load_one(tmp_path, REGISTERED)
    tool = loaded.specs[0].tool
    assert (tool.name, tool.description) == ("greet", "Greets a person.")
    assert tool.parameters["required"] == ["name"]
    assert (await call(loaded, "greet", {"name": "Ada"})).output == {"hello": "Ada"}


@pytest.mark.parametrize(
    "register",
    [
        'register_tool(name="greet", execute=greet, definition=FLAT)',
        'register_tool(name="greet", execute=greet, definition={"type": "function", "function": FLAT})',
        'register_tool(name="greet", execute=greet, definition={"name": "greet", **FLAT})',
        'llm_tool_register({"name": "greet", "execute": greet, "def": {"type": "function", "function": FLAT}})',
        'llm_tool_register(name="greet", execute=greet, **{"def": FLAT})',
        "from toolbus.dropin import register_tool as r\nr(name='greet', execute=greet, definition=FLAT)",
        "from toolbus.dropin import llm_tool_register as r\nr({'name': 'greet', 'execute': greet, 'def': FLAT})",
    ],
)
async def test_every_form_of_a_registration_offers_the_same_tool(tmp_path: Path, register: str) -> None:
    loaded = load_one(tmp_path, f"FLAT = {PLAIN!r}\ndef greet(args, env): return 'hello'\n{register}")
    assert loaded.specs[0].tool.description == "Does it."
    assert loaded.specs[0].tool.parameters == PLAIN["parameters"]
    assert (await call(loaded, "greet")).output == "hello"


@pytest.mark.parametrize(
    "spec",
    [
        {"execute": print, "def": PLAIN},
        {"name": "", "execute": print, "def": PLAIN},
        {"name": "greet", "def": PLAIN},
        {"name": "greet", "execute": "print", "def": PLAIN},
        {"name": "greet", "execute": print},
        {},
    ],
)
def test_an_incomplete_registration_raises_the_text_that_authors_know(spec: dict[str, Any]) -> None:
    with pytest.raises(InvalidTool) as error:
        llm_tool_register(spec)
    assert str(error.value) == INCOMPLETE


def test_a_file_with_an_incomplete_registration_is_skipped_with_that_text(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"half.py": "register_tool(name='half', execute=print)", "whole.py": REGISTERED})
    assert names(loaded) == ["greet"]
    assert INCOMPLETE in skipped(loaded)["half.py"]


@pytest.mark.parametrize(
    ("registration", "words"),
    [
        ("name='a', execute=run, definition={'function': {'name': 'b'}}", ("'a'", "'b'", "both the same name")),
        ("name='a', execute=run, definition={'name': 'b'}", ("'a'", "'b'")),
        ("name='a', execute=run, definition='text'", ("'text'", "must be a dict")),
        ("name='a', execute=run, definition={'descripton': 'x'}", ("'descripton'", "description, parameters")),
        ("name='a', execute=run, definition={'function': {'param': {}}}", ("'param'", "name, description, parameters")),
        ("name='a', execute=run, definition={'function': {}, 'desc': ''}", ("'desc'", "may have type, function")),
        ("name='a', execute=run, definition={'parameters': {'type': 'string'}}", ("'string'", '"type": "object"')),
        ("name='a', execute=run, definition={'function': 5}", ("must be a dict",)),
        ("name='a b', execute=run, definition=FLAT", ("'a b'", "[A-Za-z0-9_.-]{1,64}")),
        ("name=5, execute=run, definition=FLAT", ("must be a str",)),
        ("name='a', execute=run, definition={'parameters': [1]}", ("parameters", "must be a dict")),
        ("name='a', execute=run, definition={'description': 5}", ("description", "must be a str")),
        ("name='a', execute=run, definition=FLAT, read_olny=True", ("'read_olny'", "read_only")),
        ("name='a', execute=run, definition=FLAT, allow_repeat='yes'", ("TypeError",)),
        ("name='a', execute=run, definition=FLAT, timeout=1000", ("1000", "at most 300")),
        ("name='a', execute=lambda a, b, c: 1, definition=FLAT", ("(a, b, c)", "execute(args, env)")),
        ("name='a', execute=lambda *, city: 1, definition=FLAT", ("city", "execute(args, env)")),
        ("name='a', execute=lambda **arguments: 1, definition=FLAT", ("**arguments", "execute(args, env)")),
    ],
)
def test_a_file_whose_registration_breaks_a_rule_is_skipped_with_the_reason(
    tmp_path: Path, registration: str, words: tuple[str, ...]
) -> None:
    loaded = load(tmp_path, {"bad.py": f"FLAT = {PLAIN!r}\ndef run(args, env): ...\nregister_tool({registration})"})
    assert names(loaded) == []
    assert [word for word in words if word not in skipped(loaded)["bad.py"]] == []


def test_a_registration_outside_of_a_file_is_refused() -> None:
    with pytest.raises(InvalidTool, match="while a file is loaded"):
        register_tool(name="late", execute=print, definition=PLAIN)


async def test_a_registration_from_a_running_tool_fails_that_call_alone(tmp_path: Path) -> None:
    text = f"def run(args): register_tool(name='b', execute=run, definition={PLAIN!r})\n"
    loaded = load_one(tmp_path, text + f"register_tool(name='a', execute=run, definition={PLAIN!r})")
    assert "while a file is loaded" in (await call(loaded, "a")).output["error"]
    assert names(loaded) == ["a"]


@pytest.mark.parametrize(
    ("code", "output"),
    [
        ("def execute(args, env): return [args, env['user_id']]", [{"x": 1}, "u1"]),
        ("async def execute(args, env): return [args, env['user_id']]", [{"x": 1}, "u1"]),
        ("def execute(args, env={}): return env['user_id']", "u1"),
        ("def execute(args, env, extra=3): return extra", 3),
        ("def execute(args): return args", {"x": 1}),
        ("async def execute(args): return args", {"x": 1}),
        ("def execute(): return 'nothing'", "nothing"),
        ("async def execute(): return 'nothing'", "nothing"),
        ("def execute(*given): return len(given)", 2),
        ("def execute(args, /, env): return args", {"x": 1}),
        ("def execute(args, ctx): return ctx['user_id']", "u1"),
        ("execute = lambda args, env: args", {"x": 1}),
        ("async def inner(args, env): return args\nexecute = lambda args, env: inner(args, env)", {"x": 1}),
        ("class Runs:\n    def __call__(self, args, env): return args\nexecute = Runs()", {"x": 1}),
        ("class Runs:\n    async def __call__(self, args, env): return args\nexecute = Runs()", {"x": 1}),
        ("from functools import partial\ndef f(n, args, env): return n\nexecute = partial(f, 7)", 7),
    ],
)
async def test_execute_gets_as_many_of_args_and_env_as_it_has_parameters(
    tmp_path: Path, code: str, output: Any
) -> None:
    loaded = load_one(tmp_path, f"{code}\nregister_tool(name='a', execute=execute, definition={PLAIN!r})")
    scope = ToolScope("c1", "a", context=CallContext(user_id="u1"))
    assert (await call(loaded, "a", {"x": 1}, scope)).output == output


async def test_without_arguments_and_context_execute_gets_an_empty_dict_and_no_user(tmp_path: Path) -> None:
    text = "def run(args, env): return [args, type(args).__name__, env['user_id'], env['attributes'] == {}]\n"
    loaded = load_one(tmp_path, text + f"register_tool(name='a', execute=run, definition={PLAIN!r})")
    assert (await call(loaded, "a", "")).output == [{}, "dict", "", True]


async def test_a_model_cannot_set_env_by_any_argument(tmp_path: Path) -> None:
    text = "def run(args, env): return [sorted(args), env['user_id'], env['level']]\n"
    loaded = load_one(tmp_path, text + f"register_tool(name='a', execute=run, definition={PLAIN!r})")
    claims = {"env": {"user_id": "root"}, "user_id": "root", "level": 99, "the scope of this call": "root", "ctx": 1}
    output = (await call(loaded, "a", claims)).output
    assert output == [["ctx", "env", "level", "user_id"], "", 0]


async def test_a_cancelled_async_tool_is_cancelled_as_a_task(tmp_path: Path) -> None:
    loaded = load_one(tmp_path, f"async def run(args): ...\nregister_tool(name='a', execute=run, definition={PLAIN!r})")
    assert loaded.specs[0].kind is HandlerKind.ASYNC


async def test_options_of_a_registration_reach_the_tool(tmp_path: Path) -> None:
    options = "read_only=True, allow_repeat=True, timeout=5, role='Neko'"
    tool = load_one(
        tmp_path, f"register_tool(name='a', execute=lambda a: 1, definition={PLAIN!r}, {options})"
    ).specs[0].tool  # fmt: skip
    assert tool.annotations.read_only
    assert (tool.allow_repeat, tool.timeout_seconds, tool.role) == (True, 5.0, "Neko")


@pytest.mark.parametrize("text", [STARGAZER, LISTED, DECORATED], ids=["TOOL_NAME", "TOOLS", "llm_tool"])
async def test_the_other_declarations_offer_a_tool_that_takes_keywords(tmp_path: Path, text: str) -> None:
    loaded = load_one(tmp_path, text)
    tool = loaded.specs[0].tool
    assert (tool.name, tool.description) == ("weather", "Tells the weather.")
    assert tool.parameters == SCHEMA
    assert (await call(loaded, "weather", {"city": "Oslo"})).output == "sunny in Oslo"


async def test_a_list_offers_its_tools_in_order_async_or_not(tmp_path: Path) -> None:
    loaded = load_one(tmp_path, LISTED)
    assert names(loaded) == ["weather", "tide"]
    assert (await call(loaded, "tide", {"city": "Oslo"})).output == "high in Oslo"


async def test_a_plain_run_is_offered_like_an_async_one(tmp_path: Path) -> None:
    loaded = load_one(tmp_path, STARGAZER.replace("async def", "def"))
    assert (await call(loaded, "weather", {"city": "Oslo"})).output == "sunny in Oslo"


@pytest.mark.parametrize("text", [STARGAZER, LISTED], ids=["TOOL_NAME", "TOOLS"])
@pytest.mark.parametrize("flag", ["NO_BACKGROUND", "ALLOW_REPEAT"])
def test_flags_of_a_file_apply_to_its_tools(tmp_path: Path, text: str, flag: str) -> None:
    plain = load_one(tmp_path, text).specs[0].tool
    flagged = load_one(tmp_path, f"{text}\nTOOL_{flag} = True").specs[0].tool
    assert (plain.no_background, plain.allow_repeat) == (False, False)
    assert (flagged.no_background, flagged.allow_repeat) == (flag == "NO_BACKGROUND", flag == "ALLOW_REPEAT")


@pytest.mark.parametrize(
    "text", [REGISTERED, STARGAZER, LISTED, DECORATED], ids=["register_tool", "TOOL_NAME", "TOOLS", "llm_tool"]
)
def test_the_level_of_a_file_applies_to_all_its_tools(tmp_path: Path, text: str) -> None:
    assert {spec.tool.min_level for spec in load_one(tmp_path, text).specs} == {0}
    assert {spec.tool.min_level for spec in load_one(tmp_path, f"{text}\nTOOL_MIN_LEVEL = 50").specs} == {50}


@pytest.mark.parametrize(
    "text",
    [
        "register_tool(name='one', execute=print, definition={'description': '-'}, min_level=90)",
        "TOOLS = [{'name': 'one', 'handler': lambda: 1, 'min_level': 90}]",
        "from toolbus import llm_tool\n@llm_tool(min_level=90)\ndef one() -> int: return 1",
    ],
    ids=["register_tool", "TOOLS", "llm_tool"],
)
def test_a_tools_own_level_overrides_that_of_its_file(tmp_path: Path, text: str) -> None:
    assert load_one(tmp_path, f"{text}\nTOOL_MIN_LEVEL = 50").specs[0].tool.min_level == 90


@pytest.mark.parametrize("level", ["'50'", "-1", "True", "1.5", "None"])
def test_an_invalid_level_skips_the_file(tmp_path: Path, level: str) -> None:
    loaded = load(tmp_path, {"one.py": f"{STARGAZER}\nTOOL_MIN_LEVEL = {level}"})
    assert loaded.specs == ()
    assert "min_level is" in skipped(loaded)["one.py"]


def test_an_entrys_own_flag_overrides_that_of_its_file(tmp_path: Path) -> None:
    text = """
    TOOL_ALLOW_REPEAT = True
    TOOLS = [{"name": "a", "handler": print, "allow_repeat": False}, {"name": "b", "handler": print}]
    """
    assert [spec.tool.allow_repeat for spec in load_one(tmp_path, text).specs] == [False, True]


@pytest.mark.parametrize("hint", ["", ": Any", ": ToolScope", ": 'ToolContext'"])
@pytest.mark.parametrize("default", ["", " = None"])
async def test_ctx_is_the_scope_of_the_call_whatever_its_hint(tmp_path: Path, hint: str, default: str) -> None:
    text = f"""
    from typing import Any
    from toolbus.sdk import ToolScope

    TOOL_NAME = "who"
    TOOL_PARAMETERS = {{"type": "object", "properties": {{"ctx": {{}}, "city": {{}}}}, "required": ["ctx", "city"]}}

    async def run(city, ctx{hint}{default}):
        return [city, ctx.context.user_id]
    """
    loaded = load_one(tmp_path, text)
    assert loaded.specs[0].tool.parameters == {"type": "object", "properties": {"city": {}}, "required": ["city"]}
    scope = ToolScope("c1", "who", context=CallContext(user_id="u1"))
    assert (await call(loaded, "who", {"city": "Oslo"}, scope)).output == ["Oslo", "u1"]


async def test_ctx_is_left_out_of_a_schema_from_hints(tmp_path: Path) -> None:
    text = "from typing import Any\nTOOL_NAME = 'a'\ndef run(city: str, ctx: Any = None): return ctx.tool"
    loaded = load_one(tmp_path, text)
    assert loaded.specs[0].tool.parameters == {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    }
    assert (await call(loaded, "a", {"city": "Oslo"})).output == "a"


def test_a_tool_without_description_and_schema_is_read_from_its_function(tmp_path: Path) -> None:
    tool = load_one(tmp_path, 'TOOL_NAME = "a"\ndef run(n: int):\n    """Counts."""').specs[0].tool
    assert tool.description == "Counts."
    assert tool.parameters == {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("TOOL_NAME = 'a'", ("run", "no function")),
        ("TOOL_NAME = ''\ndef run(): ...", ("run", "no name")),
        ("TOOL_NAME = 'a'\nrun = 5", ("run", "no function")),
        ("TOOL_NAME = 'ä'\ndef run(): ...", ("'ä'", "[A-Za-z0-9_.-]{1,64}")),
        ("TOOL_NAME = 'a'\nTOOL_PARAMETERS = 'x'\ndef run(): ...", ("parameters", "must be a dict")),
        ("TOOLS = {'name': 'a', 'handler': print}", ("dict", "must be a list")),
        ("TOOLS = [5]", ("TOOLS[0]", "must be a dict")),
        ("TOOLS = [{'name': 'a', 'handler': print}, {'name': 'b'}]", ("TOOLS[1]", "no function")),
        ("TOOLS = [{'handler': print}]", ("TOOLS[0]", "no name")),
        ("TOOLS = [{'name': 'a', 'handlr': print}]", ("TOOLS[0]", "'handlr'", "handler")),
        ("TOOLS = [{'name': 'a', 'handler': print, 'min_level': 'high'}]", ("min_level", "'high'")),
        ("TOOL_DESCRIPTION = 'x'\ndef run(): ...", ("TOOL_DESCRIPTION", "without TOOL_NAME")),
        ("TOOL_NAME = 'a'\nTOOL_PARAMETERS = {'type': 'list'}\ndef run(x): ...", ("'array'", '"properties"')),
        ("TOOLS = [{'name': 'a', 'handler': print, 'colour': 1}]", ("'colour'", "not an option")),
        ("from toolbus import llm_tool\n@llm_tool\ndef f(a, /): ...", ("positional-only",)),
        ("from toolbus import llm_tool\n@llm_tool(name='a b')\ndef f(): ...", ("'a b'",)),
    ],
)
def test_a_malformed_file_is_skipped_with_the_reason(tmp_path: Path, text: str, words: tuple[str, ...]) -> None:
    loaded = load(tmp_path, {"bad.py": text, "good.py": REGISTERED})
    assert names(loaded) == ["greet"]
    assert [word for word in words if word not in skipped(loaded)["bad.py"]] == []


def test_a_file_may_mix_the_declarations(tmp_path: Path) -> None:
    text = f"{DECORATED}\nTOOLS = [dict(name='two', handler=print)]\nTOOL_NAME = 'one'\ndef run(): ...\n{REGISTERED}"
    assert names(load_one(tmp_path, text)) == ["greet", "one", "two", "weather"]


def test_metadata_names_the_file_and_keeps_what_its_author_set(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"a.py": REGISTERED, "b.py": DECORATED})
    metadata = [json.loads(spec.tool.metadata_json) for spec in loaded.specs]
    assert metadata == [
        {"origin": "dropin", "file": "a.py"},
        {"theme": "sky", "origin": "dropin", "file": "b.py"},
    ]


def test_only_a_decorated_tool_has_a_timeout_of_its_own(tmp_path: Path) -> None:
    loaded = load(tmp_path, {"a.py": REGISTERED, "b.py": STARGAZER, "c.py": DECORATED.replace("weather", "sky")})
    assert [spec.tool.timeout_seconds for spec in loaded.specs] == [0.0, 0.0, 30.0]


@pytest.mark.parametrize("name", ["toString", "constructor", "__class__", "__init__", "keys", "get"])
async def test_a_tool_may_have_any_name_that_the_rule_allows(tmp_path: Path, name: str) -> None:
    loaded = load_one(
        tmp_path, f"register_tool(name={name!r}, execute=lambda: 'own', definition={PLAIN!r})"
    )  # fmt: skip
    assert (await call(loaded, name)).output == "own"
