"""Builds Horovod for the TensorFlow that is installed here, without a fork and without root.

`build_environment`  finds what is needed, and reports each missing item with its fix, one per line;
`recipe`             the wheel's key in the cache, and the build's environment and commands (pure functions);
`horovod_cmake`      replaces cmake during the build, and adapts the sources to current TensorFlow;
`cache`              built wheels, kept outside the clone;
`logged_command`     runs a long command with a progress bar and a log;
`build`              builds, caches and installs;
`selftest`           an allreduce of two ranks.
"""
