"""Asynchronous training: one chief directs, workers compute steps, parameter servers hold the variables."""

from hvdtrain.strategies.parameter_server.strategy import ParameterServer

__all__ = ["ParameterServer"]
