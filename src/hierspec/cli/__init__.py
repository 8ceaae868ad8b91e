"""The command line: one small file a subcommand, no logic in them."""
