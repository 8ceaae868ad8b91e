"""The algorithm: proposals, laws, verification, the one recursion, the engine. numpy only; imports nothing of ours."""
