"""Tools of a Python program in its own process: `ToolRegistry`, as Stargazer has it."""
