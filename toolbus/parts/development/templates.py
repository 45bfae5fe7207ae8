"""The first files of a plugin in each language: `@name@` is its name, `@clients@` the folder of the packages."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass

_README = """# @name@

```
@start@
toolbus call @name@_hello who=World        # in another terminal
```

It needs a bus that runs already (`toolbus serve`). `toolbus run --exec @name@="@program@"` restarts it if it dies.
"""


@dataclass(frozen=True)
class Template:
    """The files of one language, the commands that start them from their folder, and the package that they need."""

    files: Mapping[str, str]
    start: str
    program: str  # for `toolbus run --exec`
    package: str = ""  # its folder in `clients/`; empty for Python, which has it installed

    def command(self, clients: str) -> str:
        """Returns the command that starts it, with `@name@` in it."""
        return self.start.replace("@clients@", shlex.quote(clients))

    def written(self, name: str, clients: str) -> dict[str, str]:
        """Returns the files, each with its text."""
        readme = {} if "README.md" in self.files else {"README.md": _README}
        texts = {**self.files, **readme}
        program = self.program.replace("@clients@", shlex.quote(clients))
        values = {"@start@": self.command(clients), "@program@": program, "@name@": name, "@clients@": clients}
        for of, value in values.items():
            texts = {file.replace(of, value): text.replace(of, value) for file, text in texts.items()}
        return texts


TEMPLATES: Mapping[str, Template] = {
    "python": Template(
        {
            "@name@.py": '''"""The tools of the plugin @name@."""

from typing import Annotated

from toolbus import Plugin

plugin = Plugin("@name@")


@plugin.tool
def @name@_hello(who: Annotated[str, "Whom to greet."]) -> str:
    """Greets someone: replace this by what your tool does, in words that a model understands."""
    return f"Hello, {who}!"


if __name__ == "__main__":
    plugin.run()
''',
            "test_@name@.py": '''"""Runs the plugin on a bus: python -m pytest (needs toolbus[server] and pytest)."""

import asyncio

from toolbus.testing import running_bus

from @name@ import plugin


def test_it_greets():
    async def scenario():
        async with running_bus(plugin) as host:
            return (await host.call("@name@_hello", {"who": "World"})).unwrap()

    assert asyncio.run(scenario()) == "Hello, World!"
''',
            "README.md": """# @name@

```
@start@                      # a bus and the plugin, which reloads on save
toolbus call @name@_hello who=World        # in another terminal
python -m pytest                           # its test
```

`toolbus run @name@.py` runs the plugin for a bus that runs already (`toolbus serve`).
""",
        },
        start="toolbus dev @name@.py",
        program="python @name@.py",
    ),
    "typescript": Template(
        {
            "package.json": """{
  "name": "@name@",
  "private": true,
  "type": "module",
  "dependencies": { "@toolbus/client": "file:@clients@/typescript" }
}
""",
            "@name@.mjs": """// @ts-check
import { Plugin } from "@toolbus/client";

const plugin = new Plugin("@name@");
plugin.tool("@name@_hello", {
  description: "Greets someone: replace this by what your tool does, in words that a model understands.",
  parameters: {
    type: "object",
    properties: { who: { type: "string", description: "Whom to greet." } },
    required: ["who"],
  },
}, async ({ who }) => `Hello, ${who}!`);
await plugin.run();
""",
        },
        start="npm install && node @name@.mjs",
        program="node @name@.mjs",
        package="typescript",
    ),
    "go": Template(
        {
            "go.mod": "module @name@\n\ngo 1.25.0\n",
            "go.work": "go 1.25.0\n\nuse .\nuse @clients@/go\n",
            "main.go": """package main

import (
	"context"
	"fmt"
	"log"

	"toolbus"
)

type Greeting struct {
	Who string `json:"who" description:"Whom to greet."`
}

func main() {
	plugin := toolbus.NewPlugin("@name@", nil)
	tool := toolbus.Tool{
		Name:        "@name@_hello",
		Description: "Greets someone: replace this by what your tool does, in words that a model understands.",
	}
	toolbus.AddTool(plugin, tool, func(ctx context.Context, greeting Greeting) (string, error) {
		return fmt.Sprintf("Hello, %s!", greeting.Who), nil
	})
	if err := plugin.Run(context.Background()); err != nil {
		log.Fatal(err)
	}
}
""",
        },
        start="go build && ./@name@",
        program="./@name@",
        package="go",
    ),
    "rust": Template(
        {
            "Cargo.toml": """[package]
name = "@name@"
version = "0.1.0"
edition = "2024"

[dependencies]
toolbus = { path = "@clients@/rust" }
schemars = "1"
serde = { version = "1", features = ["derive"] }
tokio = { version = "1", features = ["macros", "rt-multi-thread"] }

[workspace]
""",
            "src/main.rs": """#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Greeting {
    /// Whom to greet.
    who: String,
}

#[tokio::main]
async fn main() -> toolbus::Result<()> {
    let plugin = toolbus::Plugin::new("@name@");
    let description = "Greets someone: replace this by what your tool does, in words that a model understands.";
    plugin.tool("@name@_hello", description, |greeting: Greeting, _| async move {
        Ok(format!("Hello, {}!", greeting.who))
    });
    plugin.run().await
}
""",
        },
        start="cargo build && target/debug/@name@",
        program="target/debug/@name@",
        package="rust",
    ),
    "java": Template(
        {
            "Main.java": """import dev.toolbus.Arg;
import dev.toolbus.Plugin;

public class Main {
    record Greeting(@Arg("Whom to greet.") String who) {}

    public static void main(String[] args) throws Exception {
        Plugin plugin = new Plugin("@name@");
        String description = "Greets someone: replace this by what your tool does, in words that a model understands.";
        plugin.tool("@name@_hello", description, Greeting.class, (greeting, scope) -> "Hello, " + greeting.who() + "!");
        plugin.run();
    }
}
"""
        },
        start="mvn -q -f @clients@/java package -DskipTests && java -cp @clients@/java/build/toolbus.jar Main.java",
        program="java -cp @clients@/java/build/toolbus.jar Main.java",
        package="java",
    ),
}
