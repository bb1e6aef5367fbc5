"""Measure: what N workers bring over one, compared in one run on the machine at hand."""
