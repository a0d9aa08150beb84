"""Cleaning files that somebody instrumented by hand: text, marks, judgement, cutting, comparing with what is known."""
