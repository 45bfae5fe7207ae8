"""Stores memories for role-play hosts in SQLite, and finds them again by words.

An extension shows both ways to answer calls. `remember` and `forget` are functions, whose hints and docstrings become
the schemas. `recall` is registered as a record and answered by the handler for all tools, since it wants what the host
says beside the arguments: the council member that asks, and the conversation.

    toolbus run examples/extension_memory/memory.py --env MEMORY_FOLDER=~/memories
"""

from __future__ import annotations

import os
import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from toolbus.sdk import Err, Extension, ToolInvocation, ToolScope

WORD = re.compile(r"\w+")
MAX_CHARACTERS = 2000  # of one memory: a model reads several at once
STOP_WORDS = frozenset(  # a memory that shares only these with a query does not match
    WORD.findall(
        "a about an and are as at be but by did do does for from had has have he her him his how i if in is it its me "
        "my no not of on or our she so that the their them they this to us was we were what when where who why with you"
    )
)
MAX_WORDS = 50  # of a query; a conversation may be long

plugin = Extension("memory")


@contextmanager
def memories() -> Iterator[sqlite3.Connection]:
    """Opens the database for one call; handlers run on several threads, and a connection belongs to one."""
    folder = Path(os.environ.get("MEMORY_FOLDER") or "~/memories").expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(folder / "memories.sqlite3")) as database, database:
        database.execute(
            "CREATE VIRTUAL TABLE IF NOT EXISTS memories "
            "USING fts5(text, user_id UNINDEXED, tokenize = 'porter unicode61')"
        )
        yield database


@plugin.tool(inline_available=True)
def remember(text: str, scope: ToolScope) -> str | Err:
    """Stores a fact about the user or the story, which any later conversation can recall.

    Args:
        text: The fact, as one sentence that can be understood by itself.
    """
    memory = text.strip()[:MAX_CHARACTERS]
    if not memory:
        return Err("there is nothing to remember: say what")
    with memories() as database:
        cursor = database.execute("INSERT INTO memories VALUES (?, ?)", (memory, scope.context.user_id))
    return f"Stored as {cursor.lastrowid}."


@plugin.tool(inline_available=True)
def forget(number: int, scope: ToolScope) -> str | Err:
    """Deletes a stored fact.

    Args:
        number: Which one, as recall numbers them.
    """
    with memories() as database:
        whose = (number, scope.context.user_id)
        deleted = database.execute("DELETE FROM memories WHERE rowid = ? AND user_id = ?", whose).rowcount
    return "Forgotten." if deleted else Err(f"no memory has the number {number}: recall lists them")


plugin.register_tool(
    name="recall",
    display_name="Recall",
    description="Finds stored facts about a subject, the best first; without a query those that fit the conversation.",
    parameters={
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "Words to look for"},
            "limit": {"type": "integer", "minimum": 1, "maximum": 20, "default": 5, "description": "At most so many"},
        },
    },
    council_eligible=True,
    inline_available=True,
)


@plugin.on_invocation
def recall(call: ToolInvocation) -> str:
    """Answers `recall`; a council calls it without arguments: the user's newest message is the query then."""
    messages = [each["content"] for each in call.context_messages or () if each["role"] == "user"]
    query = str(call.args.get("query") or "".join(messages[-1:]))
    memories = search(query, call.scope.context.user_id, call.args.get("limit", 5))
    lines = [f"{number}. {text}" for number, text in memories] or ["Nothing is stored about that."]
    if call.council_member is not None:
        name, role = call.council_member["name"], call.council_member["role"]
        lines.insert(0, f"{name} ({role or 'archivist'}) remembers:")
    return "\n".join(lines)


def search(query: str, user_id: str, limit: int) -> list[tuple[int, str]]:
    """Returns the memories of a user that share a word with the query; without a query the newest."""
    terms = [word for word in WORD.findall(query) if word.lower() not in STOP_WORDS]
    if not terms and WORD.search(query):
        return []
    words = " OR ".join(f'"{word}"' for word in terms[:MAX_WORDS])  # quoted: no operators of FTS5
    fits, order = ("memories MATCH ? AND", "rank") if words else ("? = '' AND", "rowid DESC")
    with memories() as database:
        statement = f"SELECT rowid, text FROM memories WHERE {fits} user_id = ? ORDER BY {order} LIMIT ?"
        return database.execute(statement, (words, user_id, limit)).fetchall()


if __name__ == "__main__":
    plugin.run()
