"""One file for each command: parse, call, print."""
