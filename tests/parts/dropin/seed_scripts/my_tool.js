function my_tool(args, env) {
    // args: the model's structured arguments (validated against def below)
    // env: per-call context (e.g. the speaker) supplied by the engine
    // Return an object (auto-JSON-encoded) or a string. READ-ONLY work only.
    return { ok: true, answer: "..." };
}
llm_tool_register({
    name: "my_tool",
    execute: my_tool,
    def: { // the model-facing tool specification
        type: "function",
        "function": {
            name: "my_tool",
            description: "What this tool does and exactly when to call it.",
            parameters: {
                type: "object",
                properties: { topic: { type: "string", description: "..." } },
                required: ["topic"]
            }
        }
    }
});
