"""Asynchronous training: one chief coordinates, workers compute steps, parameter servers hold the variables."""

from hvdtrain.strategies.parameter_server.asynchronous import ParameterServer

__all__ = ["ParameterServer"]
