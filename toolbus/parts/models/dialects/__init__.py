"""The formats of the providers of language models: tools out, calls in, results and history out."""
