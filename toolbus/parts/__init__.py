"""Lists the parts of toolbus: abilities that a bus runs without. Each is one folder here, and goes with its folder."""

from toolbus.common.part import Part, PartCommand, PartRoom

NOUNS = "By subject"  # the panel of nouns in `toolbus --help`
_MCP = "toolbus.parts.mcp.commands"

PARTS: tuple[Part, ...] = (
    Part(
        "development",
        commands=(
            PartCommand("new", "toolbus.parts.development.new_command:new", "Write the first files of a plugin."),
            PartCommand("dev run", "toolbus.parts.development.dev_command:dev", "Run a bus and plugins that reload."),
        ),
        loaders=("toolbus.parts.development.folder_loader:PluginFolderLoader",),
    ),
    Part(
        "tasks",
        commands=(
            PartCommand(
                "tasks",
                "toolbus.parts.tasks.tasks_command:tasks",
                "Background calls: check, await, cancel one",
                NOUNS,
            ),
        ),
        rooms=(PartRoom("toolbus.parts.tasks.room:TasksRoom", before="StreamsRoom"),),
        settings=("toolbus.parts.tasks.settings:TaskSettings",),
    ),
    Part(
        "buses",
        several="toolbus.parts.buses.connections:Several",
        commands=(
            PartCommand(
                "buses",
                "toolbus.parts.buses.buses_command:buses",
                "All buses of an address: who answers",
                NOUNS,
            ),
        ),
    ),
    Part(
        "postgres",
        extra="postgres",
        # Before the rooms whose keys and permissions it brings from other buses.
        rooms=(PartRoom("toolbus.parts.postgres.room:PostgresRoom", before="KeysRoom"),),
        settings=("toolbus.parts.postgres.settings:StorageSettings",),
        guards=("storage",),
    ),
    Part(
        "identity",
        extra="keys",
        commands=(
            PartCommand(
                "keys",
                "toolbus.parts.identity.keys_command:app",
                "Keys for other machines: init, add, list, …",
                NOUNS,
            ),
        ),
        rooms=(PartRoom("toolbus.parts.identity.room:IdentityRoom", before="OperatorsRoom"),),
        settings=("toolbus.parts.identity.settings:IssuerSettings",),
    ),
    Part(
        "audit",
        commands=(
            PartCommand(
                "audit",
                "toolbus.parts.audit.audit_command:app",
                "Who did what to the bus; verify the records",
                NOUNS,
            ),
        ),
        # Before the rooms whose actions it records.
        rooms=(PartRoom("toolbus.parts.audit.room:AuditRoom", before="KeysRoom"),),
        settings=("toolbus.parts.audit.settings:AuditSettings",),
        guards=("audit_required",),
    ),
    Part(
        "pins",
        commands=(
            PartCommand(
                "access approve",
                "toolbus.parts.pins.approve_command:approve",
                "Show and trust changed tools of a source.",
                old="approve",
            ),
        ),
        # Before the rooms that restore tools.
        rooms=(PartRoom("toolbus.parts.pins.room:PinsRoom", before="CallbacksRoom"),),
        settings=("toolbus.parts.pins.settings:PinSettings",),
    ),
    Part(
        "mcp",
        commands=(
            PartCommand("mcp", f"{_MCP}.mcp_command:main", "Connect an MCP client with the bus.", raw=True),
            PartCommand("mounts", "", "Mounted MCP servers", NOUNS),
            PartCommand("mounts show", f"{_MCP}.mounts_command:show", "Show all mounts, or one with its tools."),
            PartCommand("mounts add", f"{_MCP}.mount_command:mount", "Mount an MCP server.", old="mount"),
            PartCommand("mounts remove", f"{_MCP}.mount_command:unmount", "Unmount an MCP server.", old="unmount"),
            PartCommand("mounts restart", f"{_MCP}.mounts_command:restart", "Restart a server."),
            PartCommand("mounts logs", f"{_MCP}.mounts_command:logs", "Print what a server wrote."),
            PartCommand("mounts logins", f"{_MCP}.mounts_command:logins", "Show or end the logins of users."),
        ),
        rooms=(
            PartRoom("toolbus.parts.mcp.server.room:McpServerRoom", before="GatewayRoom"),
            PartRoom("toolbus.parts.mcp.client.room:McpClientRoom"),
        ),
        settings=("toolbus.parts.mcp.settings:McpConfig",),
        needs=("pins", "tasks", "models"),
    ),
    Part(
        "tripwire",
        rooms=(PartRoom("toolbus.parts.tripwire.room:TripwireRoom", before="CallbacksRoom"),),
        settings=("toolbus.parts.tripwire.settings:TripwireSettings",),
    ),
    Part(
        "origins",
        rooms=(PartRoom("toolbus.parts.origins.room:OriginsRoom", before="GatewayRoom"),),
        settings=("toolbus.parts.origins.settings:OriginSettings",),
    ),
    Part("tls_probe", probe="toolbus.parts.tls_probe.probe:diagnose"),
    Part("budgets", rooms=(PartRoom("toolbus.parts.budgets.room:BudgetsRoom", before="StreamsRoom"),)),
    Part(
        "overlays",
        # Before handles and guards: these see the arguments that the tool gets.
        rooms=(PartRoom("toolbus.parts.overlays.room:OverlaysRoom", before="CallbacksRoom"),),
        settings=("toolbus.parts.overlays.settings:OverlaySettings",),
        guards=("overlays",),
    ),
    Part(
        "handles",
        # Before the guards: their arguments are those that the tool gets, and they have seen what is stored.
        rooms=(PartRoom("toolbus.parts.handles.room:HandlesRoom", before="CallbacksRoom"),),
        settings=("toolbus.parts.handles.settings:HandleSettings",),
        needs=("mcp", "tasks"),
    ),
    Part(
        "guards",
        commands=(
            PartCommand(
                "approvals",
                "toolbus.parts.guards.approvals_command:approvals",
                "Calls that wait for an operator; allow one",
                NOUNS,
            ),
        ),
        rooms=(PartRoom("toolbus.parts.guards.room:GuardsRoom", before="CallbacksRoom"),),
        settings=("toolbus.parts.guards.settings:GuardSettings",),
    ),
    Part(
        "recordings",
        commands=(
            PartCommand("record", "toolbus.parts.recordings.record_command:record", "Record calls into a file.", NOUNS),
            PartCommand(
                "replay",
                "toolbus.parts.recordings.replay_command:replay",
                "Play recorded calls against another build",
                NOUNS,
            ),
        ),
        # The last before the core: it sees what a tool gets and answers.
        rooms=(PartRoom("toolbus.parts.recordings.room:RecordingsRoom", before="CallbacksRoom"),),
    ),
    Part(
        "models",
        extra="semantic",
        commands=(
            PartCommand("search", "toolbus.parts.models.commands.search_command:search", "Find tools by what they do."),
            PartCommand("export", "toolbus.parts.models.commands.export_command:export", "Print tools for a provider."),
        ),
        rooms=(PartRoom("toolbus.parts.models.room:ModelsRoom", before="GatewayRoom"),),
    ),
    Part(
        "moving",
        commands=(
            PartCommand(
                "dev check", "toolbus.parts.moving.check.command:check", "Say what differs here for code.", old="check"
            ),
        ),
        rooms=(PartRoom("toolbus.parts.moving.upstream.room:UpstreamRoom", before="TasksRoom"),),
        loaders=("toolbus.parts.moving.neko.neko_loader:NekoLoader",),
        settings=("toolbus.parts.moving.upstream.settings:UpstreamSettings",),
        needs=("dropin", "models", "tasks", "extension"),
    ),
    Part(
        "dropin",
        extra="javascript",
        commands=(
            PartCommand(
                "plugins tools",
                "toolbus.parts.dropin.tools_commands:app",
                "List the bus's own tools, or copy tools that come with toolbus.",
                old="tools",
            ),
        ),
        rooms=(PartRoom("toolbus.parts.dropin.room:DropinRoom"),),
        loaders=("toolbus.parts.dropin.dropin_loader:DropinLoader",),
        settings=("toolbus.parts.dropin.settings:DropinSettings",),
        needs=("extension", "tripwire"),
        guards=("require_manifest",),
    ),
    Part("extension"),
    Part(
        "council",
        extra="council",
        rooms=(PartRoom("toolbus.parts.council.room:CouncilRoom", before="StreamsRoom"),),
        settings=("toolbus.parts.council.settings:BusCouncil",),
        needs=("models", "extension"),
    ),
    Part(
        "console",
        extra="top",
        commands=(
            PartCommand("top", "toolbus.parts.console.top.command:top", "Show what a bus does, live."),
            PartCommand("console", "toolbus.parts.console.command:console", "Open the console in a browser."),
        ),
        rooms=(PartRoom("toolbus.parts.console.room:ConsoleRoom", before="NotificationsRoom"),),
        settings=("toolbus.parts.console.settings:ConsoleSettings",),
    ),
    Part(
        "conformance",
        commands=(
            PartCommand(
                "dev conformance",
                "toolbus.parts.conformance.command:conformance",
                "Play the rules of the protocol against a client or a bus.",
                old="conformance",
            ),
        ),
    ),
    Part(
        "openapi",
        extra="openapi",
        commands=(
            PartCommand(
                "plugins openapi",
                "toolbus.parts.openapi.command:openapi",
                "Offer the operations of an OpenAPI document.",
                old="openapi",
            ),
        ),
    ),
    Part(
        "observability",
        extra="otel",
        commands=(
            PartCommand(
                "calls",
                "toolbus.parts.observability.calls_command:calls",
                "How the newest calls ended; cancel one that runs",
                NOUNS,
            ),
            PartCommand(
                "plugins health",
                "toolbus.parts.observability.health_command:health",
                "Show whether the bus and its sources serve.",
                old="health",
            ),
            PartCommand("logs", "toolbus.parts.observability.logs_command:logs", "Print the output of plugins."),
            PartCommand(
                "dev log-level",
                "toolbus.parts.observability.logs_command:log_level",
                "Show or change levels of the bus's log.",
                old="log-level",
            ),
            PartCommand(
                "access explain",
                "toolbus.parts.observability.explain_command:explain",
                "Explain why a tool can be called, or not.",
                old="explain",
            ),
        ),
        rooms=(
            PartRoom("toolbus.parts.observability.logs_room:LogsRoom", before="GatewayRoom"),
            PartRoom("toolbus.parts.observability.metrics_room:MetricsRoom", before="KeysRoom"),
            PartRoom("toolbus.parts.observability.traces_room:TracesRoom", before="KeysRoom"),
        ),
        settings=("toolbus.parts.observability.settings:TraceSettings",),
    ),
)
