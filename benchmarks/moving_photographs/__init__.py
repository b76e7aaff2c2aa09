"""A video model of moving photographs, on which methods of skipping and sparsity differ."""
