"""Measures a bus and tries to break it: six scenarios on shared parts. Nothing here is shipped.

`stage` and `child` run the processes,
`load` calls and answers, `ledger` holds what each of them wrote down, `judge` compares that
with what was promised, `report` and `chart` show it, `commands` is what the command lines share. The scenarios are
`benchmarks`, `chaos`, `fuzz`, `hostile`, `overload` and `soak`; `script_turns` counts what a model reads; `mcp_clients`
and `official_client` look at MCP clients of others; `results` holds the pages that they have written.
"""
