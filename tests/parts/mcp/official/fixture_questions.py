"""Offers the tools of the conformance suite that ask something in the middle of a call, some of them as tasks."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from toolbus.sdk import Plugin, ToolScope

Json = dict[str, Any]

TASK_SECONDS = 1.0  # longer than a call may take before it becomes a task
NAME: Json = {"name": {"type": "string"}}
OPTIONS = ["option1", "option2", "option3"]
TITLED = [{"const": f"value{number}", "title": f"Option {number}"} for number in (1, 2, 3)]
ENUMS: Json = {
    "untitledSingle": {"type": "string", "enum": OPTIONS},
    "titledSingle": {"type": "string", "oneOf": TITLED},
    "legacyEnum": {"type": "string", "enum": ["opt1", "opt2", "opt3"], "enumNames": ["One", "Two", "Three"]},
    "untitledMulti": {"type": "array", "items": {"type": "string", "enum": OPTIONS}},
    "titledMulti": {"type": "array", "items": {"anyOf": TITLED}},
}
DEFAULTS: Json = {
    "name": {"type": "string", "default": "John Doe"},
    "age": {"type": "integer", "default": 30},
    "score": {"type": "number", "default": 95.5},
    "status": {"type": "string", "enum": ["active", "inactive", "pending"], "default": "active"},
    "verified": {"type": "boolean", "default": True},
}
ROOTS: Json = {"method": "roots/list", "params": {}}


def form(message: str, properties: Json, *, required: bool = True) -> Json:
    """Returns a question for a person."""
    schema = {"type": "object", "properties": properties, "required": list(properties) if required else []}
    return {"method": "elicitation/create", "params": {"mode": "form", "message": message, "requestedSchema": schema}}


def sample(prompt: str, tokens: int) -> Json:
    """Returns a question for the client's model."""
    messages = [{"role": "user", "content": {"type": "text", "text": prompt}}]
    return {"method": "sampling/createMessage", "params": {"messages": messages, "maxTokens": tokens}}


def text_of(sampled: Json) -> str:
    """Returns what a model answered."""
    return str(sampled["content"].get("text"))


def shown(answer: Json) -> str:
    """Returns what a person answered."""
    return f"action={answer['action']}, content={json.dumps(answer.get('content', {}))}"


def offer_questions(plugin: Plugin) -> None:
    """Offers tools that ask as those of either era do."""

    @plugin.tool
    async def test_sampling(prompt: str, scope: ToolScope) -> str:
        """Asks the client's model"""
        answers = await scope.ask({"sampled": sample(prompt, 100)})
        return f"LLM response: {text_of(answers['sampled'])}"

    @plugin.tool
    async def test_elicitation(message: str, scope: ToolScope) -> str:
        """Asks the user"""
        fields = {"username": {"type": "string"}, "email": {"type": "string"}}
        answers = await scope.ask({"user": form(message, fields)})
        return f"User response: {shown(answers['user'])}"

    @plugin.tool
    async def test_streaming_elicitation(scope: ToolScope) -> str:
        """Shows how far it is, and asks the user"""
        scope.progress(1, total=2, message="half done")
        answers = await scope.ask({"user": form("Go on?", {"ok": {"type": "boolean"}})})
        return shown(answers["user"])

    @plugin.tool
    async def test_elicitation_sep1034_defaults(scope: ToolScope) -> str:
        """Asks the user with defaults"""
        answers = await scope.ask({"user": form("Who are you?", DEFAULTS, required=False)})
        return f"Elicitation completed: {shown(answers['user'])}"

    @plugin.tool
    async def test_elicitation_sep1330_enums(scope: ToolScope) -> str:
        """Asks the user to choose"""
        answers = await scope.ask({"user": form("Choose", ENUMS, required=False)})
        return f"Elicitation completed: {shown(answers['user'])}"

    @plugin.tool(needs=["sampling"])
    async def test_missing_capability() -> str:
        """Needs a client with a model"""
        return "The client can sample"


def offer_rounds(plugin: Plugin) -> None:
    """Offers tools that the suite asks in the modern way only."""

    @plugin.tool
    async def test_input_required_result_elicitation(scope: ToolScope) -> str:
        """Asks for a name"""
        answers = await scope.ask({"user_name": form("What is your name?", NAME)})
        return f"Hello, {answers['user_name'].get('content', {}).get('name')}!"

    @plugin.tool
    async def test_input_required_result_sampling(scope: ToolScope) -> str:
        """Asks the client's model"""
        answers = await scope.ask({"capital_question": sample("What is the capital of France?", 100)})
        return text_of(answers["capital_question"])

    @plugin.tool
    async def test_input_required_result_list_roots(scope: ToolScope) -> str:
        """Asks for the client's folders"""
        answers = await scope.ask({"client_roots": ROOTS})
        return ", ".join(root["uri"] for root in answers["client_roots"]["roots"])

    @plugin.tool
    async def test_input_required_result_request_state(scope: ToolScope) -> str:
        """Asks, and checks its state"""
        await scope.ask({"confirm": form("Please confirm", {"ok": {"type": "boolean"}})})
        return "state-ok"

    @plugin.tool
    async def test_input_required_result_tampered_state(scope: ToolScope) -> str:
        """Asks, with a state that nobody may change"""
        await scope.ask({"confirm": form("Please confirm", {"ok": {"type": "boolean"}})})
        return "state-ok"

    @plugin.tool
    async def test_input_required_result_multiple_inputs(scope: ToolScope) -> str:
        """Asks three questions at once"""
        questions = {
            "user_name": form("What is your name?", NAME),
            "greeting": sample("Generate a greeting", 50),
            "client_roots": ROOTS,
        }
        return ", ".join(await scope.ask(questions))

    @plugin.tool
    async def test_input_required_result_multi_round(scope: ToolScope) -> str:
        """Asks twice"""
        name = await scope.ask({"step1": form("Step 1: What is your name?", NAME)})
        color = {"color": {"type": "string"}}
        await scope.ask({"step2": form("Step 2: What is your favorite color?", color)})
        return f"Thank you, {name['step1'].get('content', {}).get('name')}"

    @plugin.tool
    async def test_input_required_result_capabilities(scope: ToolScope) -> str:
        """Asks what its caller can answer"""
        questions = {}
        if "sampling" in scope.accepts:
            questions["sampled"] = sample("Say hello", 50)
        if "elicitation.form" in scope.accepts:
            questions["user"] = form("What is your name?", NAME)
        return ", ".join(await scope.ask(questions)) if questions else "nobody can be asked"


def offer_asking_tasks(plugin: Plugin) -> None:
    """Offers tasks that ask."""
    confirm = {"confirm": {"type": "boolean"}}

    @plugin.tool(always_background=True)
    async def confirm_delete(filename: str, scope: ToolScope) -> str:
        """Asks whether to delete a file"""
        answers = await scope.ask({"confirm": form(f"Delete {filename}?", confirm)})
        return f"{filename}: {shown(answers['confirm'])}"

    @plugin.tool(always_background=True)
    async def multi_input(scope: ToolScope) -> str:
        """Asks two questions at once"""
        answers = await scope.ask({"first": form("First?", NAME), "second": form("Second?", NAME)})
        return ", ".join(map(shown, answers.values()))

    @plugin.tool
    async def test_tool_with_task(scope: ToolScope) -> str:
        """Asks for a name, and then takes long"""
        answers = await scope.ask({"user_name": form("What is your name?", NAME)})
        await asyncio.sleep(TASK_SECONDS)
        return f"Hello, {answers['user_name'].get('content', {}).get('name')}!"
