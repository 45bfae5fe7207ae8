"""What authors of plugins use: a bus and plugins that reload in one terminal, and the first files of a plugin."""
