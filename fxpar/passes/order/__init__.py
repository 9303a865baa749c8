"""Orders collectives and compute of a local graph, a forward, or a backward."""
