"""Reading data in training: the manifest that data_prep writes, the order of samples, mapped tokens and arrays."""
