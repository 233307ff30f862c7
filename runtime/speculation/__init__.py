"""Self-speculation: drafting, verification, rounds, and control of gamma."""
