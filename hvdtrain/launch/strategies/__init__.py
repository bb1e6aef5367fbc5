"""Launches under the strategies that are not Horovod's."""
