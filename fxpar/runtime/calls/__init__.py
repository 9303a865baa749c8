"""A Dynamo graph as it is called: its sizes, variants, results, and code beside it."""
