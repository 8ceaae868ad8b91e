"""The algorithm: proposals, verification, the one recursion, the engine. numpy only; imports nothing of ours."""
