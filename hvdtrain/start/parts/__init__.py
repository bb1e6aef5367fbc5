"""Components of the programs in `hvdtrain.start`; none is run by itself."""
