"""Builds Horovod for the TensorFlow that is installed here, without a fork and without root.

`build_environment`  what this environment has, and one line with its fix for each thing that is missing;
`recipe`             the wheel's name in the cache, the build's environment and its commands (pure functions);
`horovod_cmake`      replaces cmake during the build, and adapts the sources to today's TensorFlow;
`cache`              built wheels, kept outside the clone;
`logged_command`     a long command with a progress bar and a log;
`build`              build, cache, install;
`selftest`           two ranks, one allreduce.
"""
