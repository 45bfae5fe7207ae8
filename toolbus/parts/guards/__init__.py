"""Guards: tools that see calls before and after they run, and refuse or change them."""
