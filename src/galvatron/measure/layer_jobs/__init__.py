"""What ranks measure of a model's layers."""
