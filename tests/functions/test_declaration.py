"""The decorator's checks (REST-60), what it leaves behind, and collecting decorated methods."""

import inspect
import json
import math
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import pytest

from toolbus.functions.tool_spec import (
    HandlerKind,
    LlmToolMeta,
    ToolSet,
    ToolSpec,
    collect,
    meta_of,
    spec_of,
    spec_of_method,
)
from toolbus.protocol.tool import Annotations
from toolbus.sdk import llm_tool


def test_the_decorator_returns_the_function_itself() -> None:
    def search(query: str) -> str:
        return query

    assert llm_tool(name="find")(search) is search
    assert llm_tool(search) is search
    assert search("a") == "a"


def test_a_bare_decorator_takes_everything_from_the_function() -> None:
    @llm_tool
    async def get_weather(city: str) -> None:
        """Looks up the weather."""

    meta = meta_of(get_weather)
    assert isinstance(meta, LlmToolMeta)
    assert meta is get_weather.__llm_tool__  # type: ignore[attr-defined]
    assert (meta.name, meta.description, meta.timeout, meta.role) == (
        "get_weather",
        "Looks up the weather.",
        30.0,
        None,
    )
    assert meta.parameters == {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


def test_an_option_wins_over_the_docstring_and_the_hints_of_the_function() -> None:
    schema = {"type": "object", "properties": {"q": {"type": "string"}}}

    @llm_tool(name="s.1-a_b", description="Given.", parameters=schema, timeout=300, role="Neko")
    def search(query: str) -> None:
        """Docstring."""

    meta = meta_of(search)
    assert meta is not None
    assert (meta.name, meta.description, meta.parameters, meta.timeout_seconds, meta.role) == (
        "s.1-a_b",
        "Given.",
        schema,
        300.0,
        "Neko",
    )


def test_without_hints_the_schema_is_an_empty_object() -> None:
    @llm_tool()
    def ping(*, value, **_): ...  # type: ignore[no-untyped-def]

    meta = meta_of(ping)
    assert meta is not None
    assert meta.parameters == {"type": "object", "properties": {}}


def test_an_empty_name_means_that_of_the_function_and_no_description_the_docstring() -> None:
    as_written: Any = {"name": "", "description": None}

    def echo() -> None:
        """Says it again."""

    llm_tool(**as_written)(echo)
    meta = meta_of(echo)
    assert meta is not None
    assert (meta.name, meta.description) == ("echo", "Says it again.")


def test_an_empty_role_means_every_role() -> None:
    meta = meta_of(llm_tool(role="")(lambda_named("a")))
    assert meta is not None
    assert meta.role is None


def lambda_named(name: str) -> Callable[..., Any]:
    def function() -> None: ...

    function.__name__ = name
    return function


@pytest.mark.parametrize("name", ["a", "A-b_c.9", "x" * 64])
def test_legal_names_pass(name: str) -> None:
    meta = meta_of(llm_tool(name=name)(lambda_named("f")))
    assert meta is not None
    assert meta.name == name


def test_an_empty_name_is_the_functions_and_no_description_is_an_empty_one() -> None:
    meta = meta_of(llm_tool(name="", description=None)(lambda_named("f")))
    assert meta is not None
    assert (meta.name, meta.description) == ("f", "")


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"name": "a b"}, ValueError, "'a b'"),
        ({"name": "a/b"}, ValueError, "a/b"),
        ({"name": "天气"}, ValueError, "天气"),
        ({"name": "a\n"}, ValueError, "rule"),
        ({"name": "x" * 65}, ValueError, "1,64"),
        ({"name": 7}, TypeError, "int"),
        ({"parameters": []}, TypeError, "list"),
        ({"parameters": "{}"}, TypeError, "str"),
        ({"parameters": {"a": math.nan}}, ValueError, "JSON"),
        ({"parameters": {"a": object()}}, ValueError, "JSON"),
        ({"timeout": 0}, ValueError, "0 s"),
        ({"timeout": -1}, ValueError, "-1 s"),
        ({"timeout": 300.1}, ValueError, "300"),
        ({"timeout": math.nan}, ValueError, "nan"),
        ({"timeout": math.inf}, ValueError, "inf"),
        ({"timeout": "30"}, TypeError, "str"),
        ({"timeout": True}, TypeError, "bool"),
        ({"timeout": None}, TypeError, "NoneType"),
        ({"idle_timeout": 0}, ValueError, "idle_timeout"),
        ({"description": 7}, TypeError, "description"),
        ({"role": 7}, TypeError, "role"),
        ({"metadata": [1]}, TypeError, "metadata"),
        ({"colour": 1}, TypeError, "colour"),
    ],
)
def test_a_broken_rule_raises_where_the_decorator_stands(
    options: dict[str, Any], kind: type[Exception], words: str
) -> None:
    with pytest.raises(kind, match=words):
        llm_tool(**options)


def test_an_unknown_option_is_refused_with_a_list_of_those_that_exist() -> None:
    with pytest.raises(TypeError, match=r"tool 'search': 'colour' is not an option of a tool; the options are name"):
        llm_tool(name="search", colour=1)  # type: ignore[call-overload]


def test_a_function_whose_name_is_no_tool_name_needs_one() -> None:
    with pytest.raises(ValueError, match="name="):
        llm_tool()(lambda: None)


def test_a_positional_name_is_refused_with_the_right_spelling() -> None:
    with pytest.raises(TypeError, match="name="):
        llm_tool("search")  # type: ignore[call-overload]


