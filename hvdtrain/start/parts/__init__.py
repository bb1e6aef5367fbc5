"""The components of the programs in `hvdtrain.start`; none of them is run by itself."""
