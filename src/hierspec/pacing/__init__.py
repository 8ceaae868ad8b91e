"""Decides what is worth its time, never what is written. numpy only."""
