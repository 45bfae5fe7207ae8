"""Between a catalog and a language model: dialects of the providers, the tool loop, and the search of tools."""
