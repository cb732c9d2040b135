"""What every kernel needs around it: the chip, compilation, the compile cache and the errors."""
