"""The HTTP server: `hierspec serve`. Needs the extra `hierspec[serve]`."""
