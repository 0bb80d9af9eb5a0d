"""The command `choreo`: parses arguments, runs one command and prints the result."""
