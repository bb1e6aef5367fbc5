"""Trains an ordinary Keras script on all ranks, unedited: `hvdtrain run --adopt`."""
