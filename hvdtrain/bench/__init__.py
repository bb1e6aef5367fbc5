"""Measure scaling, start-up, memory and the pipeline, on the machine at hand."""
