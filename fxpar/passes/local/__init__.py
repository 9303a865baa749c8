"""Makes the local graph, which one rank runs, from a resharded one, op by op."""
