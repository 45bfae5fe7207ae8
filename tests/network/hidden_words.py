"""Names what peers send, and a listener on the line must not find."""

PLUGIN = "smuggler"
TOOL = "reveal_hoard"
ARGUMENT = "moonlit-anvil"
RESULT = "quartz-lantern"
USER = "team-heron"