def test_every_extra_reaches_the_tool() -> None:
    flags = (
        "no_background",
        "allow_repeat",
        "council_eligible",
        "inline_available",
        "direct_reply",
        "validate",
        "no_repair",
        "no_defaults",
    )
    options: dict[str, Any] = {
        "idempotent": True,
        "read_only": False,
        "destructive": False,
        "open_world": True,
        "display_name": "T",
        "idle_timeout": 5,
        "metadata": {"a": [1]},
        **dict.fromkeys(flags, True),
    }
    spec = spec_of(llm_tool(**options)(lambda_named("t")))
    assert spec.tool.annotations == Annotations(read_only=False, idempotent=True, destructive=False, open_world=True)
    assert all(getattr(spec.tool, flag) is True for flag in flags)
    assert (spec.tool.display_name, spec.tool.idle_timeout_seconds) == ("T", 5.0)
    assert json.loads(spec.tool.metadata_json) == {"a": [1]}


class Base:
    @llm_tool
    def first(self, a: int) -> str:
        return "base"

    @llm_tool
    def second(self) -> str:
        return "base"

    @property
    def trap(self) -> str:
        raise AssertionError("a property was touched")

    @cached_property
    def other_trap(self) -> str:
        raise AssertionError("a property was touched")


class Derived(Base):
    @llm_tool
    async def third(self) -> None: ...

    @llm_tool(name="renamed")
    def first(self, a: int, b: str = "") -> str:
        return "derived"

    @staticmethod
    @llm_tool
    def static(q: str) -> None: ...

    @llm_tool
    @classmethod
    def made_by_class(cls, q: str) -> str:
        return cls.__name__

    def plain(self) -> None: ...


def test_methods_are_collected_in_order_and_overrides_take_their_place() -> None:
    specs = collect(Derived())
    assert [each.tool.name for each in specs] == ["renamed", "second", "third", "static", "made_by_class"]
    assert specs[0].handler(1) == "derived"
    assert specs[4].handler(q="x") == "Derived"
    assert list(specs[0].tool.parameters["properties"]) == ["a", "b"]
    assert list(specs[3].tool.parameters["properties"]) == ["q"]
    assert list(specs[4].tool.parameters["properties"]) == ["q"]


def test_an_override_without_the_decorator_takes_the_tool_away() -> None:
    class Quiet(Base):
        def first(self, a: int) -> str:
            return "quiet"

    assert [each.tool.name for each in collect(Quiet())] == ["second"]


async def coroutine() -> None: ...
async def async_chunks() -> Any:
    yield "a"


def chunks() -> Any:
    yield "a"


class AsyncCallable:
    async def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("function", "kind", "is_async"),
    [
        (coroutine, HandlerKind.ASYNC, True),
        (partial(coroutine), HandlerKind.ASYNC, True),
        (AsyncCallable(), HandlerKind.ASYNC, True),
        (async_chunks, HandlerKind.ASYNC_GENERATOR, True),
        (chunks, HandlerKind.GENERATOR, False),
        (lambda: None, HandlerKind.SYNC, False),
    ],
)
def test_the_kind_of_a_handler_is_known_before_it_runs(function: Any, kind: HandlerKind, is_async: bool) -> None:
    from toolbus.functions.tool_spec import describe

    spec = spec_of(function, describe(function, name="t"))
    assert (spec.kind, spec.is_async) == (kind, is_async)


def test_a_positional_only_parameter_is_refused_with_the_fix() -> None:
    @llm_tool
    def bad(a: int, /) -> None: ...

    with pytest.raises(TypeError, match="remove the '/'"):
        spec_of(bad)


def test_an_undecorated_function_is_refused() -> None:
    with pytest.raises(TypeError, match="@llm_tool"):
        spec_of(lambda_named("f"))


def test_a_declared_argument_named_ctx_is_the_models() -> None:
    @llm_tool(parameters={"type": "object", "properties": {"ctx": {"type": "string"}}})
    def tool(ctx): ...  # type: ignore[no-untyped-def]

    spec = spec_of(tool)
    assert (spec.scope, spec.names) == ("", frozenset({"ctx"}))


def test_a_tool_set_notifies_its_listener_of_changes() -> None:
    tools = ToolSet()
    changes: list[tuple[str, ToolSpec | None]] = []
    tools.on_change = lambda name, spec: changes.append((name, spec))
    spec = spec_of(llm_tool(lambda_named("a")))
    assert tools.add(spec)
    assert not tools.add(spec)
    assert tools.add(spec, replace=True)
    assert tools.get("a") is spec
    assert tools.remove("a")
    assert not tools.remove("a")
    assert changes == [("a", spec), ("a", spec), ("a", None)]
    assert len(tools) == 0


def test_the_public_names_are_the_decorators_whatever_was_imported_first() -> None:
    import toolbus.sdk

    for name in toolbus.sdk.__all__:
        assert not inspect.ismodule(getattr(toolbus.sdk, name)), name
    with pytest.raises(AttributeError, match="no public name 'nothing'"):
        toolbus.sdk.nothing  # noqa: B018
    assert set(toolbus.sdk.__all__) <= set(dir(toolbus.sdk))


def test_a_method_that_was_read_from_another_object_is_bound_to_its_own() -> None:
    class Counter:
        def __init__(self, start: int) -> None:
            self.start = start

        @llm_tool
        async def count(self, by: int = 1) -> int:
            """Counts on."""
            return self.start + by

    first, second = Counter(1), Counter(2)
    for counter in (first, second, first):
        spec = spec_of_method(counter.count)
        assert spec == spec_of(counter.count)
        assert spec.handler == counter.count
