"""HTTP for all protocols: authentication, limits, reading of bodies, and sending of errors and streams."""
