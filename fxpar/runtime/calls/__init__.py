"""Calls Dynamo graphs: their sizes, variants, results, and the code around them."""
