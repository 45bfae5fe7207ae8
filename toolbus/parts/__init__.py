"""Lists the parts of toolbus: abilities that a bus runs without. Each is one folder here, and goes with its folder."""

from toolbus.common.part import Part, PartCommand, PartRoom

PARTS: tuple[Part, ...] = (
    Part(
        "mcp",
        commands=(
            PartCommand("mcp", "toolbus.parts.mcp.commands.mcp_command:mcp", "Connect an MCP client with the bus."),
            PartCommand("mount", "toolbus.parts.mcp.commands.mount_command:mount", "Offer the tools of an MCP server."),
            PartCommand("unmount", "toolbus.parts.mcp.commands.mount_command:unmount", "Withdraw an MCP server."),
            PartCommand("mounts", "toolbus.parts.mcp.commands.mounts_command:app", "Show and restart MCP servers."),
        ),
        rooms=(
            PartRoom("toolbus.parts.mcp.server.room:McpServerRoom", before="GatewayRoom"),
            PartRoom("toolbus.parts.mcp.client.room:McpClientRoom"),
        ),
    ),
    Part(
        "models",
        extra="semantic",
        commands=(
            PartCommand("search", "toolbus.parts.models.commands.search_command:search", "Find tools by words."),
            PartCommand("export", "toolbus.parts.models.commands.export_command:export", "Print tools for a provider."),
        ),
        rooms=(PartRoom("toolbus.parts.models.room:ModelsRoom", before="PinsRoom"),),
    ),
    Part(
        "moving",
        commands=(PartCommand("check", "toolbus.parts.moving.check.command:check", "Say what differs here for code."),),
        rooms=(PartRoom("toolbus.parts.moving.upstream.room:UpstreamRoom", before="TasksRoom"),),
        needs=("dropin", "models"),
    ),
    Part(
        "dropin",
        extra="javascript",
        commands=(
            PartCommand("tools", "toolbus.parts.dropin.tools_commands:app", "Copy tools that come with toolbus."),
        ),
        rooms=(PartRoom("toolbus.parts.dropin.room:DropinRoom"),),
    ),
    Part(
        "council",
        extra="council",
        rooms=(PartRoom("toolbus.parts.council.room:CouncilRoom", before="StreamsRoom"),),
        needs=("models",),
    ),
    Part(
        "console",
        extra="top",
        commands=(
            PartCommand("top", "toolbus.parts.console.top.command:top", "Show what a bus does, live."),
            PartCommand("console", "toolbus.parts.console.command:console", "Open the console in a browser."),
        ),
        rooms=(PartRoom("toolbus.parts.console.room:ConsoleRoom", before="NotificationsRoom"),),
    ),
    Part(
        "conformance",
        commands=(
            PartCommand("conformance", "toolbus.parts.conformance.command:conformance", "Play the protocol's rules."),
        ),
    ),
    Part(
        "openapi",
        extra="openapi",
        commands=(PartCommand("openapi", "toolbus.parts.openapi.command:openapi", "Offer operations of a document."),),
    ),
    Part(
        "observability",
        extra="otel",
        rooms=(
            PartRoom("toolbus.parts.observability.metrics_room:MetricsRoom", before="KeysRoom"),
            PartRoom("toolbus.parts.observability.traces_room:TracesRoom", before="KeysRoom"),
        ),
    ),
)
