"""Runs the same load on other servers, one after the other."""
