"""The command line of the bench, which `hierspec bench` finds by an entry point."""
