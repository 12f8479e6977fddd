"""What ranks measure of a cluster: links and devices."""
