"""All code that uses Keras's private API. Tested with Keras 3.15."""
