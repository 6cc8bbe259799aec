"""Audits of verification rules: their exact laws by enumeration, statistical tests, adapters for other people's."""
