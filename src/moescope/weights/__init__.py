"""Scan: what router and expert weights say about each other."""
