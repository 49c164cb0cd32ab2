"""Typer commands: parse, compose, dispatch, print."""
