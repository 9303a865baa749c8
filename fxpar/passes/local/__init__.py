"""Local forms of ops: resharded -> local, what one rank runs of each."""
