"""Dense matrix multiplication."""
