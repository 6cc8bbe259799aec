"""Audits of verification rules: exact output distributions by enumeration, statistical tests, other packages' rules."""
