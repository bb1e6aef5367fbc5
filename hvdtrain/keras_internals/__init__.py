"""All that reaches into Keras's private parts, one Keras release at a time. Tested with Keras 3.15."""
